# SPDX-License-Identifier: Apache-2.0
"""Seconds of computing that loads made needless, by tenant. Scheduler's thread only.

A label of a metric stays for as long as the engine runs: of more tenants than `MOST_TENANTS`, those that come last are
counted together, as `OTHERS`, which is no tenant's name.
"""

from __future__ import annotations

from kvtier_connector.tier import metrics

MOST_TENANTS = 200
OTHERS = "(other)"


class Savings:
    """See the module."""

    def __init__(self, stats: metrics.Stats) -> None:
        """Count nothing yet."""
        self._stats = stats
        self._tenants: set[str] = set()

    def count(self, tenant: str, seconds: float) -> None:
        """Add what a hit of a tenant saved; 0 is nothing, and makes no label."""
        if not seconds:
            return
        if tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS:
            tenant = OTHERS
        else:
            self._tenants.add(tenant)
        self._stats.count(metrics.SAVED_SECONDS, seconds, cause=tenant)
