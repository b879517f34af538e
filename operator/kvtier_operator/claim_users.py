# SPDX-License-Identifier: Apache-2.0
"""Which tiers use a claim of the user's own: it carries no label of ours, so a change of it names no tier by itself."""

from __future__ import annotations

import threading

from kvtier_operator.names import TierName


class ClaimUsers:
    """Claims by the tiers that named them in their last pass. Any thread may call; one lock guards both maps."""

    def __init__(self) -> None:
        """Start without any."""
        self._lock = threading.Lock()
        self._claim_of: dict[TierName, str] = {}
        self._users: dict[tuple[str, str], set[TierName]] = {}

    def note(self, tier: TierName, claim: str | None) -> None:
        """Remember which claim a tier names; None where it names none, or is gone."""
        with self._lock:
            before = self._claim_of.pop(tier, None)
            if before is not None:
                users = self._users[tier.namespace, before]
                users.discard(tier)
                if not users:
                    del self._users[tier.namespace, before]
            if claim is not None:
                self._claim_of[tier] = claim
                self._users.setdefault((tier.namespace, claim), set()).add(tier)

    def users(self, namespace: str, claim: str) -> frozenset[TierName]:
        """Return the tiers that name the claim."""
        with self._lock:
            return frozenset(self._users.get((namespace, claim), ()))
