# SPDX-License-Identifier: Apache-2.0
"""Counts how often blocks were asked for before, on a sample of them, so that users can choose ``minReuse``.

The hash of a block decides whether it belongs to the sample, so each request finds the same ones. The sample remembers
as many requests as the filter of ``minReuse`` does, and counts whether that filter is on or off. It is pure memory of
one engine. Scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from vllm.v1.kv_offload.base import OffloadKey

from kvtier_connector.cascade.memory import keep_last
from kvtier_connector.vllm_adapter import metrics

SAMPLED_OF = 16
"""One block of so many is counted, a divisor of 256."""
REMEMBERED_CHUNKS = 1 << 17
"""The last blocks asked for that count as asked for before, sampled or not."""
_MOST = len(metrics.ASKED_BEFORE) - 1


class ReuseSample:
    """See the module."""

    def __init__(self, stats: metrics.Stats, *, remembered: int = REMEMBERED_CHUNKS) -> None:
        """Start without a count; `remembered` is the number of blocks, sampled or not."""
        self._stats = stats
        self._remembered = remembered // SAMPLED_OF
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()
        """Of the sampled blocks, the requests that asked for each; the block asked for last comes last."""

    def note_request(self, keys: Iterable[OffloadKey]) -> None:
        """Count a request that asks for these blocks."""
        asked: Counter[int] = Counter()
        for key in [key for key in keys if not key[0] % SAMPLED_OF]:
            before = self._counts.get(key, 0)
            keep_last(self._counts, key, before + 1, most=self._remembered)
            asked[min(before, _MOST)] += 1
        for before, count in asked.items():
            self._stats.count(metrics.ASKED_BLOCKS, count * SAMPLED_OF, cause=metrics.ASKED_BEFORE[before])
