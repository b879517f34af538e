# SPDX-License-Identifier: Apache-2.0
"""The HTTPS server that the API server asks before it writes a tier. Off without a certificate.

The certificate is yours: helm, cert-manager or you keep it in a Secret, and a new one is taken up from the files
without a restart. Every operator answers, also one that waits for the lead: judging needs no lead.

kopf's admission server is not used: it lives in an event loop that only the leader would run.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, Final

from kvtier_operator.errors import SettingsInvalid
from kvtier_operator.kube.http_server import EVERYWHERE, SLOWEST_CLIENT_SECONDS, HttpServer, JsonHandler

logger = logging.getLogger(__name__)

PATH: Final = "/validate"
_LONGEST_BODY_BYTES: Final = 8 << 20

_TIMEOUT: Final = re.compile(r"(?:^|&)timeout=([0-9]{1,3})s(?:&|$)")
_USUAL_TIMEOUT_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to one write."""

    refusal: str = ""
    """Why it is refused, with the remedy; empty where it is admitted."""
    warnings: tuple[str, ...] = ()


Judge = Callable[[dict[str, Any], dict[str, Any] | None, float], Verdict]
"""Given the new object, the old one, and the seconds that it may take to read what decides."""


class WebhookServer:
    """Serves `/validate` on threads of its own.

    Threads: one accepts and looks after the certificate; each connection has another one.
    """

    def __init__(self, judge: Judge, *, port: int, certificate: Path, key: Path, host: str = EVERYWHERE) -> None:
        """Load the certificate and listen; `start` starts to answer.

        Raises:
            SettingsInvalid: the certificate or the key cannot be used.
            OSError: the port cannot be listened on.
        """
        self._pair = _Pair(certificate, key)

        class Handler(_Handler):
            pass

        Handler.judge = staticmethod(judge)
        self._server = _Server(host, port, Handler, self._pair)
        self._stop: Callable[[], None] = self._server.server_close

    @property
    def port(self) -> int:
        """Return the port that is listened on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Start to answer."""
        self._stop = self._server.serve_on_thread("webhook")

    def close(self) -> None:
        """Stop listening; who is being answered is answered."""
        self._stop()

    def problem(self) -> str | None:
        """Return what is wrong with the certificate on disk, for the probes: an old one goes on serving."""
        return self._pair.problem


class _Pair:
    """A certificate and its key on disk, loaded anew when they change. One thread."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.problem: str | None = None
        self._loaded: tuple[float, ...] = ()
        self.refresh()
        if self.problem is not None:
            raise SettingsInvalid(f"--webhook-cert and --webhook-key: {self.problem}")

    def refresh(self) -> None:
        """Load what changed. A pair that does not fit is tried again: its second file may still be on its way."""
        try:
            times = tuple(path.stat().st_mtime for path in self._paths)
            if times == self._loaded:
                return
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._paths)  # before the one in use is touched
            self.context.load_cert_chain(*self._paths)
        except (OSError, ssl.SSLError) as error:
            self.problem = f"cannot use {self._paths[0]} with {self._paths[1]}: {error}"
            return
        if self._loaded:
            logger.info("Took up the new certificate of the webhook.")
        self._loaded, self.problem = times, None


class _Server(HttpServer):
    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], pair: _Pair) -> None:
        super().__init__(host, port, handler)
        self._pair = pair

    def get_request(self) -> tuple[socket.socket, Any]:
        """Wrap a connection; it shakes hands on its own thread, where a slow client holds up nobody."""
        connection, address = super().get_request()
        self._pair.refresh()
        connection.settimeout(SLOWEST_CLIENT_SECONDS)
        return self._pair.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  the library's signature
        """Say which client broke off; port scanners and probes do it all the time."""
        logger.debug("A connection from %s ended early.", client_address)


class _Handler(JsonHandler):
    judge: ClassVar[Judge]

    def do_POST(self) -> None:  # noqa: N802  the library's name
        """Answer an AdmissionReview."""
        length = self.headers.get("Content-Length", "")
        if self.path.partition("?")[0] != PATH or not length.isdecimal() or int(length) > _LONGEST_BODY_BYTES:
            self.close_connection = True
            self.answer(400, {"error": f"POST an AdmissionReview to {PATH}"})
            return
        try:
            review = json.loads(self.rfile.read(int(length)))
            request = review["request"]
            uid, new, old = request["uid"], request["object"], request.get("oldObject")
        except (ValueError, KeyError, TypeError):
            self.answer(400, {"error": "this is no AdmissionReview of admission.k8s.io/v1"})
            return
        # The name and the namespace may be missing in an object that is being created.
        metadata = {"namespace": request.get("namespace"), "name": request.get("name") or "", **new.get("metadata", {})}
        self.answer(200, _response(uid, self._judged({**new, "metadata": metadata}, old)))

    def _judged(self, new: dict[str, Any], old: dict[str, Any] | None) -> Verdict:
        try:
            return type(self).judge(new, old, _patience(self.path) / 2)
        except Exception:
            # An edge: a bug of ours must not stand between a person and their cluster.
            logger.exception("A write could not be judged; it is admitted.")
            return Verdict(warnings=("kvtier could not check this write; see the operator's log",))


def _patience(path: str) -> float:
    """Return how many seconds the API server waits for the answer: it adds that to the query."""
    found = _TIMEOUT.search(path.partition("?")[2])
    return float(found[1]) if found is not None and int(found[1]) else _USUAL_TIMEOUT_SECONDS


def _response(uid: str, verdict: Verdict) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": uid, "allowed": not verdict.refusal}
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    if verdict.refusal:
        response["status"] = {"code": 422, "reason": "Invalid", "message": verdict.refusal}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
