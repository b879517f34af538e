# SPDX-License-Identifier: Apache-2.0
"""How many bytes a store takes on the volume, as far as this process knows, and whether one more block still fits.

What other processes write is learnt from their journals, if the caller reads them, and at each scan. In between the sum
is off by what they did, and together they could write past the limit. So among several, each writes at most half of its
even share of what is left until it has heard of the others again: the halves of all, and what each wrote since it told
last, fit. The nearer the limit the smaller the shares, so the last blocks of the room stay free.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

_Answer = TypeVar("_Answer")


class Usage:
    """A sum with a limit. Any thread may call any method; one lock guards every field and is never held over I/O."""

    def __init__(self, max_bytes: int) -> None:
        """Store the limit; 0 means none."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known = 0
        self._reserved = 0
        self._written_since_scan_began = 0
        self._allowance: int | None = None
        """What may still be claimed in this period; None is no such limit."""

    def set_limit(self, max_bytes: int) -> None:
        """Take another limit from now on; what is there already stays."""
        with self._lock:
            self._max_bytes = max_bytes

    def total(self) -> int:
        """Return the bytes on the volume together with those of the writes in flight."""
        with self._lock:
            return self._known + self._reserved

    def reserve(self, count: int) -> bool:
        """Claim room for a write; a claim that was granted must be ended with `commit` or `cancel`."""
        with self._lock:
            is_granted = self._max_bytes == 0 or (
                self._known + self._reserved + count <= self._max_bytes
                and (self._allowance is None or count <= self._allowance)
            )
            if is_granted:
                self._reserved += count
                if self._allowance is not None:
                    self._allowance -= count
            return is_granted

    def commit(self, count: int, *, replaced: int, saved: int = 0) -> None:
        """Turn a claim into use; `replaced` bytes of an older file went away, `saved` bytes of it were not needed."""
        with self._lock:
            self._reserved -= count
            self._known = max(0, self._known + count - saved - replaced)
            self._written_since_scan_began += count - saved
            if self._allowance is not None:
                self._allowance += saved

    def cancel(self, count: int) -> None:
        """Give a claim back: nothing was written."""
        with self._lock:
            self._reserved -= count
            if self._allowance is not None:
                self._allowance += count

    def begin_period(self, writers: int) -> None:
        """Share the room that is left with the others; `writers` counts this process too. Alone, all of it may go."""
        with self._lock:
            left = max(0, self._max_bytes - self._known - self._reserved)
            self._allowance = None if writers <= 1 else left // (2 * writers)

    def learn(self, count: int) -> None:
        """Add a file that another process wrote."""
        with self._lock:
            self._known += count
            self._written_since_scan_began += count

    def forget(self, count: int) -> None:
        """Subtract a file that was removed."""
        with self._lock:
            self._known = max(0, self._known - count)

    def begin_scan(self) -> None:
        """Remember writes from now on: the scan may have passed their directories already."""
        with self._lock:
            self._written_since_scan_began = 0

    def end_scan(self, found: int) -> None:
        """Replace the sum by what the scan found.

        A block written during the scan may be counted twice until the next one: the error is on the side of the limit.
        """
        with self._lock:
            self._known = found + self._written_since_scan_began


class Quotas(NamedTuple):
    """What the blocks of single tenants may take."""

    by_tenant: Mapping[str, int] = MappingProxyType({})
    default_bytes: int = 0
    """For tenants that are not named; 0 means no limit. Blocks of no tenant have no quota."""

    def of(self, tenant: str) -> int:
        """Return the tenant's quota in bytes; 0 means no limit."""
        return self.by_tenant.get(tenant, self.default_bytes) if tenant else 0


NO_QUOTAS = Quotas()


class Refusal(enum.Enum):
    """Why there is no room for a block."""

    BUDGET = "budget"
    QUOTA = "quota"


class Ledger:
    """The sum of a whole tier and one for each tenant, moved together. Any thread may call any method.

    The sums guard themselves; `_lock` guards the table of tenants, and is held while one of theirs changes, so that a
    claim and its end meet the same sum. Two sums are not changed at once, so a look in between sees a block in one and
    not yet in the other. Clients may name as many tenants as they like, so those without a byte are forgotten at each
    scan.
    """

    def __init__(self, max_bytes: int, quotas: Quotas = NO_QUOTAS) -> None:
        """Store the limits; 0 means none."""
        self._all = Usage(max_bytes)
        self._quotas = quotas
        self._lock = threading.Lock()
        self._tenants: dict[str, Usage] = {}
        self._writers = 1
        self._found: dict[str, int] = {}

    def set_limit(self, max_bytes: int) -> None:
        """Take another limit of the whole tier from now on."""
        self._all.set_limit(max_bytes)

    def begin_period(self, writers: int) -> None:
        """Share the room that is left, of the tier and of each tenant, with the other writers."""
        self._writers = writers
        for usage in (self._all, *self._listed()):
            usage.begin_period(writers)

    def total(self) -> int:
        """Return the bytes of the whole tier, together with those of the writes in flight."""
        return self._all.total()

    def total_of(self, tenant: str) -> int:
        """Return the bytes of one tenant."""
        with self._lock:
            usage = self._tenants.get(tenant)
        return 0 if usage is None else usage.total()

    def reserve(self, count: int, tenant: str) -> Refusal | None:
        """Claim room for a write; None means that it was granted, and must be ended with `commit` or `cancel`."""
        if not self._change(tenant, lambda usage: usage.reserve(count)):
            return Refusal.QUOTA
        if not self._all.reserve(count):
            self._change(tenant, lambda usage: usage.cancel(count))
            return Refusal.BUDGET
        return None

    def commit(self, count: int, tenant: str, *, replaced: int, saved: int = 0) -> None:
        """Turn a claim into use; `replaced` bytes of an older file went away, `saved` bytes of it were not needed."""
        self._all.commit(count, replaced=replaced, saved=saved)
        self._change(tenant, lambda usage: usage.commit(count, replaced=replaced, saved=saved))

    def cancel(self, count: int, tenant: str) -> None:
        """Give a claim back: nothing was written."""
        self._all.cancel(count)
        self._change(tenant, lambda usage: usage.cancel(count))

    def learn(self, count: int, tenant: str) -> None:
        """Add a file that another process wrote."""
        self._all.learn(count)
        self._change(tenant, lambda usage: usage.learn(count))

    def forget(self, count: int, tenant: str) -> None:
        """Subtract a file that was removed."""
        self._all.forget(count)
        self._change(tenant, lambda usage: usage.forget(count))

    def begin_scan(self) -> None:
        """Remember writes from now on: the scan may have passed their directories already."""
        self._found = {}
        self._all.begin_scan()
        for usage in self._listed():
            usage.begin_scan()

    def find(self, count: int, tenant: str) -> None:
        """Count a file that the scan found; by the one thread that scans."""
        self._found[tenant] = self._found.get(tenant, 0) + count

    def end_scan(self) -> None:
        """Replace the sums by what the scan found, and forget tenants that have nothing."""
        found, self._found = self._found, {}
        self._all.end_scan(sum(found.values()))
        with self._lock:
            tenants = {*found, *self._tenants}
        for tenant in tenants:
            # One at a time: whoever stores waits for the lock.
            self._end_scan_of(tenant, found.get(tenant, 0))

    def tenants(self) -> int:
        """Return how many tenants are remembered."""
        return len(self._tenants)

    def _change(self, tenant: str, change: Callable[[Usage], _Answer]) -> _Answer:
        """Change the sum of one tenant, which is not forgotten meanwhile."""
        with self._lock:
            usage = self._tenants.get(tenant)
            if usage is None:
                usage = self._tenants[tenant] = Usage(self._quotas.of(tenant))
                usage.begin_period(self._writers)
            return change(usage)

    def _end_scan_of(self, tenant: str, found: int) -> None:
        self._change(tenant, lambda usage: usage.end_scan(found))
        with self._lock:
            if not self._tenants[tenant].total():
                del self._tenants[tenant]

    def _listed(self) -> list[Usage]:
        with self._lock:
            return list(self._tenants.values())
