# SPDX-License-Identifier: Apache-2.0
"""Where our tier and vLLM's scheduler meet beyond vLLM's interface.

The scheduler knows a request's cache salt and the whole config and does not pass them on, and it looks at requests more
often than it needs to. There is no public way to change either, so functions of vLLM are wrapped: each does what it did
before, and leaves a note or is spared requests that it has nothing to do for. An upgrade of vLLM that moves them fails
in a test; in a pod, what is missing is treated as unknown, or done as often as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload.base import ReqContext

from kvtier_connector.tier import frontier

_MARK = "kvtier_wrapped"


@dataclass(frozen=True, slots=True)
class Salt:
    """The cache salt of a request, which vLLM hashes into its blocks; never shown."""

    value: str | None = field(repr=False)


def install() -> None:
    """Wrap the functions, once in a process."""
    _wrap(scheduler, "_create_req_context", _note_salt)
    offloading = getattr(scheduler, "OffloadingConnectorScheduler", None)
    _wrap(offloading, "__init__", _note_config)
    _wrap(offloading, "_update_req_states", frontier.skip_unchanged)
    _wrap(offloading, "_build_store_jobs", frontier.skip_settled)
    _wrap(offloading, "reset_cache", frontier.look_again)


def _wrap(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(wrap(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)


def _note_salt(original: Callable[..., ReqContext]) -> Callable[..., ReqContext]:
    def create_req_context(req: Any, *args: Any, **kwargs: Any) -> ReqContext:
        context = original(req, *args, **kwargs)
        if hasattr(req, "cache_salt"):
            context.set_state(Salt(req.cache_salt))
        return context

    return create_req_context


def _note_config(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        spec: Any = given.get("spec")
        is_ours = hasattr(spec, "engine_config")
        if is_ours:
            spec.engine_config = given.get("vllm_config")
        original(*args, **kwargs)
        if is_ours:
            frontier.begin(given.get("self"))

    return init
