# SPDX-License-Identifier: Apache-2.0
"""An engine's view of a shared root, for the tests of `SharedStore`."""

from __future__ import annotations

from pathlib import Path

from store_faults import WatchedFs

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.shared import SharedStore


class Counting(WatchedFs):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, call: str, path: str | None) -> None:
        self.calls.append(call)


def engine(root: Path, fs: FileSystem | None = None, *, max_bytes: int = 0) -> SharedStore:
    """Return an engine that has just started and knows the root."""
    store = SharedStore(root, fs=fs or FileSystem(), direct=False, max_bytes=max_bytes)
    assert store.synchronize().problem == ""
    assert store.rescan()
    return store
