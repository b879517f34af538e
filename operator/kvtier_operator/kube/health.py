# SPDX-License-Identifier: Apache-2.0
"""What the kubelet is told: ``/healthz`` while this process does its work, ``/readyz`` once it can.

Served by a thread of its own, so that it answers, with the reason, just when the operator is stuck, and already while
it waits for the lead. kopf's own probes live in its event loop, which is not there then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvtier_operator.kube.http_server import EVERYWHERE, HttpServer, JsonHandler

Check = Callable[[], str | None]
"""Returns what is wrong, in words for who reads the pod's events, or None."""


class Health:
    """Named checks, asked at each request. Safe to use from several threads."""

    def __init__(self) -> None:
        """Have nothing to check yet."""
        self._alive: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def alive_if(self, name: str, check: Check) -> None:
        """Let the kubelet restart this process when the check finds something."""
        self._alive = {**self._alive, name: check}

    def ready_if(self, name: str, check: Check) -> None:
        """Let the pod count as not ready when the check finds something."""
        self._ready = {**self._ready, name: check}

    def problems(self, path: str) -> dict[str, str]:
        """Return what is wrong, by the name of the check; a check that fails to answer is wrong, too."""
        checks = self._alive if path == "/healthz" else {**self._alive, **self._ready}
        found: dict[str, str] = {}
        for name, check in checks.items():
            try:
                problem = check()
            except Exception as error:  # noqa: BLE001  an edge: the kubelet must get an answer
                problem = f"cannot be checked: {error!r}"
            if problem is not None:
                found[name] = problem
        return found

    def serve(self, port: int, *, host: str = EVERYWHERE) -> Callable[[], None]:
        """Serve on a thread and return what stops it.

        Raises:
            OSError: the port cannot be listened on.
        """

        class Handler(_Handler):
            health = self

        return HttpServer(host, port, Handler).serve_on_thread("health")


class _Handler(JsonHandler):
    health: ClassVar[Health]

    def do_GET(self) -> None:  # noqa: N802  the library's name
        """Answer a probe."""
        path = self.path.partition("?")[0]
        if path not in {"/healthz", "/readyz"}:
            self.answer(404, {"error": "there are /healthz and /readyz"})
            return
        problems = self.health.problems(path)
        self.answer(503 if problems else 200, {"ok": not problems, "problems": problems})
