# SPDX-License-Identifier: Apache-2.0
"""Asks the engines of every tier in the background, rarely and within deadlines; a pass looks and never waits.

A tier costs two small requests each ten minutes to each engine, and two short prompts after each rollout and every few
hours. Threads are few, so a thousand tiers take their turns; what did not work is tried again later each time.

Threads: `look` and `forget` may be called from any thread and one lock guards all fields; asking runs outside it. A
tier is asked by one thread at a time, as the queue promises, so its record has one writer.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier_operator.names import TierName
from kvtier_operator.proof import canary, effect
from kvtier_operator.proof.asking import Ask
from kvtier_operator.proof.effect import Sample
from kvtier_operator.proof.engine import Engine, EngineError, EngineLocked, HttpEngine
from kvtier_operator.proof.exposition import Reading
from kvtier_operator.proof.findings import Canary, CanaryOutcome, Findings
from kvtier_operator.proof.keys import KeySource
from kvtier_operator.workqueue import Done, WorkQueue

logger = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 600.0
"""How often the counters of engines are read."""
SETTLE_SECONDS: Final = 5.0
"""After a rollout, before the first canary: engines have just begun to serve."""
RETRY_SECONDS: Final = 60.0
"""After a canary that showed nothing; doubled each time, up to the interval."""
PATIENCE: Final = 3
"""Canaries in a row that must have missed before it is told: an engine under load may not get to storing one."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    ask: Ask
    due: float
    """When the next canary is sent."""
    failures: int = 0
    misses: int = 0
    samples: tuple[Sample, ...] = ()
    sample_due: float = 0.0
    findings: Findings = field(default_factory=Findings)


class Proofs:
    """What is known of each tier, and the threads that find it out."""

    def __init__(  # noqa: PLR0913  what it is wired to, with the defaults of production
        self,
        changed: Callable[[TierName], None],
        *,
        workers: int = 4,
        connect: Callable[[str, str], Engine] = HttpEngine,
        read_key: Callable[[TierName, KeySource], str] = lambda _tier, source: source.literal,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], bool] | None = None,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        """Store; `start` starts.

        Args:
            changed: told, from a thread of ours, which tier to look at again.
            workers: tiers that are asked at the same time.
            connect: returns the engine at an IP address, to be asked with a key; without one where it is empty.
            read_key: returns the key of a tier's engines, or raises `EngineLocked`.
            now: seconds that never go back.
            pause: waits so many seconds; True if the operator stops.
            settle_seconds: how long after a rollout the first canary is sent.
        """
        self._changed = changed
        self._connect = connect
        self._read_key = read_key
        self._now = now
        self._settle_seconds = settle_seconds
        self._stopping = threading.Event()
        self._waiting = canary.Waiting(now=now, pause=pause or self._stopping.wait)
        self._lock = threading.Lock()
        self._records: dict[TierName, _Record] = {}
        self._queue: WorkQueue[TierName] = WorkQueue(self._work, workers=workers, resync_seconds=SAMPLE_SECONDS)

    def start(self) -> None:
        """Start the threads."""
        self._queue.start()

    def close(self, *, timeout: float) -> bool:
        """Ask nobody any more, and tell whether what was being asked has ended within the time-out."""
        self._stopping.set()
        return self._queue.close(timeout=timeout)

    def look(self, tier: TierName, ask: Ask, *, proven_rollout: str | None) -> Findings:
        """Return what is known, and have the tier asked when it is time to.

        Args:
            tier: which one.
            ask: what may be asked of it now.
            proven_rollout: the rollout that its status already speaks of; that is proven again in its turn.
        """
        with self._lock:
            record = self._records.get(tier)
            if record is None:
                wait = random.random() * ask.interval_seconds if proven_rollout == ask.rollout else 0.0  # noqa: S311  no secret
                record = _Record(ask=ask, due=self._now() + max(wait, self._settle_seconds))
                is_new = True
            else:
                is_new = record.ask.rollout != ask.rollout or (
                    record.ask.refusal is not None and ask.refusal is None and record.findings.canary is None
                )
                if record.ask.rollout != ask.rollout:
                    findings = replace(record.findings, canary=None)
                    due = self._now() + self._settle_seconds
                    record = replace(record, findings=findings, due=due, failures=0, misses=0, samples=())
                record = replace(record, ask=ask)
            self._records[tier] = record
            findings = record.findings
        if is_new and ask.targets:
            self._queue.add(tier)
        elif ask.targets:
            self._queue.add_if_unknown(tier)
        return findings

    def forget(self, tier: TierName) -> None:
        """Drop a tier that is gone."""
        with self._lock:
            self._records.pop(tier, None)

    def _work(self, tier: TierName, attempt: int) -> Done:  # noqa: ARG002  failures are told apart here
        with self._lock:
            record = self._records.get(tier)
        if record is None or not record.ask.targets:
            return Done(is_gone=True)
        now = self._now()
        updated = record
        if record.sample_due <= now:
            updated = self._sample(updated, now)
        if record.ask.refusal is None and record.due <= now:
            updated = self._send(tier, updated)
        self._store(tier, record, updated)
        due = [updated.sample_due] if updated.ask.refusal is not None else [updated.sample_due, updated.due]
        return Done(again_after=max(1.0, min(due) - self._now()))

    def _store(self, tier: TierName, before: _Record, after: _Record) -> None:
        """Keep what was found, unless the engines it was found with have been replaced since."""
        with self._lock:
            current = self._records.get(tier)
            if current is None or current.ask.rollout != before.ask.rollout:
                return
            self._records[tier] = replace(after, ask=current.ask)
        if after.findings != before.findings:
            self._changed(tier)

    def _sample(self, record: _Record, now: float) -> _Record:
        readings: dict[str, Reading] = {}
        for target in record.ask.targets:
            if self._stopping.is_set():
                break
            try:
                readings[target.pod] = self._connect(target.address, "").metrics()
            except EngineError as error:
                logger.debug("pod %s %s", target.pod, error)
        samples = effect.keep(record.samples, Sample(at=now, readings=readings))
        found, before = effect.judge(samples), record.findings.effect
        if found is None or (before is not None and before.verdict == found.verdict):
            found = before
        findings = replace(record.findings, effect=found, break_even_tokens=effect.break_even(readings))
        return replace(record, samples=samples, findings=findings, sample_due=now + SAMPLE_SECONDS)

    def _send(self, tier: TierName, record: _Record) -> _Record:
        ask, found = record.ask, self._ask(tier, record.ask)
        if found.outcome.is_proof:
            due = self._now() + ask.interval_seconds * random.uniform(0.9, 1.0)  # noqa: S311  no secret
            known = record.findings.canary
            is_news = known is None or not known.outcome.is_proof
            findings = replace(record.findings, canary=found) if is_news else record.findings
            return replace(record, due=due, failures=0, misses=0, findings=findings)
        failures = record.failures + 1
        misses = record.misses + 1 if found.outcome.is_disproof else 0
        # A key that is given to the operator changes nothing else that would tell.
        longest = SAMPLE_SECONDS if found.outcome is CanaryOutcome.LOCKED else ask.interval_seconds
        due = self._now() + min(RETRY_SECONDS * 2 ** min(failures - 1, 16), longest)
        findings = replace(record.findings, canary=self._worth_telling(record.findings.canary, found, misses))
        return replace(record, due=due, failures=failures, misses=misses, findings=findings)

    def _ask(self, tier: TierName, ask: Ask) -> Canary:
        """Send a canary, each way in its turn."""
        first, second = ask.targets[:2]
        if random.random() < 0.5:  # noqa: PLR2004, S311  no secret
            first, second = second, first
        try:
            key = "" if ask.key is None else self._read_key(tier, ask.key)
            replicas = [
                canary.Replica(name=each.pod, engine=self._connect(each.address, key)) for each in (first, second)
            ]
        except EngineLocked as error:
            return Canary(outcome=CanaryOutcome.LOCKED, first=first.pod, second=second.pod, problem=str(error))
        return canary.run(*replicas, chunk=ask.chunk, offers=ask.offers, waiting=self._waiting)

    @staticmethod
    def _worth_telling(known: Canary | None, found: Canary, misses: int) -> Canary | None:
        """Return what to tell: a proof stands until it is disproved, and a disproof needs patience."""
        if found.outcome.is_disproof:
            return found if misses >= PATIENCE else known
        if known is not None and (known.outcome.is_proof or known.outcome.is_disproof):
            return known
        # The same trouble with the other pod, or the other way round, is no news.
        return known if known is not None and known.outcome is found.outcome else found
