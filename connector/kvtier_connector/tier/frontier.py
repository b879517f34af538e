# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM's offloading scheduler from looking, in each step, at requests that have nothing left to store.

vLLM walks over every running request in every step, twice: once to note new blocks, once to find what is to be stored.
With `offload_prompt_only`, a request whose prompt is stored has nothing to offer until it ends, yet it is most of what
runs. In a decode step that takes milliseconds this walk is what offloading costs. So such requests are left out of both
walks. Whatever could give them something to store again brings them back: they are scheduled anew, or the cache is
reset. A request that ends is never left out.

The methods are wrapped and not copied, so vLLM's own code decides everything else. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

ATTRIBUTE = "kvtier_settled"
"""On vLLM's scheduler: the requests that have nothing left to store. A scheduler without it is left alone."""


class _Changed:
    """An object of vLLM's with some attributes replaced."""

    def __init__(self, original: Any, **changes: Any) -> None:
        self._original = original
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def begin(scheduler: Any) -> None:
    """Have the wrapped methods leave requests out for this scheduler, if nothing but prompts is stored."""
    if getattr(getattr(scheduler, "config", None), "offload_prompt_only", False):
        setattr(scheduler, ATTRIBUTE, set())


def skip_unchanged(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap ``_update_req_states``: a settled request without a new block has no news."""

    def update_req_states(scheduler: Any, scheduler_output: Any) -> None:
        settled: set[str] | None = getattr(scheduler, ATTRIBUTE, None)
        if settled:
            cached = scheduler_output.scheduled_cached_reqs
            settled.difference_update(cached.resumed_req_ids)
            settled.difference_update(request.req_id for request in scheduler_output.scheduled_new_reqs)
            kept = [
                (request, blocks)
                for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
                if blocks is not None or request not in settled
            ]
            if len(kept) < len(cached.req_ids):
                requests, blocks = _split(kept)
                fewer = _Changed(cached, req_ids=requests, new_block_ids=blocks)
                scheduler_output = _Changed(scheduler_output, scheduled_cached_reqs=fewer)
        original(scheduler, scheduler_output)

    return update_req_states


def skip_settled(original: Callable[[Any, Any], dict[int, Any]]) -> Callable[[Any, Any], dict[int, Any]]:
    """Wrap ``_build_store_jobs``: a settled request is not looked at again before it ends."""

    def build_store_jobs(scheduler: Any, scheduler_output: Any) -> dict[int, Any]:
        settled: set[str] | None = getattr(scheduler, ATTRIBUTE, None)
        if settled is None:
            return original(scheduler, scheduler_output)
        settled.difference_update(scheduler_output.finished_req_ids or ())
        scheduled = scheduler_output.num_scheduled_tokens
        wanted = {request: tokens for request, tokens in scheduled.items() if request not in settled}
        jobs = original(scheduler, _Changed(scheduler_output, num_scheduled_tokens=wanted))
        settled.update(request for request in wanted if _is_settled(scheduler, request))
        return jobs

    return build_store_jobs


def look_again(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset_cache``, after which every prompt is stored anew."""

    def reset_cache(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        getattr(scheduler, ATTRIBUTE, set()).clear()
        original(scheduler, *args, **kwargs)

    return reset_cache


def _is_settled(scheduler: Any, request: str) -> bool:
    """Say whether every chunk that the request may ever offer while it runs has been offered."""
    state = scheduler._req_status.get(request)  # noqa: SLF001 - the methods of this object that are wrapped use it
    if state is None:
        return False
    tokens = state.req.num_prompt_tokens
    if state.max_offload_tokens is not None:
        tokens = min(tokens, state.max_offload_tokens)
    return all(
        group.next_stored_chunk_idx >= tokens // config.tokens_per_chunk
        for config, group in zip(scheduler.config.kv_group_configs, state.group_states, strict=True)
    )


def _split(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
