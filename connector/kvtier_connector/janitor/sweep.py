# SPDX-License-Identifier: Apache-2.0
"""Keeps one tier within its limits, a second of work at a time: look, read journals, count, decide, evict, report.

A failure of the volume is a problem that is reported until it is over; the rest of the work goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.contract.usage import GenerationUsage, Usage
from kvtier_connector.janitor import permit, policy
from kvtier_connector.janitor.catalog import Catalog, SavedCatalog, Sum, load, save
from kvtier_connector.janitor.cleanup import Cleanup
from kvtier_connector.janitor.evict import ActiveFileSystem, Eviction
from kvtier_connector.janitor.follow import JournalFollower
from kvtier_connector.janitor.metrics import JanitorReport, Problems, Tallies, report_of
from kvtier_connector.janitor.walk import Scrub
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.journal import Op

logger = logging.getLogger(__name__)

STEP_SECONDS = 1.0
"""How long one step works before it returns to its caller."""
MOST_SHARE = 0.5
"""A decision to remove more of the tier than this is made anew after a look at every file."""
_SAVE_SECONDS = 600.0
_EXTREMES_SECONDS = 60.0


class TierSweeper:
    """The common part of the sweepers of both layouts.

    Owned by one thread, which may hang in the volume for as long as that does; `report` may be read by any.
    """

    def __init__(  # noqa: PLR0913 - keywords
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
        """Store the settings; `open` begins.

        Args:
            config: The settings; `configure` replaces them.
            fs: The system calls.
            clock: Nanoseconds since 1970 by this host's clock.
            now: Seconds that never go back.
            may_act: Called before each removal: whether this is still the active janitor of the tier.
            is_lasting: Whether it keeps catalog and permit on the volume; a single sweep beside a janitor does not.
            ask_volume: Returns the volume's time as `clock` does, None where it does not tell; by default from a file.
        """
        self.config = config
        self._dir = str(Path(config.tier_dir))
        self._fs = active_fs = ActiveFileSystem(fs, self._dir, may_act=may_act)
        if not is_lasting and ask_volume is None and not may_act():
            # A dry run writes nothing to the volume, and removes nothing by this host's time.
            ask_volume = clock
        ask = ask_volume or (lambda: permit.ask_volume_ns(active_fs, self._dir) if may_act() else None)
        self._clocks = permit.VolumeTime(ask=ask, clock=clock, now=now)
        self._is_lasting = is_lasting
        self._now, self._may_act = now, may_act
        self._began_at = now()
        self._problems = Problems(config.tier, now=now)
        self._tallies = Tallies()
        self._space = policy.Space()
        self._next_look = 0.0
        """When to look at the volume again, by `now`."""
        self.report = JanitorReport(usage=Usage(tier=config.tier), max_bytes=config.max_bytes)
        """The last one; nothing is counted before the first step."""

    def configure(self, config: JanitorConfig) -> None:
        """Follow other settings from the next step on."""
        self.config = config
        self._next_look = 0.0

    @property
    def _is_doubtful(self) -> bool:
        """Whether the volume's clock may have jumped before this janitor began, so that what is in use looks idle."""
        return self._is_lasting and self._now() < self._began_at + permit.HOLD_SECONDS

    def _look_at_clock(self) -> None:
        self._clocks.look()
        self._problems.state("clock", self._clocks.problem)

    def _look_at_space(self) -> None:
        answer = self._fs.statvfs(self._dir)
        total_bytes, free_bytes = answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize
        is_known = 0 < total_bytes < policy.UNBELIEVABLE_BYTES
        self._space = policy.Space(total_bytes, max(0, free_bytes)) if is_known else policy.Space()


class Sweeper(TierSweeper):
    """The sweeper of kvtier's own blocks."""

    def open(self) -> None:
        """Begin, with the catalog of an earlier janitor if the volume has it."""
        config, fs, now = self.config, self._fs, self._now
        self._clock = clock = self._clocks.time_ns
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="kvtier-janitor")
        self.catalog = Catalog()
        self._journals = JournalFollower(self._dir, fs=fs, clock=clock, now=now)
        self._scrub = Scrub(self.catalog, fs=fs, tier_dir=self._dir, pool=self._pool, clock=clock, now=now)
        self._tallies.evicted_blocks.update({reason.value: 0 for reason in policy.EvictionReason})
        self._tallies.evicted_bytes.update({reason.value: 0 for reason in policy.EvictionReason})
        removed = self._tallies.removed_leftovers
        self._cleanup = Cleanup(self._dir, fs=fs, catalog=self.catalog, removed=removed, clock=clock, now=now)
        self._permit = permit.PermitWriter(self._dir, fs=fs, now=now)
        self._is_behind = False
        """Whether decisions wait for journals or files that a step had no time for."""
        self._fruitless: tuple[object, ...] = ()
        self._recount_since: float | None = None
        """When a decision began to wait for a look at every file; None while none does."""
        self._eviction: Eviction | None = None
        self._eviction_began = 0.0
        self._next_save = 0.0
        self._saved_changes = 0
        self._oldest_ns: int | None = None
        self._last_used_ns: dict[int, int] = {}
        self._extremes_at = now()
        self._extremes_of = -1
        with self._problems.trying("catalog"):
            if (saved := load(self.catalog, self._dir, fs=self._fs)) is None:
                return
            self._journals.resume(saved.places, taken_ns=saved.taken_ns)
            # Older journals are removed: their records are lost, and only a walk counts everything again.
            age_seconds = (self._clock() - saved.taken_ns) / 1e9
            is_whole = saved.is_counted and 0 <= age_seconds < self.config.journal_age_seconds
            self._scrub.is_counted = self._scrub.is_whole = is_whole
            self._saved_changes = self.catalog.changes

    def close(self) -> None:
        """Save the catalog; the permit runs out, or the next janitor renews it."""
        if self._may_act():
            self._save()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """Whether everything is counted and nothing waits to be removed."""
        return self._scrub.is_counted and self._eviction is None and not self._is_recounting

    @property
    def _is_recounting(self) -> bool:
        since = self._recount_since
        return since is not None and self._scrub.recounted_at < since and not self._cannot_walk

    def plan(self) -> policy.Choice:
        """Return the decision of the policy as of now; nothing is removed."""
        return self._choose(self._limits())

    def finish(self, on_progress: Callable[[float, int, int], None] = lambda _share, _blocks, _bytes: None) -> None:
        """Work until everything is counted and done, or the volume refuses to be walked."""
        while (self.step() == 0 or not self.is_idle) and not self._cannot_walk:
            removed = 0.0 if self._eviction is None else self._eviction.share
            on_progress((self._scrub.share + removed) / 2, self.catalog.total.blocks, self.catalog.total.bytes)
        self._publish(is_time=True)

    def step(self) -> float:
        """Work for about a second; return after how many seconds there is something to do again."""
        ends = self._now() + STEP_SECONDS

        def has_time() -> bool:
            return self._now() < ends

        def may_go_on() -> bool:
            return has_time() and self._may_act()

        if is_time := self._now() >= self._next_look:
            self._next_look = self._now() + self.config.sweep_seconds
            self._look()
        # Journals that a step had no time for are read in the next one.
        if is_time or self._eviction is not None or not self._journals.has_read_all:
            self._read_journals(has_time)
        self._walk(has_time)
        # Decisions that wait for journals or files are made in the step that has read or seen the last of them.
        is_due = is_time or self._is_behind
        self._is_behind = is_due and (self._is_recounting or not self._journals.has_read_all)
        if is_due and self._may_act() and "volume" not in self._problems:
            self._decide()
            self._renew_permit()
        self._evict(may_go_on)
        if is_time and self._may_act() and "volume" not in self._problems:
            if self._clocks.is_known:
                self._remove_others(may_go_on)
            self._save_if_due()
        self._publish(is_time)
        return self._pause_seconds()

    def _pause_seconds(self) -> float:
        """Return after how many seconds there is something to do again."""
        is_busy = (
            self._eviction is not None
            or not self._journals.has_read_all
            or self._is_recounting
            or (not self._scrub.is_counted and not self._cannot_walk)
        )
        # While the generations cannot be listed, nothing is walked either.
        wake = self._next_look if "volume" in self._problems else min(self._next_look, self._scrub.next_at)
        return 0.0 if is_busy else max(0.0, min(wake - self._now(), self.config.sweep_seconds))

    @property
    def _cannot_walk(self) -> bool:
        return "walk" in self._problems or "volume" in self._problems

    def _look(self) -> None:
        self._look_at_clock()
        was_away = "volume" in self._problems
        with self._problems.trying("volume"):
            self._problems.state("generation", self._cleanup.look())
            if was_away:
                # Blocks looked at meanwhile were taken for gone.
                self._scrub.is_whole = False
                self._scrub.recount()
        with self._problems.trying("space"):
            self._look_at_space()

    def _read_journals(self, has_time: Callable[[], bool]) -> None:
        for digest, records in self._journals.read(self._cleanup.digests, has_time):
            self._scrub.apply(digest, records)
            if any(record.op == Op.GONE and not record.payload_bytes for record in records):
                self._cleanup.note_damage()
        self._problems.state("journals", self._journals.problem)
        self._scrub.resolve(has_time)
        self._problems.state("look", self._scrub.look_problem)

    def _walk(self, has_time: Callable[[], bool]) -> None:
        """Walk on, once all journals were read: a block that a journal names need not be opened for its header."""
        is_due = self._now() >= self._scrub.next_at
        if not is_due or not self._journals.has_read_all or "volume" in self._problems:
            return
        with self._problems.trying("walk"):
            age_seconds = min(self.config.partial_age_seconds, self.config.ttl_seconds or math.inf)
            self._scrub.step(
                self._cleanup.digests,
                verify_seconds=self.config.verify_seconds,
                partials_age_seconds=age_seconds if self._clocks.is_known and self._may_act() else None,
                may_go_on=has_time,
            )
        self._problems.state("unread", self._scrub.problem)
        self._problems.state("partials", self._scrub.partials_problem)
        self._tallies.removed_leftovers["partial"] += self._scrub.removed_partials
        self._scrub.removed_partials = 0

    def _decide(self) -> None:
        if (
            self._eviction is not None
            or self._is_recounting
            or not self._journals.has_read_all
            or not self._scrub.is_counted
        ):
            return
        self.catalog.compact()
        self._look_at_extremes()
        limits = self._limits()
        used_bytes = self.catalog.total.bytes
        if not policy.is_due(limits, used_bytes=used_bytes, oldest_ns=self._oldest_ns):
            self._recount_since = None
            return
        # A decision without effect is not repeated: for a million blocks it takes a second.
        situation = (self.catalog.changes, self.config, self._space.free_bytes)
        of_age = policy.Limits(expire_before=limits.expire_before)
        is_expired = policy.is_due(of_age, used_bytes=0, oldest_ns=self._oldest_ns)
        if situation == self._fruitless and not is_expired:
            return
        choice = self._choose(limits)
        sizes = self.catalog.rows["size"]
        is_large = sum(int(sizes[rows].sum()) for _, rows in choice) > MOST_SHARE * used_bytes
        if is_large and self._recount_since is None:
            self._recount_since, self._is_behind = self._now(), True
            self._scrub.recount()
            return
        self._recount_since = None
        self._fruitless = () if choice else situation
        if choice:
            self._eviction_began = self._now()
            catalog, fs, pool = self.catalog, self._fs, self._pool
            self._eviction = Eviction(choice, catalog=catalog, fs=fs, tier_dir=self._dir, pool=pool, clock=self._clock)

    def _choose(self, limits: policy.Limits) -> policy.Choice:
        blocks, rows = self.catalog.columns(self._cleanup.order(self.config.current))
        return [(reason, rows[chosen]) for reason, chosen in policy.choose(blocks, limits)]

    def _limits(self) -> policy.Limits:
        limits = policy.make_limits(
            self.config,
            self._space,
            tenants=self.catalog.tenants,
            used=self._used_by_tenant(),
            other_bytes=self._other_bytes(),
            now_ns=self._clock(),
        )
        if limits.high_bytes:
            # With less room than a block engines stop, so by then there must be something to evict.
            most = min(limits.high_bytes, self.config.max_bytes - self.catalog.largest_bytes)
            limits = replace(limits, high_bytes=max(limits.low_bytes, most))
        before_ns = limits.expire_before
        is_held = before_ns is not None and self._is_doubtful and self.catalog.expire_most(before_ns)
        self._problems.state("ttl", permit.TTL_HELD if is_held else "")
        return replace(limits, expire_before=None) if is_held or not self._clocks.is_known else limits

    def _used_by_tenant(self) -> dict[int, int]:
        return {tenant: each.bytes for tenant, each in self.catalog.sums("tenant").items()}

    def _other_bytes(self) -> int:
        return sum(each.bytes for each in self._cleanup.quarantined.values()) + self._scrub.partial_bytes

    def _evict(self, may_go_on: Callable[[], bool]) -> None:
        eviction = self._eviction
        if eviction is None:
            return
        with self._problems.trying("remove"):
            while not eviction.is_done and "volume" not in self._problems and may_go_on():
                self._fs.require_mount(self._dir)
                eviction.step()
                self._read_journals(may_go_on)
        if eviction.is_done or "remove" in self._problems or "volume" in self._problems or not self._may_act():
            self._tallies.evicted_blocks += eviction.removed
            self._tallies.evicted_bytes += eviction.freed_bytes
            self._tallies.spared_blocks += eviction.spared
            self._tallies.end_sweep(seconds=self._now() - self._eviction_began, ended=self._clock() / 1e9)
            self._eviction = None
            self._extremes_of, self._extremes_at = -1, self._now()

    def _renew_permit(self) -> None:
        """Let engines store; where the janitor cannot count, it does not renew the permit, and they stop."""
        if not self._is_lasting:
            return
        room = policy.make_room(
            self.config,
            self._space,
            used_bytes=self.catalog.total.bytes + self._other_bytes() + self._scrub.unseen_bytes,
            is_paused=bool(self._permit.reason),
            is_full=self._problems.is_full,
        )
        is_limited = room.bytes is not None or bool(self.config.quotas or self.config.default_quota_bytes)
        if is_limited and not (self._scrub.is_whole and self._journals.has_read_all):
            return
        before = self._permit.reason
        with self._problems.trying("permit"):
            # The directory above must be there, if the volume is new.
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(self._dir)
            self._permit.renew(
                room,
                used_bytes=self.catalog.total.bytes,
                writers=self._journals.writers,
                largest_bytes=self.catalog.largest_bytes,
                tenants=self._tenants_over_quota(),
                knows_writes=lambda is_early: not is_limited or self._knows_writes(is_early=is_early),
            )
        if bool(before) != bool(self._permit.reason):
            logger.warning("%s: %s", self.config.tier, self._permit.reason or "engines may store again")

    def _knows_writes(self, *, is_early: bool) -> bool:
        """Return whether the janitor knows what was written under earlier permits; if not, begin to find out.

        An idle journal is opened once a minute, so within four permits that come in time. Others may come at any rate.
        Blocks of an unreadable journal are known by a walk since it last grew, or since the last permit.
        """
        since = max(self._permit.renewed_at, self._began_at)
        if self._scrub.walked_at < min(since, self._journals.unread_since):
            self._scrub.hurry(since)
            return False
        if is_early and not self._journals.has_opened_all(since):
            self._next_look = 0.0
            return False
        return True

    def _tenants_over_quota(self) -> list[str]:
        """Return the tenants that may not store; one stays refused until it is below the high mark."""
        config, refused, found = self.config, self._permit.tenants, []
        for number, used in self._used_by_tenant().items():
            tenant = self.catalog.tenants[number]
            quota = policy.quota_of(config, tenant)
            if quota and used > quota * (config.high_watermark if tenant in refused else 1.0):
                found.append(tenant)
        return found

    def _remove_others(self, may_go_on: Callable[[], bool]) -> None:
        """Remove generations and files that are no blocks of a generation in use."""
        config = self.config
        if self._now() >= self._cleanup.retire_at:
            with self._problems.trying("generations"):
                if not self._cleanup.retire(config, may_go_on, is_held=self._is_doubtful):
                    self._next_look = 0.0
        if self._now() >= self._cleanup.leftovers_at:
            with self._problems.trying("tidy"):
                self._cleanup.remove_leftovers(config)

    def _save_if_due(self) -> None:
        if self._scrub.is_counted and self._now() >= self._next_save and self._eviction is None:
            self._next_save = self._now() + _SAVE_SECONDS
            # Blocks that could not be removed are tried again in their turn.
            self.catalog.refused.clear()
            if self.catalog.changes != self._saved_changes:
                self._save()

    def _save(self) -> None:
        if not self._is_lasting or not self._cleanup.generations:
            return
        with self._problems.trying("catalog"):
            saved = SavedCatalog(self._clock(), self._journals.places(), self._scrub.is_whole)
            save(self.catalog, saved, self._dir, fs=self._fs)
            self._saved_changes = self.catalog.changes

    def _look_at_extremes(self) -> None:
        """Find the oldest block and the last use of each generation, once a minute: it takes a pass over all rows."""
        if self._extremes_of == self.catalog.changes or self._now() < self._extremes_at:
            return
        self._extremes_of, self._extremes_at = self.catalog.changes, self._now() + _EXTREMES_SECONDS
        self._oldest_ns, self._last_used_ns = self.catalog.extremes()

    def _publish(self, is_time: bool) -> None:
        if not is_time and self._eviction is None:
            return
        self._look_at_extremes()
        quarantined = Sum().plus(*self._cleanup.quarantined.values())
        base = JanitorReport(
            usage=Usage(
                tier=self.config.tier,
                is_active=True,
                is_counted=self._scrub.is_counted,
                volume_bytes=self._space.total_bytes,
                volume_free_bytes=self._space.free_bytes,
                oldest=(self._oldest_ns or 0) / 1e9,
                store_pause=self._permit.reason,
                quarantined=quarantined.blocks,
                generations=[
                    GenerationUsage(digest=each.digest, created=each.created_ns / 1e9)
                    for each in sorted(self._cleanup.generations, key=lambda each: each.digest)
                ],
            ),
            max_bytes=self.config.max_bytes,
            quarantined_bytes=quarantined.bytes,
            damaged_records=self._journals.damaged,
            problems=dict(self._problems.messages),
        )
        # A retained block counts as used when its time is over.
        last_used_ns = {number: min(used, self._clock()) for number, used in self._last_used_ns.items()}
        self.report = report_of(self.catalog, self._tallies, base, last_used_ns=last_used_ns)
