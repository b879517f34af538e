# SPDX-License-Identifier: Apache-2.0
"""Leader election over one ``coordination.k8s.io/v1`` Lease.

`Election` decides, without a clock and without a cluster. `Elector` runs it on two threads against the client of the
process, given as three callables (`LeaseApi`). Clocks of machines are never compared. The Lease of another holder has
run out when it has not changed for its duration as measured here. The holder stops leading a margin earlier, measured
from before its last renewal was sent. So two processes never both believe to lead, unless the Lease is deleted by hand.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_connector.contract.errors import LeaseConflict, LeaseUnavailable

logger = logging.getLogger(__name__)

LeaseObject = dict[str, Any]
"""A Lease as JSON."""

LONGEST_DURATION_SECONDS: Final = 600
"""A Lease that claims to last longer was not written by us; it would lock everybody out."""


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """Which Lease, as whom, and how fast.

    Raises:
        ValueError: the times do not leave the holder time to stop before another process may start.
    """

    namespace: str
    name: str
    identity: str
    """Unique to this process: ``<pod>_<uuid>``."""
    duration_seconds: int = 12
    """How long a Lease that is not renewed keeps others away."""
    deadline_seconds: float = 8.0
    """How long after its last renewal a holder goes on leading."""
    renew_seconds: float = 4.0
    """How often a holder renews."""
    retry_seconds: float = 1.5
    """After how long what failed is tried again, and how often others look."""

    def __post_init__(self) -> None:
        """Refuse times that could make two leaders."""
        if not 0 < self.retry_seconds <= self.renew_seconds < self.deadline_seconds < self.duration_seconds:
            raise ValueError("a lease needs 0 < retry <= renew < deadline < duration, in seconds")


@dataclass(frozen=True, kw_only=True)
class LeaseApi:
    """How the Lease is read and written; each call should give up after 2 to 3 seconds.

    Every call raises `LeaseUnavailable` where it cannot tell, and `LeaseConflict` where another process was faster
    (409) or the Lease to update is gone (404).
    """

    get: Callable[[], LeaseObject | None]
    """Return the Lease, or None where there is none."""
    create: Callable[[LeaseObject], LeaseObject]
    """Create the Lease and return it as it then stands."""
    update: Callable[[LeaseObject], LeaseObject]
    """Replace the Lease (PUT) if its resourceVersion is still current, and return it as it then stands."""


class Election:
    """The Lease as this process knows it, and the next action. No clock, no cluster; one thread.

    `now` is everywhere a time in seconds that only grows (``time.monotonic()``) and means nothing elsewhere.
    """

    def __init__(self, settings: LeaseSettings) -> None:
        """Know nothing yet."""
        self._settings = settings
        self._lease: LeaseObject | None = None
        self._record: Mapping[str, Any] | None = None
        self._version: tuple[Any, Any] | None = None
        self._changed_at = -math.inf
        self.held_until = -math.inf
        """Until when this process leads unless it renews; in the past when it does not lead."""

    @property
    def holder(self) -> str:
        """The last known holder of the Lease; empty without one."""
        return str((self._record or {}).get("holderIdentity") or "")

    def saw(self, lease: LeaseObject | None, *, now: float) -> None:
        """Take note of the Lease as it was read."""
        self._lease = lease
        # A Lease that was deleted keeps the newcomer waiting as long as its holder may still believe in it.
        if lease is None or _version(lease) == self._version:
            return
        self._record, self._version, self._changed_at = dict(lease.get("spec") or {}), _version(lease), now
        if self.holder != self._settings.identity:
            self.held_until = -math.inf

    def wrote(self, lease: LeaseObject, *, sent_at: float) -> None:
        """Take note of our write, which was sent at that time and succeeded."""
        self._lease = lease
        self._record, self._version, self._changed_at = dict(lease.get("spec") or {}), _version(lease), sent_at
        is_ours = self.holder == self._settings.identity
        self.held_until = sent_at + self._settings.deadline_seconds if is_ours else -math.inf

    def wanted(self, *, now: float, wall: datetime) -> LeaseObject | None:
        """Return the Lease to write now, None when another process holds it. It has no resourceVersion if it is new."""
        if self.holder not in {"", self._settings.identity} and now < self._expires_at():
            return None
        return self._renewed(wall)

    def released(self, *, wall: datetime) -> LeaseObject | None:
        """Return the Lease given back, so that the next holder need not wait; None when it is not ours."""
        if self._lease is None or self.holder != self._settings.identity:
            return None
        lease = self._renewed(wall)
        lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        return lease

    def wait_seconds(self, *, now: float, is_renewed: bool) -> float:
        """Return how long to wait before the next round."""
        if is_renewed:
            return self._settings.renew_seconds
        rest = self._expires_at() - now
        return rest if 0 < rest < self._settings.retry_seconds else self._settings.retry_seconds

    def _expires_at(self) -> float:
        if self._record is None:
            return -math.inf
        claimed = self._record.get("leaseDurationSeconds")
        if not isinstance(claimed, int) or not 0 < claimed <= LONGEST_DURATION_SECONDS:
            claimed = self._settings.duration_seconds
        return self._changed_at + claimed

    def _renewed(self, wall: datetime) -> LeaseObject:
        settings, stamp = self._settings, wall.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        new: LeaseObject = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": settings.name, "namespace": settings.namespace},
        }
        lease = new if self._lease is None else copy.deepcopy(self._lease)
        before = lease.get("spec") or {}
        is_ours = before.get("holderIdentity") == settings.identity
        transitions = before.get("leaseTransitions") or 0
        lease["spec"] = {
            **before,
            "holderIdentity": settings.identity,
            "leaseDurationSeconds": settings.duration_seconds,
            "acquireTime": before.get("acquireTime") or stamp if is_ours else stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions if is_ours or self._lease is None else transitions + 1,
        }
        return lease


def _version(lease: LeaseObject) -> tuple[Any, Any]:
    # The times in it may stand still with their writer's clock; the version never does.
    return lease["metadata"].get("uid"), lease["metadata"].get("resourceVersion")


class Elector:
    """Takes and keeps the Lease while it runs, and says at any time whether this process leads.

    One thread talks to the API server. The other calls `on_change` in order, even while the first hangs in a request.
    Any thread may call `is_leader`, which needs no request: ask it right before each write.
    """

    def __init__(
        self,
        api: LeaseApi,
        settings: LeaseSettings,
        *,
        on_change: Callable[[bool], None] = lambda _is_leader: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Store the settings; `start` starts both threads.

        `on_change` is called with whether this process leads, each time that this changes. `wall` is the time of day,
        for the people who read the Lease.
        """
        self._api, self._settings, self._on_change = api, settings, on_change
        self._clock, self._wall = clock, wall
        self._election = Election(settings)
        self._is_current = False
        self._is_failing = False
        self._is_stopping = False
        self._held_until = -math.inf
        self._moved = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to campaign."""
        self._threads = [
            threading.Thread(target=self._campaign, name="lease-renew", daemon=True),
            threading.Thread(target=self._tell, name="lease-tell", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def is_leader(self) -> bool:
        """Return whether this process leads at this moment."""
        return self._clock() < self._held_until

    def close(self, *, timeout: float = 5.0) -> None:
        """Stop campaigning and give the Lease back, so that another one can lead at once.

        The work of the leader must have ended before.
        """
        with self._moved:
            self._is_stopping = True
            self._moved.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def step(self) -> float:
        """Do one round of the campaign and return after how many seconds the next one is due.

        The loop of `start` calls it; public for callers with a loop of their own. One thread at a time.
        """
        is_renewed = False
        try:
            is_renewed = self._renew()
            self._is_failing = False
        except LeaseConflict as error:
            logger.info("The lease %s was changed by another process: %s", self._settings.name, error)
            self._is_current = False
        except LeaseUnavailable as error:
            if not self._is_failing:
                logger.warning("The lease %s cannot be read or renewed: %s", self._settings.name, error)
            self._is_current, self._is_failing = False, True
        with self._moved:
            self._held_until = self._election.held_until
            self._moved.notify_all()
        return self._election.wait_seconds(now=self._clock(), is_renewed=is_renewed)

    def release(self) -> None:
        """Stop leading and give the Lease back if it is ours; never raises."""
        with self._moved:
            self._held_until = -math.inf
            self._moved.notify_all()
        try:
            lease = self._election.released(wall=self._wall())
            if lease is not None:
                sent_at = self._clock()
                self._election.wrote(self._api.update(lease), sent_at=sent_at)
        except (LeaseConflict, LeaseUnavailable) as error:
            logger.info("The lease %s was not given back and runs out by itself: %s", self._settings.name, error)

    def _renew(self) -> bool:
        if not self._is_current:
            self._election.saw(self._api.get(), now=self._clock())
            self._is_current = True
        sent_at = self._clock()
        lease = self._election.wanted(now=sent_at, wall=self._wall())
        if lease is None:
            self._is_current = False  # another process holds it: read it again each time
            return False
        write = self._api.update if "resourceVersion" in lease["metadata"] else self._api.create
        self._election.wrote(write(lease), sent_at=sent_at)
        return True

    def _campaign(self) -> None:
        while True:
            try:
                pause = self.step()
            except Exception:
                # A bug of a client must not silence the campaign; the deadline ends our lead meanwhile.
                logger.exception("A round of the election failed unexpectedly; it is tried again.")
                self._is_current, pause = False, self._settings.retry_seconds
            end = self._clock() + pause
            with self._moved:
                while not self._is_stopping and (rest := end - self._clock()) > 0:
                    self._moved.wait(rest)
                if self._is_stopping:
                    break
        self.release()

    def _tell(self) -> None:
        reported = False
        while True:
            with self._moved:
                while (leads := self.is_leader()) == reported and not self._is_stopping:
                    self._moved.wait(self._held_until - self._clock() if reported else None)
                if self._is_stopping and not reported:
                    return
                if leads == reported:  # stopping: the campaign gives the Lease back, which ends the lead
                    self._moved.wait(self._held_until - self._clock())
                    continue
            reported = leads
            logger.info("%s the lease %s.", "Acquired" if leads else "Lost or gave back", self._settings.name)
            self._on_change(leads)
