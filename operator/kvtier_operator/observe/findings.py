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
