# SPDX-License-Identifier: Apache-2.0
"""A client's wishes about the cache for one request: leave it out, or keep it for a time. Pure.

It comes as ``kv_transfer_params``, which HTTP has, and as ``kv_hints``, vLLM's envelope of actions, which its engine
API has; ``kv_transfer_params`` may hold the same envelope. All of it is a client's: what cannot be understood is
ignored and named, and is never a reason not to serve. Values are never shown, since a client may write anything there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from vllm.v1.kv_offload.base import Locality, Medium

from kvtier_connector.contract.engine import TENANT_PARAMETER

LOAD_PARAMETER: Final = "kvtier_load"
"""Anything but true: nothing of the prompt is read from the CPU tier or the volume."""
STORE_PARAMETER: Final = "kvtier_store"
"""Anything but true: nothing of the request is written to the CPU tier or the volume."""
HINTS_PARAMETER: Final = "kv_hints"
"""The envelope, as an object with the names of vLLM's."""
LONGEST_RETENTION_SECONDS: Final = 30 * 86_400.0
"""The most that a client may ask for, and the default."""
MOST_ACTIONS: Final = 64
"""Of one request that are looked at, and directives of one of them."""

RETAIN: Final = "kv.retain"
NO_LOAD: Final = "no_load"
NO_STORE: Final = "no_store"

_TIERS = "kv_load_tiers"
_OF_VLLM = frozenset({"max_load_tokens", "max_offload_tokens", _TIERS})
_OF_OTHERS = frozenset({"transfer_id", "tp_size", "pp_size", "prompt_token_ids", TENANT_PARAMETER})
"""Known to vLLM or read elsewhere; who reads them says what is wrong with them, as far as vLLM does not show it."""
_PARTS_OF_TIERS = {
    "medium": frozenset(medium.value for medium in Medium),
    "locality": frozenset(locality.value for locality in Locality),
}
_OF_OTHER_CONNECTORS = ("do_remote_", "remote_", "_", "lmcache")
_DIRECTIVE = frozenset({"start", "end", "priority", "duration"})
_MOST_PRIORITY = 100
_SHOWN = re.compile(r"(kv[._-]|kvtier_|max_)[A-Za-z0-9_.-]{0,24}", re.ASCII)
"""Names like ours, so that a typing error is seen; any other may be a secret in the wrong place."""


class HintProblem(NamedTuple):
    """Something that was ignored."""

    cause: str
    """``key``, ``value``, ``action``, ``version`` or ``payload``."""
    name: str
    """Of the key or the action, as far as it can be shown."""


class Retention(NamedTuple):
    """The beginning of a prompt that is to be kept."""

    seconds: float
    tokens: int | None
    """How many; None for all."""


class Hints(NamedTuple):
    """The wishes of one request."""

    may_load: bool = True
    may_store: bool = True
    retained: Retention | None = None
    problems: tuple[HintProblem, ...] = ()

    @property
    def taken(self) -> Iterator[str]:
        """Name what is done for it."""
        wanted = {RETAIN: self.retained is not None, NO_LOAD: not self.may_load, NO_STORE: not self.may_store}
        return (name for name, is_wanted in wanted.items() if is_wanted)


NO_HINTS: Final = Hints()


def _understood(key: str, value: Any) -> Any:
    """Return as much of a parameter of vLLM's as it understands; None if that is nothing."""
    if key != _TIERS:
        return value if type(value) is int and value >= 0 else None
    known = [entry for entry in value if _is_tier(entry)] if isinstance(value, list) else []
    return known if known or value == [] else None


def _is_tier(entry: Any) -> bool:
    """Say whether vLLM knows what the entry of a list of tiers means."""
    return isinstance(entry, dict) and all(
        entry.get(name) is None or (isinstance(entry[name], str) and entry[name].upper() in known)
        for name, known in _PARTS_OF_TIERS.items()
    )


def parse_hints(params: Any, envelope: Any) -> tuple[Hints, dict[Any, Any] | None]:
    """Return what a request asks for, with all that had to be ignored, and the parameters that vLLM may be shown.

    vLLM would write the values of the others to its log. Parameters of another type than a dictionary become None.

    Args:
        params: Its ``kv_transfer_params``.
        envelope: Its ``kv_hints``, vLLM's object; None if it has none.
    """
    if not params and envelope is None:
        return NO_HINTS, None
    parser = _Parser()
    understood = None
    if isinstance(params, dict):
        understood = parser.take_params(params)
    elif params is not None:
        parser.ignore("value", "kv_transfer_params")
    if envelope is not None:
        parser.take_actions(getattr(envelope, "protocol_version", None), getattr(envelope, "actions", None))
    return parser.hints(), understood


class _Parser:
    def __init__(self) -> None:
        self._may = {LOAD_PARAMETER: True, STORE_PARAMETER: True}
        self._retained: Retention | None = None
        self._problems: list[HintProblem] = []

    def hints(self) -> Hints:
        return Hints(
            self._may[LOAD_PARAMETER], self._may[STORE_PARAMETER], self._retained, tuple(dict.fromkeys(self._problems))
        )

    def ignore(self, cause: str, name: Any) -> None:
        is_shown = isinstance(name, str) and _SHOWN.fullmatch(name)
        self._problems.append(HintProblem(cause, str(name) if is_shown else "(not shown)"))

    def take_params(self, params: dict[Any, Any]) -> dict[Any, Any]:
        understood = dict(params)
        for key, value in params.items():
            if key in self._may:
                # Who writes "false" wants a private prompt, and a misspelt one is not to be public.
                self._may[key] = value is True
                if not isinstance(value, bool):
                    self.ignore("value", key)
            elif key == HINTS_PARAMETER:
                if isinstance(value, Mapping):
                    self.take_actions(value.get("protocol_version", "0.1"), value.get("actions"))
                else:
                    self.ignore("value", key)
            elif key in _OF_VLLM:
                understood[key] = _understood(key, value)
                if understood[key] != value:
                    self.ignore("value", key)
            elif not isinstance(key, str) or not (key in _OF_OTHERS or key.startswith(_OF_OTHER_CONNECTORS)):
                self.ignore("key", key)
        return understood

    def take_actions(self, version: Any, actions: Any) -> None:
        if version not in ("0.1", "1.0"):
            self.ignore("version", HINTS_PARAMETER)
            return
        if not isinstance(actions, list | tuple) or len(actions) > MOST_ACTIONS:
            self.ignore("value", HINTS_PARAMETER)
            return
        for action in actions:
            read = action.get if isinstance(action, Mapping) else lambda name, _=None, of=action: getattr(of, name, _)
            self._take_action(read("action_type"), read("action_version", "1.0"), read("payload", {}))

    def _take_action(self, kind: Any, version: Any, payload: Any) -> None:
        if kind != RETAIN:
            self.ignore("action", kind)
        elif not isinstance(version, str) or version.partition(".")[0] != "1":
            self.ignore("version", kind)
        elif not isinstance(payload, Mapping):
            self.ignore("payload", kind)
        else:
            self._retain(payload)

    def _retain(self, payload: Mapping[Any, Any]) -> None:
        directives = payload.get("directives", [{}])
        is_list = isinstance(directives, list | tuple) and len(directives) <= MOST_ACTIONS
        if not payload.keys() <= {"directives", "scope"} or not is_list:
            self.ignore("payload", RETAIN)
            return
        for directive in directives:
            if not isinstance(directive, Mapping) or not _is_sound(directive):
                self.ignore("payload", RETAIN)
            elif directive.get("priority", _MOST_PRIORITY) > 0:
                self._keep(directive)

    def _keep(self, directive: Mapping[str, Any]) -> None:
        """Keep the longest beginning for the longest time: a block is of use only with all blocks before it."""
        duration, end = directive.get("duration"), directive.get("end")
        seconds = LONGEST_RETENTION_SECONDS if duration is None else float(min(duration, LONGEST_RETENTION_SECONDS))
        if (before := self._retained) is not None:
            seconds = max(seconds, before.seconds)
            end = None if end is None or before.tokens is None else max(end, before.tokens)
        self._retained = Retention(seconds, end)


def _is_sound(directive: Mapping[Any, Any]) -> bool:
    start, end = directive.get("start", 0), directive.get("end")
    priority, duration = directive.get("priority", _MOST_PRIORITY), directive.get("duration")
    is_range = _is_count(start) and (end is None or (_is_count(end) and end > start))
    is_time = duration is None or (
        isinstance(duration, int | float) and not isinstance(duration, bool) and 0 <= duration < float("inf")
    )
    is_priority = _is_count(priority) and priority <= _MOST_PRIORITY
    return directive.keys() <= _DIRECTIVE and is_range and is_time and is_priority


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
