# SPDX-License-Identifier: Apache-2.0
"""Plain HTTP to an API server, as a client without a library of Kubernetes sends it."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any


class PlainHttp:
    """Sends requests below one address, and ends the watches that it opened."""

    def __init__(self, address: str, *, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._watches = ExitStack()

    def send(  # noqa: PLR0913  what a request is made of
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        media_type: str = "application/json",
        accept: str = "application/json",
        headers: Mapping[str, str] | None = None,
        **query: str,
    ) -> tuple[int, Any]:
        """Return the code and the answer, decoded if it is JSON. Bytes are sent as they are, all else as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": media_type, "Accept": accept, "User-Agent": "tester/1", **(headers or {})}
        url = f"{self._address}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(url, data=data, method=method, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                code, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                code, text = error.code, error.read()
        try:
            return code, json.loads(text)
        except ValueError:
            return code, text.decode()

    def watch(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        url = f"{self._address}{path}?{urllib.parse.urlencode({'watch': 'true', **query})}"
        answer = self._watches.enter_context(urllib.request.urlopen(url, timeout=self._seconds))
        return (json.loads(line) for line in answer)

    def close(self) -> None:
        self._watches.close()


def is_answered(url: str, *, seconds: float = 60.0) -> bool:
    """Tell whether a server says that all is well."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def has_ipv6() -> bool:
    """Say whether a server of this machine can listen on IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
