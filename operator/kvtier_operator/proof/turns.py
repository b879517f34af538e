# SPDX-License-Identifier: Apache-2.0
"""Who is asked next when more is to be asked than at once: owners take turns, and who answers goes before who does not.

Without a clock and without a thread: for one event loop.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items that wait for one of a few places, each on behalf of an owner."""

    def __init__(self, *, places: int, places_each: int) -> None:
        """Have all places free.

        Args:
            places: items that may have one at the same time.
            places_each: items of one owner that may.
        """
        self._free = places
        self._places_each = places_each
        self._taken: Counter[Hashable] = Counter()
        self._hopeful: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self._doubtful: OrderedDict[Hashable, deque[Item]] = OrderedDict()

    def add(self, item: Item, *, owner: Hashable, is_hopeful: bool) -> None:
        """Let an item wait; what is not hopeful waits for everything that is."""
        waiting = self._hopeful if is_hopeful else self._doubtful
        waiting.setdefault(owner, deque()).append(item)

    def take(self) -> tuple[Hashable, Item] | None:
        """Return who has a place now, for `leave`, and what; None where nobody may have one."""
        if not self._free:
            return None
        for waiting in (self._hopeful, self._doubtful):
            # At most as many owners are passed over as can hold all places between them.
            owner = next((each for each in waiting if self._taken[each] < self._places_each), None)
            if owner is None:
                continue
            item = waiting[owner].popleft()
            if waiting[owner]:
                waiting.move_to_end(owner)
            else:
                del waiting[owner]
            self._taken[owner] += 1
            self._free -= 1
            return owner, item
        return None

    def leave(self, owner: Hashable) -> None:
        """Free a place of that owner."""
        self._free += 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
