# SPDX-License-Identifier: Apache-2.0
"""What vLLM decided for a step, with something left out: for its walks over everything that runs.

vLLM's objects stay as they are; a walk is given one that reads as the original does, but for some attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput


class Changed:
    """An object of vLLM's with some attributes replaced."""

    def __init__(self, original: Any, **changes: Any) -> None:
        """Put it before the original."""
        self._original = original
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        """Read what is not replaced."""
        return getattr(self._original, name)


def without_unchanged(output: SchedulerOutput, settled: set[str]) -> Any:
    """Return the output without the settled requests that have no new block: they have no news.

    Those that begin anew in this step are taken out of `settled`.
    """
    cached = output.scheduled_cached_reqs
    settled.difference_update(cached.resumed_req_ids)
    settled.difference_update(request.req_id for request in output.scheduled_new_reqs)
    kept = [
        (name, blocks)
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if blocks is not None or name not in settled
    ]
    if len(kept) == len(cached.req_ids):
        return output
    fewer = Changed(cached, req_ids=[name for name, _ in kept], new_block_ids=[blocks for _, blocks in kept])
    return Changed(output, scheduled_cached_reqs=fewer)


def without_handoffs(output: SchedulerOutput, is_wanted: Callable[[str, int], bool]) -> Any:
    """Return the output with those states to be stored only that are wanted, by request and token at which it ends."""
    state = output.kv_connector_block_state
    if state is None or not state.boundary_state_offloads:
        return output
    kept = {
        name: [entry for entry in entries if is_wanted(name, entry[2])]
        for name, entries in state.boundary_state_offloads.items()
    }
    return Changed(output, kv_connector_block_state=Changed(state, boundary_state_offloads=kept))
