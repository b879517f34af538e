# SPDX-License-Identifier: Apache-2.0
"""Findings about running engines, as values that compare equal while nothing that matters changed. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
    """Whether loading pays."""

    PAYS = enum.auto()
    LOSES = enum.auto()
    NO_HITS = enum.auto()
    """Nothing was found on the volume, or too little to judge."""
    NOT_MEASURED = enum.auto()
    """There were hits, and no engine has measured both ways yet."""


@dataclass(frozen=True, kw_only=True)
class EffectResult:
    """The benefit of loading over the last hour."""

    outcome: EffectOutcome
    loaded_tokens: int = 0
    computed_hits: int = 0
    """Requests that found blocks and computed them again."""
    load_rate: float = 0.0
    """Tokens a second."""
    compute_rate: float = 0.0
    power: int = 0
    """Rounded logarithm, to the base of 2, of how many times as fast loading is."""

    @property
    def verdict(self) -> tuple[EffectOutcome, int]:
        """Return what is news when it changes; the numbers beside it change all the time."""
        return self.outcome, self.power


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything known of one tier; None where nothing is known yet."""

    canary: CanaryResult | None = None
    effect: EffectResult | None = None
    break_even_tokens: int | None = None
    """Shortest hit that is worth loading, as a power of two; -1 where none is."""
