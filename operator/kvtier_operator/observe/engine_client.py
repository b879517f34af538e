# SPDX-License-Identifier: Apache-2.0
"""One running engine, asked by the address of its pod, and the key of its API. Every call has a deadline.

The key (vLLM's ``--api-key`` or ``VLLM_API_KEY``) is read right before engines are asked, and kept nowhere. The
operator may read no Secret but those that its installer names, by ``rbac.readSecrets`` of the chart.
"""

from __future__ import annotations

import base64
import http
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.errors import ClusterError, ClusterForbidden
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import ObjectKey, TierName
from kvtier_operator.observe.http_client import Address, HttpClient, HttpRequest
from kvtier_operator.observe.pod_reports import EngineCounters, read_counters

METRICS_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
"""A busy engine lets a prompt wait behind those that came before."""


class EngineError(Exception):
    """An engine did not answer as expected; the message says how, without any address that changes."""


class EngineLocked(EngineError):
    """An engine asks for a key that is missing or not its own; the message never holds one."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model that an engine serves."""

    name: str
    most_tokens: int | None
    """Longest prompt with its answer."""


class HttpEngine:
    """The OpenAI API and the metrics of one engine pod."""

    def __init__(self, http_client: HttpClient, address: str, *, owner: Hashable, key: str = "") -> None:
        """Remember the pod's address (see `EngineTarget`), its tier, and the key of its API: its metrics need none.

        Raises:
            EngineLocked: no request can carry the key.
        """
        if not (key.isascii() and key.isprintable()):
            raise EngineLocked("is asked with a key of characters that no request can carry")
        self._http = http_client
        host, _, port = address.removeprefix("[").partition("]:")
        self._host, self._port = host, int(port or names.HTTP_PORT)
        self._owner = owner
        self._authorization = {"Authorization": f"Bearer {key}"} if key else {}

    async def model(self) -> Served:
        """Return what it serves."""
        found = await self._json("GET", "/v1/models", None, METRICS_SECONDS)
        try:
            first = found["data"][0]
            length = first.get("max_model_len")
            return Served(name=str(first["id"]), most_tokens=length if isinstance(length, int) else None)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError("lists no model at /v1/models") from error

    async def complete(self, model: str, tokens: Sequence[int]) -> int | None:
        """Answer a prompt with one token; return how many of its tokens were cached, None if it does not tell."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        return _cached(await self._json("POST", "/v1/completions", body, ANSWER_SECONDS))

    async def see(self, model: str, words: str, picture: bytes) -> int | None:
        """Answer a picture, as PNG, and the words after it; return what `complete` returns.

        Not more than half of the tokens are none: the beginning of each chat is the model's template, which the engine
        may have in its own cache.
        """
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = await self._json("POST", "/v1/chat/completions", body, ANSWER_SECONDS)
        cached, asked = _cached(answer), _usage(answer).get("prompt_tokens")
        if cached is None or not isinstance(asked, int):
            return None
        return cached if 2 * cached > asked else 0

    async def metrics(self) -> EngineCounters:
        """Return what it has counted so far."""
        return read_counters((await self._ask("GET", "/metrics", None, METRICS_SECONDS)).decode(errors="replace"))

    async def _json(self, method: str, path: str, body: Any, seconds: float) -> Any:
        try:
            return json.loads(await self._ask(method, path, body, seconds))
        except ValueError as error:
            raise EngineError(f"answers {path} with something else than JSON") from error

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> bytes:
        request = HttpRequest(
            address=Address(host=self._host, port=self._port, path=path),
            method=method,
            body=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(self._authorization if path.startswith("/v1/") else {})},
            seconds=seconds,
        )
        try:
            reply = await self._http.send(request, owner=self._owner)
        except OSError as error:
            raise EngineError(f"does not answer {path} ({type(error).__name__})") from error
        if reply.status in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}:
            raise EngineLocked(f"answers {path} with {reply.status}")
        if not reply.is_ok:
            raise EngineError(f"answers {path} with {reply.status}")
        return reply.body


def _usage(answer: Any) -> dict[str, Any]:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return usage if isinstance(usage, dict) else {}


def _cached(answer: Any) -> int | None:
    details = _usage(answer).get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


VARIABLE: Final = "VLLM_API_KEY"
_FLAG: Final = re.compile(r"--api[-_]key(?:=(.*))?$", re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


@dataclass(frozen=True, kw_only=True)
class KeySource:
    """The key itself, where the spec has it, or the entry of a Secret that holds it."""

    literal: str = field(default="", repr=False)
    secret: str = ""
    entry: str = ""
    is_optional: bool = False
    """Engines start without a key where the Secret or the entry is missing."""


def find_key(spec: TierSpec) -> KeySource | None:
    """Return where the key is; None where there is none, or only the pod can read it."""
    given = {str(each["name"]): each for each in spec.engine.env}
    flag = _of_flag(spec.engine.args)
    if flag is None:
        return _of_variable(given.get(VARIABLE))
    named = _REFERENCE.fullmatch(flag)
    if named is not None:
        return _of_variable(given.get(named[1]))
    return None if _REFERENCE.search(flag) else KeySource(literal=flag)


def _of_flag(args: Sequence[str]) -> str | None:
    """Return the first value of the last such flag, as vLLM does."""
    found = None
    for number, word in enumerate(args):
        flag = _FLAG.match(word)
        if flag is None:
            continue
        following = args[number + 1] if number + 1 < len(args) and not args[number + 1].startswith("-") else None
        found = following if flag[1] is None else flag[1]
    return found or None


def _of_variable(variable: Mapping[str, Any] | None) -> KeySource | None:
    if variable is None:
        return None
    secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
    if secret is not None:
        return KeySource(secret=secret["name"], entry=secret["key"], is_optional=bool(secret.get("optional")))
    value = variable.get("value", "")
    return KeySource(literal=value) if value and not _REFERENCE.search(value) else None


def read_key(cluster: Cluster, tier: TierName, source: KeySource) -> str:
    """Return the key; empty where engines go without one.

    Raises:
        EngineLocked: it cannot be read; the message says why, and never what.
    """
    if not source.secret:
        return source.literal
    try:
        found = cluster.get(ObjectKey(api_version="v1", kind="Secret", name=source.secret), tier.namespace)
    except ClusterForbidden as error:
        raise EngineLocked(f"the operator may not read Secret {source.secret}") from error
    except ClusterError as error:
        raise EngineLocked(f"Secret {source.secret} could not be read") from error
    encoded = ((found or {}).get("data") or {}).get(source.entry)
    if encoded is None and source.is_optional:
        return ""
    if encoded is None:
        raise EngineLocked(f"Secret {source.secret} has no entry {source.entry}")
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        # Without its cause, which would show what was to be decoded.
        raise EngineLocked(f"entry {source.entry} of Secret {source.secret} is no text") from None
