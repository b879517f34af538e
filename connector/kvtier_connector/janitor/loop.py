# SPDX-License-Identifier: Apache-2.0
"""Runs the janitor of one tier while it holds the Lease, on a thread that the volume may hold up.

`Loop.run` is for the main thread, which never waits for the volume. A volume that hangs is a reported problem and no
reason to restart the process: the next one would hang, too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier_connector.contract.errors import ConfigInvalid, LeaseConflict, LeaseUnavailable
from kvtier_connector.contract.janitor import FIXED_FIELDS, VLLM_FS_LAYOUT, JanitorConfig, decode
from kvtier_connector.contract.lease import Elector, LeaseApi, LeaseObject, LeaseSettings
from kvtier_connector.contract.usage import Usage
from kvtier_connector.janitor.events import EventFeed
from kvtier_connector.janitor.metrics import JanitorReport
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.janitor.vllm_files import VllmFilesSweeper

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 2.5
"""Time-out of each request about the Lease: several must fit into its deadline."""
TICK_SECONDS = 1.0
HANG_SECONDS = 30.0
"""A step that takes longer is reported as a hanging volume."""
STUCK_SECONDS = 60.0
"""A main loop that did not turn for so long is stuck."""
_CONFLICT = frozenset({404, 409})

AnySweeper = Sweeper | VllmFilesSweeper


def make_elector(config: JanitorConfig) -> Elector | None:
    """Return the elector of the Lease that the settings name; None where this is the only janitor, as on a laptop.

    Raises:
        LeaseUnavailable: there is a Lease to hold, and no way to reach the cluster.
    """
    if not config.lease_name:
        return None
    settings = LeaseSettings(
        namespace=config.lease_namespace,
        name=config.lease_name,
        identity=f"{config.identity or socket.gethostname()}_{uuid.uuid4()}",
    )
    return Elector(lease_api(settings), settings)


def lease_api(settings: LeaseSettings) -> LeaseApi:
    """Return access to the Lease with the account of the pod or of the user."""
    # A second and 25 MB that a laptop does without.
    from kubernetes import client  # noqa: PLC0415 - takes a second
    from kubernetes import config as kubernetes_config  # noqa: PLC0415 - takes a second
    from kubernetes.config.config_exception import ConfigException  # noqa: PLC0415 - takes a second
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - takes a second

    try:
        try:
            kubernetes_config.load_incluster_config()
        except ConfigException:
            # Named here, since the library reads the environment only once, when it is imported.
            kubernetes_config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except ConfigException as error:
        raise LeaseUnavailable(f"lease_name={settings.name!r}: no cluster is configured: {error}") from error
    leases: Any = client.CoordinationV1Api()
    common: dict[str, Any] = {"_preload_content": False, "_request_timeout": REQUEST_SECONDS}

    def send(request: Callable[[], Any]) -> LeaseObject:
        try:
            lease: LeaseObject = json.loads(request().data)
        except client.ApiException as error:
            kind = LeaseConflict if error.status in _CONFLICT else LeaseUnavailable
            raise kind(f"{error.status} {error.reason}") from error
        except (HTTPError, OSError, ValueError) as error:
            raise LeaseUnavailable(str(error)) from error
        return lease

    def get() -> LeaseObject | None:
        try:
            return send(lambda: leases.read_namespaced_lease(settings.name, settings.namespace, **common))
        except LeaseConflict:
            return None

    return LeaseApi(
        get=get,
        create=lambda lease: send(lambda: leases.create_namespaced_lease(settings.namespace, lease, **common)),
        update=lambda lease: send(
            lambda: leases.replace_namespaced_lease(settings.name, settings.namespace, lease, **common)
        ),
    )


def make_sweeper(config: JanitorConfig, may_act: Callable[[], bool]) -> AnySweeper:
    """Return the sweeper for the layout of the tier's files."""
    return (VllmFilesSweeper if config.layout == VLLM_FS_LAYOUT else Sweeper)(config, may_act=may_act)


class Loop:
    """The janitor of one tier.

    `_sweep` runs on its own thread and owns the sweeper; `run` owns the rest. `_config`, `_step_began` and `_turned_at`
    are replaced as a whole by one thread and read by others.
    """

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        config: JanitorConfig,
        *,
        is_leader: Callable[[], bool] = lambda: True,
        config_file: Path | None = None,
        feed: EventFeed | None = None,
        make: Callable[[JanitorConfig, Callable[[], bool]], AnySweeper] = make_sweeper,
        now: Callable[[], float] = time.monotonic,
        hang_seconds: float = HANG_SECONDS,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        """Store the settings.

        Any thread calls `is_leader`: whether this process is the active janitor now. The `config_file` is read again
        and again, and followed. Each term of office has a sweeper of its own.
        """
        self._config = config
        self._is_leader = is_leader
        self._config_file = config_file
        self._feed = feed
        self._make = make
        self._now = now
        self._hang_seconds = hang_seconds
        self._tick_seconds = tick_seconds
        self._stop = threading.Event()
        self._turned_at = now()
        self._step_began: float | None = None
        self._report: JanitorReport | None = None
        self._failure = ""
        self._config_problem = ""
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """End `run`; may be called from any thread and from a signal handler."""
        self._stop.set()

    def run(self) -> bool:
        """Keep the tier until told to stop; return whether the thread of the sweeper ended."""
        self._thread = threading.Thread(target=self._sweep, name="kvtier-sweeper", daemon=True)
        self._thread.start()
        while not self._stop.wait(self._tick_seconds):
            self._turned_at = self._now()
            self._follow_settings()
        self._thread.join(self._hang_seconds / 2)
        return not self._thread.is_alive()

    def report(self) -> JanitorReport:
        """Return the state as it is now."""
        report = self._report
        if report is None or not self._is_leader():
            report = JanitorReport(usage=Usage(tier=self._config.tier), max_bytes=self._config.max_bytes)
        problems = dict(report.problems)
        began = self._step_began
        if began is not None and self._now() - began > self._hang_seconds:
            problems["hang"] = f"{self._config.tier_dir}: the volume has not answered for a while"
        if self._failure:
            problems["failure"] = self._failure
        if self._config_problem:
            problems["settings"] = self._config_problem
        usage = replace(report.usage, is_active=self._is_leader(), problems=tuple(problems.values()))
        return replace(report, usage=usage, problems=problems)

    def health(self) -> str:
        """Return why this process should be restarted, empty if it should not."""
        silent = self._now() - self._turned_at
        if silent > STUCK_SECONDS:
            return f"the loop has not turned for {silent:.0f} s"
        if self._thread is not None and not self._thread.is_alive() and not self._stop.is_set():
            return "the sweeper's thread has ended"
        return ""

    def _follow_settings(self) -> None:
        if self._config_file is None:
            return
        try:
            config = decode(self._config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, ConfigInvalid) as error:
            self._config_problem = f"{self._config_file}: {error}; staying with the settings before"
            return
        self._config_problem = ""
        changed = [name for name in FIXED_FIELDS if getattr(config, name) != getattr(self._config, name)]
        if changed:
            logger.warning("%s changed, which takes a new process: this one ends", ", ".join(changed))
            self.stop()
            return
        self._config = config

    def _sweep(self) -> None:
        """Serve one term of office after the other, each with a sweeper of its own."""
        while not self._stop.is_set():
            if not self._is_leader():
                self._stop.wait(self._tick_seconds)
                continue
            try:
                self._serve()
            except Exception as error:
                # A bug must not end the janitor of a volume that fills up; it is reported, and tried again.
                logger.exception("the janitor failed; it begins anew")
                self._step_began, self._failure = None, f"the janitor failed: {type(error).__name__}: {error}"
                self._stop.wait(self._config.sweep_seconds)

    def _serve(self) -> None:
        self._step_began, self._report = self._now(), None
        sweeper = self._make(self._config, self._is_leader)
        try:
            sweeper.open()
            # Names of files of vLLM's own tier do not say what they hold.
            feed = self._feed if isinstance(sweeper, Sweeper) else None
            if feed is not None and isinstance(sweeper, Sweeper):
                feed.begin(sweeper.catalog, sweeper.config.current)
            while not self._stop.is_set() and self._is_leader():
                if sweeper.config != self._config:
                    sweeper.configure(self._config)
                self._step_began = self._now()
                pause = sweeper.step()
                if feed is not None:
                    feed.publish(sweeper.config.current)
                self._step_began = None
                self._report, self._failure = sweeper.report, ""
                self._wait(pause, sweeper)
        finally:
            self._step_began = self._now()
            sweeper.close()
            self._step_began = None

    def _wait(self, seconds: float, sweeper: AnySweeper) -> None:
        ends = self._now() + seconds
        while (rest := ends - self._now()) > 0 and self._is_leader() and sweeper.config == self._config:
            if self._stop.wait(min(rest, self._tick_seconds)):
                return
