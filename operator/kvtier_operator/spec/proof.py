# SPDX-License-Identifier: Apache-2.0
"""``spec.proof`` of a KVCacheTier: how the operator finds out whether the tier works. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from kvtier_operator.spec.rules import ApiModel


class Canary(ApiModel):
    """A prompt of random tokens that one replica computes and another one must find on the volume."""

    enabled: StrictBool = True
    """Whether it is sent: after each rollout, and once in each interval. It costs two short prompts with one token of
    answer each, and a few blocks on the volume. `SharedCacheVerified` tells how it ended."""
    interval_seconds: Annotated[StrictInt, Field(ge=60, le=2_592_000)] = 21600
    """Seconds from one proof to the next while the engines stay the same; six hours by default."""


class Proof(ApiModel):
    """How the operator finds out whether the tier works."""

    canary: Canary = Canary()
    """A prompt that one replica computes and another one must find on the volume."""
    preflight: Literal["Always", "Never"] = "Always"
    """Whether a Job tries a new claim before the first engine starts on it: permissions, atomic renames, free space,
    speed. It takes a minute at most and writes up to 256 MiB for that time. `status.storage` and the condition
    `StorageChecked` show what it found; engines that run already are never held up. Nothing is tried while `disk.mode`
    keeps engines from writing."""
