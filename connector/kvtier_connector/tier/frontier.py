# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM's offloading scheduler from looking, in each step, at requests that have nothing left to store.

vLLM walks over every running request in every step, twice: once to note new blocks, once to find what is to be stored.
With `offload_prompt_only`, a request whose prompt is stored has nothing to offer until it ends, yet it is most of what
runs. In a decode step that takes milliseconds this walk is what offloading costs. So such requests are left out of both
walks. Whatever could give them something to store again brings them back: they are scheduled anew, or the cache is
reset. A request that ends is never left out.

The methods are wrapped and not copied, so vLLM's own code decides everything else. Where another version looks
different inside, every request is walked over as before. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from vllm.logger import init_logger

logger = init_logger("vllm.kvtier.frontier")

_T = TypeVar("_T")

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


def skip_unchanged(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_update_req_states``: a settled request without a new block has no news."""

    def update_req_states(scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        fewer = _attempt(scheduler, lambda settled: _without_unchanged(scheduler_output, settled))
        original(scheduler, scheduler_output if fewer is None else fewer, *args, **kwargs)

    return update_req_states


def skip_settled(original: Callable[..., dict[int, Any]]) -> Callable[..., dict[int, Any]]:
    """Wrap ``_build_store_jobs``: a settled request is not looked at again before it ends."""

    def build_store_jobs(scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        fewer = _attempt(scheduler, lambda settled: _without_settled(scheduler_output, settled))
        jobs = original(scheduler, scheduler_output if fewer is None else fewer, *args, **kwargs)
        if fewer is not None:
            _attempt(scheduler, lambda settled: _add_settled(scheduler, fewer.num_scheduled_tokens, settled))
        return jobs

    return build_store_jobs


def look_again(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset_cache``, after which every prompt is stored anew."""

    def reset_cache(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        getattr(scheduler, ATTRIBUTE, set()).clear()
        original(scheduler, *args, **kwargs)

    return reset_cache


def _attempt(scheduler: Any, work: Callable[[set[str]], _T]) -> _T | None:
    """Do what relies on how vLLM looks inside; where it looks otherwise, leave nobody out from then on."""
    settled: set[str] | None = getattr(scheduler, ATTRIBUTE, None)
    if settled is None:
        return None
    try:
        return work(settled)
    except (AttributeError, TypeError, ValueError) as error:
        logger.warning("This version of vLLM looks at every request in each step (%s)", error)
        delattr(scheduler, ATTRIBUTE)
        return None


def _without_unchanged(scheduler_output: Any, settled: set[str]) -> Any:
    """Return the output without the settled requests that have no new block, None if there is none."""
    if not settled:
        return None
    cached = scheduler_output.scheduled_cached_reqs
    settled.difference_update(cached.resumed_req_ids)
    settled.difference_update(request.req_id for request in scheduler_output.scheduled_new_reqs)
    kept = [
        (request, blocks)
        for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if blocks is not None or request not in settled
    ]
    if len(kept) == len(cached.req_ids):
        return None
    requests, blocks = [request for request, _ in kept], [blocks for _, blocks in kept]
    return _Changed(scheduler_output, scheduled_cached_reqs=_Changed(cached, req_ids=requests, new_block_ids=blocks))


def _without_settled(scheduler_output: Any, settled: set[str]) -> Any:
    settled.difference_update(scheduler_output.finished_req_ids or ())
    scheduled = scheduler_output.num_scheduled_tokens
    wanted = {request: tokens for request, tokens in scheduled.items() if request not in settled}
    return _Changed(scheduler_output, num_scheduled_tokens=wanted)


def _add_settled(scheduler: Any, requests: Iterable[str], settled: set[str]) -> None:
    settled.update(request for request in requests if _is_settled(scheduler, request))


def _is_settled(scheduler: Any, request: str) -> bool:
    """Say whether every chunk that the request may ever offer while it runs has been offered."""
    state = scheduler._req_status.get(request)  # noqa: SLF001 - the methods of this object that are wrapped use it
    if state is None:
        return False
    tokens = scheduler._calc_num_offloadable_tokens(state, state.req.num_prompt_tokens)  # noqa: SLF001 - as above
    return all(
        group.next_stored_chunk_idx >= tokens // config.tokens_per_chunk
        for config, group in zip(scheduler.config.kv_group_configs, state.group_states, strict=True)
    )
