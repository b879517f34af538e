# SPDX-License-Identifier: Apache-2.0
"""Judges the benefit of the volume to serving engines over the last hour. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_operator.observe.findings import EffectOutcome, EffectResult
from kvtier_operator.observe.pod_reports import EngineCounters

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


def keep(samples: Sequence[CounterSample], new: CounterSample) -> tuple[CounterSample, ...]:
    """Return the samples with a new one, without those that are too old to be the start of the last hour."""
    recent = [sample for sample in samples if new.at - sample.at <= WINDOW_SECONDS * 1.05]
    return (*recent, new)


def judge(samples: Sequence[CounterSample]) -> EffectResult | None:
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
