# SPDX-License-Identifier: Apache-2.0
"""One running engine, asked over HTTP by the address of its pod. Every call has a deadline."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvtier_operator import names
from kvtier_operator.deadlines import within
from kvtier_operator.proof.exposition import Reading, read

METRICS_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
"""A busy engine lets a prompt wait behind those that came before."""
MOST_BYTES: Final = 8 << 20


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


class Engine(Protocol):
    """What a canary needs of an engine; each method may raise `EngineError`."""

    def model(self) -> Served:
        """Return what it serves."""
        ...

    def complete(self, model: str, tokens: Sequence[int]) -> int | None:
        """Answer a prompt with one token; return how many of its tokens were cached, None if it does not tell."""
        ...

    def metrics(self) -> Reading:
        """Return what it has counted so far."""
        ...


class HttpEngine:
    """The OpenAI API and the metrics of one engine pod."""

    def __init__(self, address: str, key: str = "") -> None:
        """Remember the pod's IP address, and the key of its API, which its metrics do without.

        Raises:
            EngineLocked: no request can carry the key.
        """
        if not (key.isascii() and key.isprintable()):
            raise EngineLocked("is asked with a key of characters that no request can carry")
        self._address = address
        self._authorization = {"Authorization": f"Bearer {key}"} if key else {}

    def model(self) -> Served:
        """Return what it serves."""
        found = self._json("GET", "/v1/models", None, METRICS_SECONDS)
        try:
            first = found["data"][0]
            length = first.get("max_model_len")
            return Served(name=str(first["id"]), most_tokens=length if isinstance(length, int) else None)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError("lists no model at /v1/models") from error

    def complete(self, model: str, tokens: Sequence[int]) -> int | None:
        """Answer a prompt with one token; return how many of its tokens were cached, None if it does not tell."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        found = self._json("POST", "/v1/completions", body, ANSWER_SECONDS)
        usage = found.get("usage") if isinstance(found, dict) else None
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if isinstance(cached, int) else None

    def metrics(self) -> Reading:
        """Return what it has counted so far."""
        return read(self._ask("GET", "/metrics", None, METRICS_SECONDS).decode(errors="replace"))

    def _json(self, method: str, path: str, body: Any, seconds: float) -> Any:
        try:
            return json.loads(self._ask(method, path, body, seconds))
        except ValueError as error:
            raise EngineError(f"answers {path} with something else than JSON") from error

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> bytes:
        connection = http.client.HTTPConnection(self._address, names.HTTP_PORT, timeout=seconds)
        try:
            with within(connection, seconds):
                connection.request(
                    method,
                    path,
                    body=None if body is None else json.dumps(body),
                    headers={
                        "Content-Type": "application/json",
                        "Connection": "close",
                        **(self._authorization if path.startswith("/v1/") else {}),
                    },
                )
                answer = connection.getresponse()
                data = answer.read(MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"does not answer {path} ({type(error).__name__})") from error
        finally:
            connection.close()
        if answer.status in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}:
            raise EngineLocked(f"answers {path} with {answer.status}")
        if answer.status != http.HTTPStatus.OK:
            raise EngineError(f"answers {path} with {answer.status}")
        return data
