# SPDX-License-Identifier: Apache-2.0
"""Which conditions say nothing of a tier because of its connector, and who looks after that instead. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.plan import backends
from kvtier_operator.problems import Problem, unknown

_OF_THE_VOLUME: Final = frozenset({"VolumeBound", "ClaimShared", "StorageChecked"})
_OF_THE_JANITOR: Final = frozenset({"DiskHealthy", "DiskWithinBudget", "JanitorHealthy"})
_OF_KVTIER: Final = frozenset({"SharedCacheVerified", "DiskEffective"})


def not_applicable(kind: str, spec: TierSpec | None) -> Problem | None:
    """Return what is said of a condition that a tier's connector leaves nothing to judge of; None where it does not."""
    if spec is None:
        return None
    connector = spec.connector
    label = f"spec.connector.type {connector.label}"
    if kind in _OF_THE_VOLUME and not connector.uses_volume:
        unused = "; spec.volume is kept and not mounted" if spec.volume.is_there else ""
        return _says(f"{label} keeps nothing on a shared volume{unused}")
    if kind in _OF_THE_JANITOR and not backends.has_janitor(connector):
        return _says(f"{label} has no janitor: {backends.cleaner(connector)}")
    if kind in _OF_KVTIER and not connector.is_ours:
        return _says(
            f"{label} does not tell what it loads, so nobody can prove or judge it here: `kvtier bench` measures it"
        )
    return None


def _says(message: str) -> Problem:
    return unknown(Reason.NOT_APPLICABLE, message)
