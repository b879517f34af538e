# SPDX-License-Identifier: Apache-2.0
"""Whether loading from the volume paid over the last hour, by the measurements of serving engines. Pure."""

from __future__ import annotations

import math
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
    """Return what loading was worth; None where the samples do not reach back far enough to say that it was nothing."""
    loaded = computed = gained = 0.0
    weights = load_sum = compute_sum = 0.0
    for pod, now in samples[-1].readings.items():
        tokens, hits = _growth(samples, pod)
        loaded += tokens
        computed += hits
        if now.load_rate > 0 and now.compute_rate > 0 and (tokens or hits):
            weight = tokens + hits
            gained += weight * math.log2(now.load_rate / now.compute_rate)
            weights += weight
            load_sum += weight * now.load_rate
            compute_sum += weight * now.compute_rate
    if loaded < FEWEST_TOKENS and computed < FEWEST_HITS:
        is_whole = samples[-1].at - samples[0].at >= WINDOW_SECONDS * 0.9
        return EffectResult(outcome=EffectOutcome.NO_HITS) if is_whole else None
    if not weights:
        return EffectResult(
            outcome=EffectOutcome.NOT_MEASURED, loaded_tokens=round(loaded), computed_hits=round(computed)
        )
    advantage = gained / weights
    return EffectResult(
        outcome=EffectOutcome.PAYS if advantage >= 0 else EffectOutcome.LOSES,
        loaded_tokens=round(loaded),
        computed_hits=round(computed),
        load_rate=load_sum / weights,
        compute_rate=compute_sum / weights,
        power=round(advantage),
    )


def break_even(readings: Mapping[str, EngineCounters]) -> int | None:
    """Return the shortest hit that is worth loading, rounded up to a power of two; -1 where an engine loads none."""
    found = [reading.break_even_tokens for reading in readings.values() if reading.break_even_tokens is not None]
    if not found:
        return None
    if min(found) < 0:
        return -1
    longest = max(found)
    return 0 if longest < 1 else 1 << math.ceil(math.log2(longest))


def _growth(samples: Sequence[CounterSample], pod: str) -> tuple[float, float]:
    """Return by how much a pod's counters grew: tokens loaded, hits computed again.

    A counter that went back began anew with its process.
    """
    grown = [0.0, 0.0]
    before: EngineCounters | None = None
    for sample in samples:
        now = sample.readings.get(pod)
        if now is None:
            continue
        if before is not None:
            pairs = (
                (before.disk_tokens, now.disk_tokens),
                (before.computed_hits, now.computed_hits),
            )
            for number, (old, new) in enumerate(pairs):
                grown[number] += new - (old if new >= old else 0.0)
        before = now
    return grown[0], grown[1]
