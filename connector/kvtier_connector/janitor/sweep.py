# SPDX-License-Identifier: Apache-2.0
"""Keeps one tier within its budget, a second of work at a time: look, listen, count, decide, remove, tell.

A fault of the volume is a problem that is stated until it is over; whatever else can be done is done meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.catalog import (
    Extremes,
    Ledger,
    Snapshot,
    expire_most,
    load,
    make_blocks,
    save,
    sum_of,
    used_by_tenant,
)
from kvtier_connector.janitor.cleanup import Generation, Retirement, Tidy, find_generations, make_ages
from kvtier_connector.janitor.evict import ActiveFileSystem, Eviction
from kvtier_connector.janitor.follow import News
from kvtier_connector.janitor.metrics import Look, Problems, Report, Tallies, make_report
from kvtier_connector.janitor.permit import HELD, BrakeWriter, Clocks, make_tier_directory
from kvtier_connector.janitor.pins import read_pins
from kvtier_connector.janitor.policy import Choice, Limits, Space, brake_reason, choose, is_due, make_limits, make_space
from kvtier_connector.janitor.walk import Patrol
from kvtier_connector.store.fs import LOCAL, FileSystem

logger = logging.getLogger(__name__)

STEP_SECONDS = 1.0
"""How long one step works before it lets its caller look around."""
MOST_SHARE = 0.5
"""A sweep that would remove more of the tier than this looks at every file anew before it begins."""
_MOST_UNCONFIRMED = 1 << 16
_SAVE_SECONDS = 600.0
_MOST_MET = 4096


class Keeper:
    """Owned by one thread, which may hang in the volume for as long as that does; `report` may be read by any."""

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        config: JanitorConfig,
        *,
        fs: FileSystem = LOCAL,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
        may_act: Callable[[], bool] = lambda: True,
        is_lasting: bool = True,
        ask_volume: Callable[[], int | None] | None = None,
    ) -> None:
        """Store the settings; nothing is read or written yet.

        Args:
            config: The settings; `configure` replaces them.
            fs: The system calls.
            clock: Nanoseconds since 1970.
            now: Seconds that never go back.
            may_act: Asked before each batch of removals: whether this is still the active janitor of the tier.
            is_lasting: Whether it keeps ledger and brake on the volume; what runs once beside a janitor does not.
            ask_volume: What time it is on the volume, as `clock`, None where it does not say; by default a file tells.
        """
        self.config = config
        self._dir = str(Path(config.tier_dir))
        self._fs = fs = ActiveFileSystem(fs, self._dir, may_act=may_act)
        self._brake = BrakeWriter(self._dir, fs=fs, clock=clock)
        # A dry run writes nothing to the volume, and removes nothing by this host's time.
        refused = clock if not is_lasting else lambda: None
        ask = ask_volume or (lambda: self._brake.ask_time_ns() if may_act() else refused())
        self._clocks = Clocks(ask=ask, is_starting=is_lasting, clock=clock, now=now)
        self._clock = clock = self._clocks.time_ns
        self._now = now
        self._may_act = may_act
        self._is_lasting = is_lasting
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="kvtier-janitor")
        self.ledger = Ledger()
        self._news = News(self._dir, self.ledger, fs=fs, clock=clock)
        self._patrol = Patrol(self.ledger, fs=fs, tier_dir=self._dir, pool=self._pool, clock=clock, now=now)
        self._generations: list[Generation] = []
        self._retirement = Retirement(self._dir, fs=fs, clock=clock, own_writers=lambda: self._news.tokens)
        self._pins: dict[str, bytes] | None = None
        self._space = Space()
        self._is_hurried = False
        self._has_heard_all = True
        self._fruitless: tuple[object, ...] = ()
        self._is_recounted = False
        """Whether every file is being looked at for the next decision, or was."""
        self._is_confirming = False
        self._eviction: Eviction | None = None
        self._eviction_began = 0.0
        self._next_look = 0.0
        self._next_save = now() + _SAVE_SECONDS
        self._saved_changes = 0
        self._extremes = Extremes(self.ledger, now=now)
        self._problems = Problems(config.tier, now=now)
        self._published: tuple[int, Look | None, int] = (-1, None, 0)
        self.tallies = Tallies()
        removed = self.tallies.removed_leftovers
        self._tidy = Tidy(self._dir, fs=fs, ledger=self.ledger, removed=removed, now=now)
        self.report: Report | None = None
        """The last one; None before the first step."""

    def open(self, *, is_walked_anew: bool = False) -> None:
        """Take over what an earlier janitor knew, if the volume has it; if asked, walk all of it all the same."""
        with self._problems.trying("ledger"):
            if (snapshot := load(self.ledger, Path(self._dir), fs=self._fs)) is not None:
                self._pins = snapshot.pins or None
                self._news = News(
                    self._dir,
                    self.ledger,
                    fs=self._fs,
                    clock=self._clock,
                    places=snapshot.places,
                    taken_ns=snapshot.taken_ns,
                )
                # Journals older than that are removed: what they told is lost, and only a walk counts everything again.
                age_seconds = (self._clock() - snapshot.taken_ns) / 1e9
                if 0 <= age_seconds < self.config.journal_age_seconds and not is_walked_anew:
                    self._patrol.resume(snapshot.walked_ns, unread=snapshot.unread)
                self._saved_changes = self.ledger.changes

    def configure(self, config: JanitorConfig) -> None:
        """Follow other settings from the next step on."""
        self.config = config
        self._is_hurried = True

    def step(self) -> float:
        """Work for about a second; return after how many seconds there is something to do again."""
        ends = self._now() + STEP_SECONDS

        def has_time() -> bool:
            return self._now() < ends

        def may_go_on() -> bool:
            return has_time() and self._may_act()

        is_time = self._is_hurried or self._now() >= self._next_look
        self._is_hurried = False
        if is_time:
            self._look()
        # What a step had no time for is heard in the next one, and not only when it is time to look again.
        if is_time or self._eviction is not None or not self._has_heard_all:
            self._listen(has_time)
        self._meet(has_time)
        if self._has_heard_all:
            # Whatever a journal tells of need not be opened for its header.
            self._patrol_once(has_time)
        self._confirm(has_time)
        if is_time and self._may_act():
            self._decide()
        self._evict(may_go_on)
        if is_time and self._may_act():
            self._brake_or_let_go()
            with self._problems.trying("tell"):
                self._news.flush()
            if self._clocks.is_known:
                self._give_up_generations(may_go_on)
                self._remove_leftovers(may_go_on)
            self._save_if_due()
        if is_time:
            self._next_look = self._now() + self.config.sweep_seconds
        self._publish(is_time)
        is_busy = (
            self._is_hurried
            or self._eviction is not None
            or not self._has_heard_all
            or self._is_confirming
            or (not self._patrol.is_counted and not self._cannot_walk)
        )
        # While the generations cannot be listed, nothing is walked either.
        wake = self._next_look if "volume" in self._problems else min(self._next_look, self._patrol.next_at)
        return 0.0 if is_busy else max(0.0, min(wake - self._now(), self.config.sweep_seconds))

    @property
    def is_idle(self) -> bool:
        """Whether everything is counted and nothing waits to be removed."""
        return self._patrol.is_counted and self._eviction is None and not self._is_confirming

    def plan(self) -> Choice:
        """Return what the policy would remove now; nothing is removed."""
        with self._problems.trying("look"):
            self._patrol.confirm(lambda: True)
        return self._choose(self._limits())

    def finish(self, tell: Callable[[float, int, int], None] = lambda _share, _blocks, _bytes: None) -> None:
        """Work until everything is counted and done, or the volume refuses to be walked."""
        while (self.step() == 0 or not self.is_idle) and not self._cannot_walk:
            removed = 0.0 if self._eviction is None else self._eviction.share
            tell((self._patrol.share + removed) / 2, self.ledger.total.blocks, self.ledger.total.bytes)

    def close(self) -> None:
        """Save what is known; leave the brake to run out, or to the next janitor."""
        if self._may_act():
            with self._problems.trying("tell"):
                self._news.flush()
            self._save()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        self._clocks.look()
        self._problems.state("clock", self._clocks.problem)
        with self._problems.trying("volume"):
            self._generations = find_generations(self._fs, self._dir, self._generations)
            problems = (f"generation: {each.problem}" for each in self._generations if each.problem)
            self._problems.state("generation", next(problems, ""))
        with self._problems.trying("space"):
            answer = self._fs.statvfs(self._dir)
            self._space = make_space(answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize)
        with self._problems.trying("pins"):
            self._pins = read_pins(Path(self._dir), fs=self._fs, known=self._pins or {})

    def _listen(self, has_time: Callable[[], bool] = lambda: True) -> None:
        # A journal that cannot be read holds up nothing else.
        self._has_heard_all = True
        with self._problems.trying("journals"):
            self._has_heard_all = self._news.follow(self._digests(), has_time)

    def _meet(self, has_time: Callable[[], bool]) -> None:
        """Ask the volume about blocks that somebody used and nobody told of."""
        for (digest, key), used_ns in list(self._news.doubtful.items())[:_MOST_MET]:
            # Mostly the journal of the engine that stored it was read after that of the one that used it.
            generation = self.ledger.generation(digest)
            unknown = [key] if self.ledger.find(generation, key) < 0 else []
            del self._news.doubtful[digest, key]
            self._news.doubtful |= {(digest, each): 0 for each in self._patrol.meet(digest, unknown, has_time)}
            if (row := self.ledger.find(generation, key)) >= 0:
                self.ledger.use(row, used_ns)

    def _patrol_once(self, has_time: Callable[[], bool]) -> None:
        if "volume" in self._problems:
            # Which generations there are is not known, and what is not walked would be taken for gone.
            return
        with self._problems.trying("walk"):
            self._patrol.step(self._digests(), verify_seconds=self.config.verify_seconds, may_go_on=has_time)
        self._problems.state("unread", self._patrol.problem)

    @property
    def _cannot_walk(self) -> bool:
        return "walk" in self._problems or "volume" in self._problems

    def _confirm(self, has_time: Callable[[], bool]) -> None:
        """Look at blocks that are known from journals only, before any of their bytes decides anything."""
        ledger = self.ledger
        if not self._is_confirming:
            self._is_confirming = ledger.unconfirmed.blocks > 0 and (
                ledger.has_suspects or ledger.unconfirmed.blocks > _MOST_UNCONFIRMED or self._is_due(self._limits())
            )
        if self._is_confirming:
            with self._problems.trying("look"):
                self._is_confirming = not self._patrol.confirm(has_time)
            if "look" in self._problems:
                # Blocks that cannot be looked at hold up no decision about the others.
                self._is_confirming = False
            if not self._is_confirming:
                self._extremes.forget()
                self._extremes.refresh()

    def _is_due(self, limits: Limits) -> bool:
        return is_due(limits, used=used_by_tenant(self.ledger), oldest_ns=self._extremes.oldest_ns)

    def _decide(self) -> None:
        if self._eviction is not None or not self._has_heard_all:
            return
        if self._is_confirming:
            self._is_hurried = True
            return
        self.ledger.compact()
        limits = self._limits()
        self._extremes.refresh()
        if not self._patrol.is_counted or not self._is_due(limits):
            self._is_recounted = False
            self._state_missing(0)
            return
        # What nothing can be done about is not decided again and again: that takes a second for a million blocks.
        pins = tuple((self._pins or {}).values())
        is_expired = is_due(Limits(expire_before=limits.expire_before), used={}, oldest_ns=self._extremes.oldest_ns)
        situation = (self.ledger.changes, self.config, pins, self._space.free_bytes)
        if situation == self._fruitless and not is_expired:
            return
        choice = self._choose(limits)
        self._state_missing(0 if self.ledger.unconfirmed.blocks else choice.missing_bytes)
        if self._is_too_much(choice) and not self._is_recounted:
            self.ledger.unconfirm_all()
            self._is_recounted = self._is_hurried = self._is_confirming = True
            return
        self._is_recounted = False
        self._fruitless = () if choice.rows.size else situation
        if choice.rows.size:
            self._eviction_began = self._now()
            self._eviction = Eviction(
                choice,
                ledger=self.ledger,
                news=self._news,
                fs=self._fs,
                tier_dir=self._dir,
                pool=self._pool,
                clock=self._clock,
            )

    def _is_too_much(self, choice: Choice) -> bool:
        """Whether so much is to be removed that every file is to be looked at before."""
        counted = self.ledger.total.minus(self.ledger.unconfirmed).bytes
        return int(self.ledger.rows["size"][choice.rows].sum()) > MOST_SHARE * counted

    def _evict(self, may_go_on: Callable[[], bool]) -> None:
        eviction = self._eviction
        if eviction is None:
            return
        with self._problems.trying("remove"):
            while not eviction.is_done and may_go_on():
                eviction.step(lambda digest: self._retirement.is_in_use(digest, self.config))
                with self._problems.trying("tell"):
                    self._news.flush()
                self._listen()
        if eviction.is_done or "remove" in self._problems or not self._may_act():
            seconds = self._now() - self._eviction_began
            self.tallies.add_sweep(eviction, seconds=seconds, ended=self._clock() / 1e9)
            self._eviction = None
            self._extremes.forget()

    def _brake_or_let_go(self) -> None:
        if not self._is_lasting:
            return
        used = self.ledger.total.minus(self.ledger.unconfirmed).bytes + self._other_bytes()
        reason = brake_reason(
            self.config,
            self._space,
            used_bytes=used,
            is_braking=bool(self._brake.reason),
            is_full=self._problems.is_full,
        )
        before = self._brake.reason
        with self._problems.trying("brake"):
            make_tier_directory(self._fs, self._dir)
            self._brake.set(reason)
        if bool(before) != bool(self._brake.reason):
            self._news.ring()
            logger.warning("%s: %s", self.config.tier, self._brake.reason or "engines may store again")

    def _give_up_generations(self, may_go_on: Callable[[], bool]) -> None:
        with self._problems.trying("generations"):
            for digest, is_gone in self._retirement.step(self._generations, self.config, may_go_on):
                if not is_gone:
                    self._is_hurried = True
                    continue
                self.ledger.drop_generation(self.ledger.generation(digest))
                self._news.forget(digest)
                self._generations = [each for each in self._generations if each.digest != digest]
                self._tidy.quarantined.pop(digest, None)
                self.tallies.removed_leftovers["generation"] += 1

    def _remove_leftovers(self, may_go_on: Callable[[], bool]) -> None:
        config, now_ns = self.config, self._clock()
        with self._problems.trying("partials"):
            before_ns = now_ns - int(make_ages(config).partial * 1e9)
            self.tallies.removed_leftovers["partial"] += self._patrol.remove_partials(before_ns, may_go_on)
        if self._tidy.is_due:
            with self._problems.trying("tidy"):
                self._tidy.step(self._digests(), make_ages(config), now_ns=now_ns)

    def _save_if_due(self) -> None:
        is_first = self._patrol.is_counted and self._saved_changes == 0 and self.ledger.changes > 0
        if (is_first or self._now() >= self._next_save) and self._eviction is None:
            self._next_save = self._now() + _SAVE_SECONDS
            if self.ledger.changes != self._saved_changes:
                self._save()

    def _save(self) -> None:
        if not self._is_lasting or not self._generations:
            return
        with self._problems.trying("ledger"):
            patrol = self._patrol
            snapshot = Snapshot(
                taken_ns=self._clock(),
                pins=self._pins or {},
                places=self._news.places(),
                walked_ns=patrol.walked_ns,
                unread=[(*where, why) for where, why in patrol.unread.items()],
            )
            save(self.ledger, snapshot, Path(self._dir), fs=self._fs)
            self._saved_changes = self.ledger.changes

    def _choose(self, limits: Limits) -> Choice:
        order = self._retirement.order(self._generations, self.config)
        blocks, rows = make_blocks(
            self.ledger, order=order, pins=set((self._pins or {}).values()), is_aging=limits.expire_before is not None
        )
        choice = choose(blocks, limits)
        return replace(choice, rows=rows[choice.rows])

    def _limits(self) -> Limits:
        limits = make_limits(
            self.config,
            self._space,
            tenants=self.ledger.tenants,
            used=used_by_tenant(self.ledger),
            other_bytes=self._other_bytes(),
            now_ns=self._clock(),
        )
        before_ns = limits.expire_before
        is_held = before_ns is not None and self._clocks.is_doubtful and expire_most(self.ledger, before_ns)
        self._problems.state("ttl", HELD if is_held else "")
        if is_held or not self._clocks.is_known:
            limits = replace(limits, expire_before=None)
        # Pins that were never read may hold any block, but not against its time to live.
        return limits if self._pins is not None else Limits(expire_before=limits.expire_before)

    def _other_bytes(self) -> int:
        quarantined = sum(each.bytes for each in self._tidy.quarantined.values())
        return quarantined + sum(self._patrol.partials.values())

    def _digests(self) -> list[str]:
        return [each.digest for each in self._generations]

    def _state_missing(self, missing_bytes: int) -> None:
        message = f"{missing_bytes} bytes above the limits are pinned: take some out of pins.json, or raise the limits"
        self._problems.state("pinned", message if missing_bytes else "")

    def _publish(self, is_time: bool) -> None:
        if not is_time and self._eviction is None and self.report is not None:
            return
        self._extremes.refresh()
        look = Look(
            tier=self.config.tier,
            is_counted=self._patrol.is_counted,
            space=self._space,
            brake=self._brake.reason,
            quarantined=sum_of(self._tidy.quarantined.values()),
            damaged_records=self._news.damaged,
            created={each.digest: each.created_ns for each in self._generations},
            problems=dict(self._problems.messages),
            max_bytes=self.config.max_bytes,
            oldest_ns=self._extremes.oldest_ns,
            # What is retained counts as used last when its time is over.
            last_used_ns={at: min(used, self._clock()) for at, used in self._extremes.last_used_ns.items()},
        )
        state = (self.ledger.changes, look, self.tallies.sweeps)
        if state != self._published:
            self._published = state
            self.report = make_report(self.ledger, look, self.tallies)
