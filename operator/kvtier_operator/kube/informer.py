# SPDX-License-Identifier: Apache-2.0
"""Keeps the objects of one kind in memory as the API server has them: a list, and then a watch that goes on from it.

kopf watches the tiers. It does not report what vanished between two of its lists, so tiers are listed here as well.
All other kinds are watched here alone: kopf's indices keep what vanished, hold kilobytes of each object, and end the
process where one kind may not be listed. The informer of the `kubernetes` package keeps objects whole, and tries again
without a pause.

Here, an object that a list does not have any more is reported as deleted. A watch that fails is followed by a list. A
silent connection is given up. A kind that may not be read is a problem of that kind, and is asked for again.

Threads: one for each informer, which alone reads.
"""

from __future__ import annotations

import http
import logging
import random
import threading
import time
from typing import Final

from kvtier_operator.errors import ClusterError, ClusterExpired, ClusterForbidden, ClusterUnavailable, KindMissing
from kvtier_operator.kube.client import Events, KubernetesCluster
from kvtier_operator.kube.object_store import ObjectStore, Scope

logger = logging.getLogger(__name__)

PAGE: Final = 250
"""Objects that are read of a list at a time: parsed, each takes some ten kilobytes."""

WATCH_SECONDS: Final = 300
"""After how long the API server is asked to end a watch; load balancers drop quiet connections without a word."""

LONGEST_PAUSE_SECONDS: Final = 30.0
SHORT_PAUSE_SECONDS: Final = 0.2


class Informer:
    """One kind in one scope."""

    def __init__(
        self, source: KubernetesCluster, scope: Scope, store: ObjectStore, *, list_seconds: float | None = None
    ) -> None:
        """Store; `start` starts. A kind that is not followed is listed once, or again after `list_seconds`."""
        self.scope = scope
        self._source = source
        self._store = store
        self._list_seconds = list_seconds
        self._stopping = threading.Event()
        self._is_answered = threading.Event()
        self._lock = threading.Lock()
        self._stream: Events | None = None
        self._problem: ClusterError | None = None
        self._is_complete = False
        self._well_at = time.monotonic()
        name = f"watch-{scope.kind}-{scope.namespace}".rstrip("-")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start to read."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until everything was read once, or is known to be forbidden, and tell whether it is."""
        return self._is_answered.wait(seconds)

    def stop(self) -> None:
        """Read nothing more."""
        self._stopping.set()
        with self._lock:
            if self._stream is not None:
                self._stream.stop()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    def refusal(self) -> ClusterError | None:
        """Return why what is known of the objects is not to be relied on; None where it is."""
        problem = self._problem
        if problem is not None and (_is_refusal(problem) or not self._is_complete):
            return problem
        return None if self._is_complete else ClusterUnavailable(f"{self.scope} have not been read yet")

    def trouble(self) -> tuple[float, str]:
        """Return for how many seconds nothing could be followed though it may be, and why."""
        problem = self._problem
        if problem is None or _is_refusal(problem):
            return 0.0, ""
        return time.monotonic() - self._well_at, str(problem)

    def _run(self) -> None:
        version, failures = "", 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                version = version or self._read()
                if not self._store.is_followed:
                    self._well()
                    if self._list_seconds is None:
                        return
                    version, failures = "", 0
                    self._stopping.wait(self._list_seconds)
                    continue
                version = self._follow(version)
                failures = 0 if time.monotonic() - began >= 1 else min(failures, 1)
            except ClusterExpired:
                version = ""
            except ClusterError as error:
                failures += 1
                self._failed(error)
                # A list brings the changes that the watch did not.
                version = version if failures < 2 else ""  # noqa: PLR2004  the first one may be a dropped connection
            except Exception as error:
                logger.exception("Watching %s failed unexpectedly; it begins anew.", self.scope)
                self._failed(ClusterUnavailable(f"cannot read {self.scope}: {error}"))
                version, failures = "", failures + 1
            pause = min(SHORT_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS)
            self._stopping.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311  no secret

    def _read(self) -> str:
        uids, version = set[str](), ""
        for page, of_list in self._source.read_all(self.scope, page=PAGE):
            version = version or of_list
            for body in page:
                uids.add(body["metadata"]["uid"])
                self._store.on_update(body)
            if self._stopping.is_set():
                raise ClusterUnavailable(f"reading {self.scope} was interrupted")
        self._store.on_list(self.scope, frozenset(uids), version)
        was_refused, self._is_complete = self._problem is not None and _is_refusal(self._problem), True
        if was_refused:
            logger.info("%s can be read again.", self.scope)
            self._problem = None
            self._store.on_readable(self.scope)
        self._is_answered.set()
        return version

    def _follow(self, version: str) -> str:
        """Tell what changes until the watch ends, and return from where to go on."""
        with self._source.watch(self.scope, version=version, seconds=WATCH_SECONDS) as stream:
            with self._lock:
                self._stream = stream
            try:
                if self._stopping.is_set():
                    return version
                self._well()
                for event in stream:
                    body = event["object"]
                    if event["type"] == "ERROR":
                        text = f"cannot watch {self.scope}: {body.get('code')} {body.get('message', '')}"
                        raise (ClusterExpired if body.get("code") == http.HTTPStatus.GONE else ClusterUnavailable)(text)
                    version = body["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        self._store.on_delete(body)
                    elif event["type"] != "BOOKMARK":
                        self._store.on_update(body)
                return version
            finally:
                with self._lock:
                    self._stream = None

    def _well(self) -> None:
        self._problem, self._well_at = None, time.monotonic()

    def _failed(self, error: ClusterError) -> None:
        if self._stopping.is_set():
            return
        if type(error) is not type(self._problem):
            logger.warning("%s", error)
        if self._problem is None:
            self._well_at = time.monotonic()
        self._problem = error
        if _is_refusal(error):
            self._is_answered.set()


def _is_refusal(error: ClusterError) -> bool:
    return isinstance(error, (ClusterForbidden, KindMissing))
