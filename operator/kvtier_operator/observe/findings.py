# SPDX-License-Identifier: Apache-2.0
"""Findings about running engines, and the benefit of the volume to them over the last hour. Pure.

Findings are values that compare equal while nothing that matters changed.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_operator.observe.pod_reports import EngineCounters


class CanaryOutcome(enum.Enum):
    """How a canary ended."""

    LOADED = enum.auto()
    """The second replica loaded from the volume what the first one had stored."""
    FOUND = enum.auto()
    """The second replica found it there and computed it all the same, which it measured to be quicker."""
    MISSED = enum.auto()
    """The second replica did not find it."""
    NOT_STORED = enum.auto()
    """The first replica stored nothing of it."""
    BUSY = enum.auto()
    """Other requests ran at the same time, so what was counted may be theirs."""
    UNANSWERED = enum.auto()
    """An engine did not answer as expected."""
    LOCKED = enum.auto()
    """Engines ask for a key that the operator does not have."""

    @property
    def is_proof(self) -> bool:
        """Tell whether it shows that the cache is shared."""
        return self in {CanaryOutcome.LOADED, CanaryOutcome.FOUND}

    @property
    def is_disproof(self) -> bool:
        """Tell whether it shows that the cache is not shared."""
        return self in {CanaryOutcome.MISSED, CanaryOutcome.NOT_STORED}


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """One canary prompt, sent to two replicas."""

    outcome: CanaryOutcome
    first: str
    """Pod that was asked first."""
    second: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the second answer, from the volume."""
    problem: str = ""
    """The answer of an engine, where it was no result."""
    subject: str = ""
    """The addition to the prompt, where it was not text for the model alone."""
    covered: tuple[str, ...] = ()
    """Kinds of prompts beside text that it was proven with."""
    open: tuple[str, ...] = ()
    """Kinds of prompts that showed nothing: other requests ran, or an engine does not answer them."""


class EffectOutcome(enum.Enum):
    """Whether the volume is of use."""

    PAYS = enum.auto()
    LOSES = enum.auto()
    """More than half of the hits were computed again, because that was quicker."""
    NO_HITS = enum.auto()
    """Nothing was found on the volume, or too little to judge."""


@dataclass(frozen=True, kw_only=True)
class EffectResult:
    """Benefit of the volume over the last hour."""

    outcome: EffectOutcome
    loaded_tokens: int = 0
    computed_hits: int = 0
    """Requests that found blocks and computed them again."""
    load_rate: float = 0.0
    """Tokens a second that the volume gives one engine; 0 where that was not measured."""
    compute_rate: float = 0.0

    @property
    def verdict(self) -> tuple[EffectOutcome, int]:
        """Return what is news when it changes; the numbers beside it change all the time."""
        return self.outcome, self.loaded_tokens.bit_length()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything known of one tier; None where nothing is known yet."""

    canary: CanaryResult | None = None
    effect: EffectResult | None = None


WINDOW_SECONDS: Final = 3600.0

FEWEST_TOKENS: Final = 1024
"""Fewer tokens from the volume, with fewer than `FEWEST_HITS` hits computed again, are no ground to judge on."""
FEWEST_HITS: Final = 4


@dataclass(frozen=True, kw_only=True)
class CounterSample:
    """One look at all engines."""

    at: float
    readings: Mapping[str, EngineCounters]
    """By pod."""


def keep_sample(samples: Sequence[CounterSample], new: CounterSample) -> tuple[CounterSample, ...]:
    """Return the samples with a new one, without those that are too old to be the start of the last hour."""
    return (*[sample for sample in samples if new.at - sample.at <= WINDOW_SECONDS * 1.05], new)


def judge_effect(samples: Sequence[CounterSample]) -> EffectResult | None:
    """Return what the volume gave; None where the samples do not reach back far enough to say that it was nothing."""
    grown = [_growth(samples, pod) for pod in samples[-1].readings]
    loaded, found, computed = (sum(each) for each in zip(*grown, strict=True)) if grown else (0.0, 0.0, 0.0)
    if loaded < FEWEST_TOKENS and computed < FEWEST_HITS:
        is_whole = samples[-1].at - samples[0].at >= WINDOW_SECONDS * 0.9
        return EffectResult(outcome=EffectOutcome.NO_HITS) if is_whole else None
    readings = samples[-1].readings.values()
    return EffectResult(
        outcome=EffectOutcome.LOSES if 2 * computed > found else EffectOutcome.PAYS,
        loaded_tokens=round(loaded),
        computed_hits=round(computed),
        load_rate=_mean([each.load_rate for each in readings]),
        compute_rate=_mean([each.compute_rate for each in readings]),
    )


def _mean(rates: Sequence[float]) -> float:
    """Return the mean of those that were measured; 0 where none was."""
    measured = [rate for rate in rates if rate > 0]
    return sum(measured) / len(measured) if measured else 0.0


def _growth(samples: Sequence[CounterSample], pod: str) -> tuple[float, float, float]:
    """Return by how much a pod's counters grew: tokens loaded, hits found, hits computed again.

    A counter that went back began anew with its process.
    """
    counts = [
        (reading.disk_tokens, reading.verdicts, reading.computed_hits)
        for sample in samples
        if (reading := sample.readings.get(pod)) is not None
    ]
    grown = [0.0, 0.0, 0.0]
    for before, now in itertools.pairwise(counts):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            grown[number] += new - (old if new >= old else 0.0)
    loaded, found, computed = grown
    return loaded, found, computed
