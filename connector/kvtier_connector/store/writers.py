# SPDX-License-Identifier: Apache-2.0
"""Lets one thread of the process at a time write a block, since a second one would write the same bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvtier_connector.store.layout import BlockKey


class Writers:
    """The blocks that are being written; `_changed` guards them, and is held while none is."""

    def __init__(self) -> None:
        """Start with none."""
        self._changed = threading.Condition()
        self._keys: set[BlockKey] = set()

    @contextlib.contextmanager
    def alone(self, key: BlockKey) -> Iterator[None]:
        """Wait until no other thread of this process writes the block."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._keys)
            self._keys.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._keys.discard(key)
                self._changed.notify_all()
