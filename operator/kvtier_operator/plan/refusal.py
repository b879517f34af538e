# SPDX-License-Identifier: Apache-2.0
"""The legal "no" of a plan. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RefusalReason(enum.Enum):
    """Why a spec that is valid by itself cannot be carried out in this cluster."""

    OBJECT_NOT_OURS = enum.auto()
    CLAIM_MISSING = enum.auto()
    CLAIM_NOT_SHARED = enum.auto()
    CLAIM_IMMUTABLE = enum.auto()
    CLAIM_CANNOT_SHRINK = enum.auto()
    BLOCKS_NOT_WHOLE = enum.auto()
    NODES_UNKNOWN = enum.auto()
    NO_NODE_MATCHES = enum.auto()
    DOES_NOT_FIT = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A legal "no": what is wrong and what to do about it."""

    reason: RefusalReason
    message: str
