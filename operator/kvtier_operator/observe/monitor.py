# SPDX-License-Identifier: Apache-2.0
"""Asks the engines of every tier in the background, rarely and within deadlines; a reconcile never waits for it.

A tier costs two small requests each ten minutes to each engine, and two short prompts after each rollout and every few
hours. A failed attempt is repeated later each time.

Threads: `findings` and `forget` may be called from any thread, and one lock guards the records. Everything else is on
the loop of the HTTP client. A tier is asked by one task at a time, so its record has one writer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier_operator.names import TierName
from kvtier_operator.observe import canary
from kvtier_operator.observe.canary import Replica
from kvtier_operator.observe.engine_client import EngineError, EngineLocked, HttpEngine, KeySource
from kvtier_operator.observe.findings import (
    CanaryOutcome,
    CanaryResult,
    CounterSample,
    Findings,
    judge_effect,
    keep_sample,
)
from kvtier_operator.observe.http_client import HttpClient
from kvtier_operator.observe.pod_reports import EngineCounters
from kvtier_operator.observe.targets import EngineTarget, ObservationPlan

logger = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 600.0
"""How often the counters of engines are read."""
DELAY_SECONDS: Final = 5.0
"""After a rollout, before the first canary: engines have just begun to serve."""
RETRY_SECONDS: Final = 60.0
"""After a canary that showed nothing; doubled each time, up to the interval."""
PATIENCE: Final = 3
"""Canaries in a row that must have missed before it is told: an engine under load may not get to storing one."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    ask: ObservationPlan
    due: float
    """When the next canary is sent."""
    failures: int = 0
    misses: int = 0
    samples: tuple[CounterSample, ...] = ()
    sample_due: float = 0.0
    findings: Findings = field(default_factory=Findings)


class Monitor:
    """The findings of each tier, and the tasks that make them."""

    def __init__(  # noqa: PLR0913  what it is wired to, with the defaults of production
        self,
        http_client: HttpClient,
        on_change: Callable[[TierName], None],
        *,
        connect: Callable[[TierName, str, str], HttpEngine] | None = None,
        read_key: Callable[[TierName, KeySource], str] = lambda _tier, source: source.literal,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        delay_seconds: float = DELAY_SECONDS,
    ) -> None:
        """Store; the first call of `findings` asks.

        `on_change` is called on the thread of the loop; `read_key` may block, or raise `EngineLocked`.
        """
        self._http = http_client
        self._on_change = on_change
        self._connect = connect or (lambda tier, address, key: HttpEngine(http_client, address, owner=tier, key=key))
        self._read_key = read_key
        self._now = now
        self._delay_seconds = delay_seconds
        self._waiting = canary.Waiting(now=now, pause=pause)
        self._lock = threading.Lock()
        self._records: dict[TierName, _Record] = {}
        self._timers: dict[TierName, asyncio.TimerHandle] = {}
        self._busy: dict[TierName, bool] = {}
        """Tiers that are being asked, and whether to look after them again at once."""

    def findings(self, tier: TierName, ask: ObservationPlan, *, proven_rollout: str | None) -> Findings:
        """Return the findings so far, and have the tier asked when it is due.

        A rollout that its status already speaks of is proven again in its turn.
        """
        with self._lock:
            known = self._records.get(tier)
            if known is None:
                record = self._begin(ask, is_proven=proven_rollout == ask.rollout)
            elif known.ask.rollout != ask.rollout:
                findings = replace(known.findings, canary=None)
                due = self._now() + self._delay_seconds
                record = replace(known, ask=ask, findings=findings, due=due, failures=0, misses=0, samples=())
            else:
                record = replace(known, ask=ask)
            self._records[tier] = record
        if known is None or (known.ask.rollout, known.ask.refusal, known.ask.targets) != (
            ask.rollout,
            ask.refusal,
            ask.targets,
        ):
            self._http.call(self._look_after, tier)
        return record.findings

    def forget(self, tier: TierName) -> None:
        """Drop a tier that is gone."""
        with self._lock:
            is_known = self._records.pop(tier, None) is not None
        if is_known:
            self._http.call(self._look_after, tier)

    def _begin(self, ask: ObservationPlan, *, is_proven: bool) -> _Record:
        """Make the first record; where the status speaks of it already, thousands of tiers are not asked at once."""
        now, share = self._now(), random.random() if is_proven else 0.0  # noqa: S311  no secret
        due = now + max(share * ask.interval_seconds, self._delay_seconds)
        return _Record(ask=ask, due=due, sample_due=now + share * SAMPLE_SECONDS)

    def _look_after(self, tier: TierName) -> None:
        timer = self._timers.pop(tier, None)
        if timer is not None:
            timer.cancel()
        if tier in self._busy:
            self._busy[tier] = True
        else:
            self._busy[tier] = False
            self._http.spawn(self._work(tier))

    async def _work(self, tier: TierName) -> None:
        wait: float | None = RETRY_SECONDS
        try:
            wait = await self._ask_if_due(tier)
        except Exception:
            # The edge of the task: a tier that breaks it is asked again, and holds up no other one.
            logger.exception("%s could not be asked; it is tried again.", tier)
        if self._busy.pop(tier):
            self._look_after(tier)
        elif wait is not None:
            self._timers[tier] = self._http.call_later(wait, self._look_after, tier)

    async def _ask_if_due(self, tier: TierName) -> float | None:
        """Do what is due, and return in how many seconds something is again; None where that needs another look."""
        with self._lock:
            record = self._records.get(tier)
        if record is None or not record.ask.targets:
            return None
        now, updated = self._now(), record
        if record.sample_due <= now:
            updated = await self._sample(tier, updated, now)
        if record.ask.refusal is None and record.due <= now:
            updated = await self._send(tier, updated)
        self._store(tier, record, updated)
        due = [updated.sample_due] if updated.ask.refusal is not None else [updated.sample_due, updated.due]
        return max(1.0, min(due) - self._now())

    def _store(self, tier: TierName, before: _Record, after: _Record) -> None:
        """Keep what was found, unless the engines it was found with have been replaced since."""
        with self._lock:
            current = self._records.get(tier)
            if current is None or current.ask.rollout != before.ask.rollout:
                return
            self._records[tier] = replace(after, ask=current.ask)
        if after.findings != before.findings:
            self._on_change(tier)

    async def _sample(self, tier: TierName, record: _Record, now: float) -> _Record:
        read = await asyncio.gather(*(self._read(tier, target) for target in record.ask.targets))
        readings = {target.pod: each for target, each in zip(record.ask.targets, read, strict=True) if each is not None}
        samples = keep_sample(record.samples, CounterSample(at=now, readings=readings))
        found, before = judge_effect(samples), record.findings.effect
        if found is None or (before is not None and before.verdict == found.verdict):
            found = before
        findings = replace(record.findings, effect=found)
        return replace(record, samples=samples, findings=findings, sample_due=now + SAMPLE_SECONDS)

    async def _read(self, tier: TierName, target: EngineTarget) -> EngineCounters | None:
        try:
            return await self._connect(tier, target.address, "").metrics()
        except EngineError as error:
            logger.debug("pod %s %s", target.pod, error)
            return None

    async def _send(self, tier: TierName, record: _Record) -> _Record:
        ask, found = record.ask, await self._ask(tier, record.ask)
        if found.outcome.is_proof:
            due = self._now() + ask.interval_seconds * random.uniform(0.9, 1.0)  # noqa: S311  no secret
            known = record.findings.canary
            is_new = known is None or not known.outcome.is_proof
            findings = replace(record.findings, canary=found) if is_new else record.findings
            return replace(record, due=due, failures=0, misses=0, findings=findings)
        failures = record.failures + 1
        misses = record.misses + 1 if found.outcome.is_disproof else 0
        # A key that is given to the operator changes nothing else that would tell.
        longest = SAMPLE_SECONDS if found.outcome is CanaryOutcome.LOCKED else ask.interval_seconds
        due = self._now() + min(RETRY_SECONDS * 2 ** min(failures - 1, 16), longest)
        findings = replace(record.findings, canary=self._worth_telling(record.findings.canary, found, misses))
        return replace(record, due=due, failures=failures, misses=misses, findings=findings)

    async def _ask(self, tier: TierName, ask: ObservationPlan) -> CanaryResult:
        """Send a canary, each way in its turn."""
        first, second = ask.targets[:2]
        if random.random() < 0.5:  # noqa: PLR2004, S311  no secret
            first, second = second, first
        try:
            key = "" if ask.key is None else await asyncio.to_thread(self._read_key, tier, ask.key)
            replicas = [
                Replica(name=each.pod, engine=self._connect(tier, each.address, key)) for each in (first, second)
            ]
        except EngineLocked as error:
            return CanaryResult(outcome=CanaryOutcome.LOCKED, first=first.pod, second=second.pod, problem=str(error))
        return await canary.run(
            *replicas, chunk=ask.chunk, min_reuse=ask.min_reuse, waiting=self._waiting, subjects=ask.subjects
        )

    @staticmethod
    def _worth_telling(known: CanaryResult | None, found: CanaryResult, misses: int) -> CanaryResult | None:
        """Return what to tell: a proof stands until it is disproved, and a disproof needs patience."""
        if found.outcome.is_disproof:
            return found if misses >= PATIENCE else known
        if known is not None and (known.outcome.is_proof or known.outcome.is_disproof):
            return known
        # The same failure with the other pod changes nothing.
        return known if known is not None and known.outcome is found.outcome else found
