# SPDX-License-Identifier: Apache-2.0
"""Questions to the volume about chunks of which the index cannot tell yet, and the requests that wait for the answers.

Each question is of one request, and of one prefix of it where it is about one: what follows a chunk of a prefix that is
not there need not be looked for, and that says nothing of other requests, nor of the windows of a prompt, which vLLM
looks for from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvtier_connector.movers.tasks import MOST_PROBED, Lane, Task
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.tier.requests import TierRequest

_NO_PREFIX = -1
"""Stands for the group of chunks that are no prefix."""


class Probes:
    """The scheduler's thread only."""

    def __init__(self) -> None:
        """Start with none."""
        self._waiting: dict[OffloadKey, list[TierRequest]] = {}
        self._unsent: dict[tuple[TierRequest, int], list[tuple[OffloadKey, BlockKey]]] = {}
        self._sent: dict[int, tuple[OffloadKey, ...]] = {}

    @property
    def asked(self) -> Mapping[OffloadKey, object]:
        """The chunks that are asked about."""
        return self._waiting

    @property
    def sent(self) -> Mapping[int, object]:
        """The movers' tasks that have not ended."""
        return self._sent

    def join(self, key: OffloadKey, request: TierRequest) -> bool:
        """Have a request wait for the answer about a chunk; False if nobody asks about it."""
        if (waiting := self._waiting.get(key)) is None:
            return False
        if request not in waiting:
            waiting.append(request)
        return True

    def ask(self, key: OffloadKey, name: BlockKey, request: TierRequest, *, is_prefix: bool) -> None:
        """Ask about a chunk with this step; `is_prefix` if those of its group are asked about in their order."""
        self._waiting[key] = [request]
        group = get_offload_group_idx(key) if is_prefix else _NO_PREFIX
        self._unsent.setdefault((request, group), []).append((key, name))

    def send(self, number: Callable[[], int]) -> list[tuple[int, Task]]:
        """Return the questions of this step for the movers; `number` makes one that no other task has."""
        tasks = []
        for (_, group), wanted in self._unsent.items():
            for first in range(0, len(wanted), MOST_PROBED):
                batch = wanted[first : first + MOST_PROBED]
                task = number()
                self._sent[task] = tuple(key for key, _ in batch)
                names = tuple(name for _, name in batch)
                tasks.append((task, Task(Lane.PROBE, names, is_prefix=group != _NO_PREFIX)))
        self._unsent.clear()
        return tasks

    def end(self, task: int) -> list[tuple[OffloadKey, list[TierRequest]]]:
        """Return the chunks that a task asked about, each with the requests that wait for the answer."""
        return [(key, self._waiting.pop(key)) for key in self._sent.pop(task)]

    def clear(self) -> None:
        """Forget all questions."""
        for each in (self._waiting, self._unsent, self._sent):
            each.clear()
