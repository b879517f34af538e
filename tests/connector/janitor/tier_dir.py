# SPDX-License-Identifier: Apache-2.0
"""A tier on a directory, engines that fill it, and a janitor with clocks that the test moves."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checks import check
from store_faults import WatchedFs

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.contract.usage import Usage
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.blockstore import BlockStore, Stored
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.identity import claim
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage, block_path

PAYLOAD_BYTES = 4096
BLOCK_BYTES = HEADER_BYTES + PAYLOAD_BYTES
DAMAGED = f"quarantine/{'0' * 64}_g0.kvb.checksum.{'0' * 32}"


def key(number: int, tenant: str = "") -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") + bytes(range(28)), 0, tenant)


def payload(number: int) -> memoryview:
    return memoryview(number.to_bytes(4, "little") * (PAYLOAD_BYTES // 4))


@dataclass
class Clock:
    """Both clocks of a process; they stand still unless they are moved."""

    ns: int = field(default_factory=time.time_ns)
    seconds: float = 1000.0

    def move(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)
        self.seconds += seconds


class Refusing(WatchedFs):
    """Answers some calls about some paths with an error, until the test changes `calls`; counts listings of blocks."""

    def __init__(self, path: str, *calls: str, number: int = errno.EIO) -> None:
        self.path, self.calls, self.number, self.listed = path, calls, number, 0

    def before(self, call: str, path: str | None) -> None:
        self.listed += call == "scandir" and path is not None and path.endswith("/blocks")
        if call in self.calls and self.path in f"{path or ''}/":
            raise OSError(self.number, os.strerror(self.number), path)


class Engine:
    """One engine of one generation, as far as the volume sees it: it writes blocks and a journal."""

    def __init__(self, tier_dir: Path, digest: str, clock: Clock, volume_ns: Callable[[], int] | None = None) -> None:
        self.root = tier_dir / digest
        self.volume_ns = volume_ns or (lambda: clock.ns)
        claim(self.root, {"model": "test"}, digest)
        self.clock = clock
        self.store = BlockStore(self.root, direct=False, clock=lambda: self.clock.ns)
        self.journal = JournalWriter(self.root, clock=lambda: self.clock.ns, now=lambda: self.clock.seconds)
        self.journal.flush()

    def put(self, *numbers: int, tenant: str = "", lineage: Lineage = NO_LINEAGE, is_telling: bool = True) -> None:
        """Store blocks; with `is_telling` False the engine dies before its journal tells of them."""
        for number in numbers:
            self.clock.move(0.001)
            path = self.root / block_path(key(number, tenant))
            if isinstance(self.store.put(key(number, tenant), payload(number), lineage), Stored):
                # As the volume stamps it.
                os.utime(path, ns=(self.volume_ns(), self.volume_ns()))
                if is_telling:
                    self.journal.append(Op.STORED, key(number, tenant), PAYLOAD_BYTES, lineage)
        self.journal.flush()

    def put_chain(self, *numbers: int, tenant: str = "") -> None:
        """Store a prefix: each block continues the one before it."""
        parent = b""
        for position, number in enumerate(numbers):
            self.put(number, tenant=tenant, lineage=Lineage(parent, position))
            parent = key(number).hash

    def note(self, op: Op, number: int, tenant: str = "", *, ahead_seconds: float = 0.0) -> None:
        """Write a record as another process, since one that stored a block does not note a use soon afterwards."""
        journal = JournalWriter(self.root, clock=lambda: self.clock.ns, now=lambda: self.clock.seconds)
        self.clock.move(0.001)
        journal.append(op, key(number, tenant), PAYLOAD_BYTES, ahead_seconds=ahead_seconds)
        journal.flush()

    def use(self, number: int, tenant: str = "") -> None:
        self.note(Op.USED, number, tenant)

    def has(self, number: int, tenant: str = "") -> bool:
        return (self.root / block_path(key(number, tenant))).exists()

    def there(self, numbers: range, tenant: str = "") -> list[int]:
        return [number for number in numbers if self.has(number, tenant)]

    def age(self, seconds: float) -> None:
        """Let it look as if no engine had been in this generation for so long."""
        for path in [*self.root.glob("journal/*"), self.root / "tier.json"]:
            os.utime(path, ns=(self.clock.ns, self.clock.ns - int(seconds * 1e9)))

    def check(self) -> list[Any]:
        return check(self.root)


class Rig:
    def __init__(self, base: Path) -> None:
        self.dir = base / "ns.llama"
        self.clock = Clock()
        self.ahead_ns = 0
        """By how much the janitor's clock is ahead of the volume's."""
        self.config = JanitorConfig(
            tier="ns/llama", tier_dir=str(self.dir), current="aa", sweep_seconds=10, http_port=0, threads=2
        )

    def engine(self, digest: str = "aa") -> Engine:
        return Engine(self.dir, digest, self.clock, self.volume_ns)

    def volume_ns(self) -> int:
        return self.clock.ns - self.ahead_ns

    def sweeper(
        self, fs: FileSystem | None = None, *, parts: Mapping[str, Any] = MappingProxyType({}), **changes: Any
    ) -> Sweeper:
        """Return a janitor with other settings, and with other clocks or another lease if they are given."""
        # The files have the real time.
        clocks = {"clock": lambda: self.clock.ns, "now": lambda: self.clock.seconds, "ask_volume": self.volume_ns}
        sweeper = Sweeper(replace(self.config, **changes), fs=fs or FileSystem(), **{**clocks, **parts})
        sweeper.open()
        return sweeper

    def trusting(self, fs: FileSystem | None = None, **changes: Any) -> Sweeper:
        """Return a janitor that began an hour ago, so that it does not doubt the volume's clock."""
        sweeper = self.sweeper(fs, **changes)
        self.clock.seconds += 3600.0
        return sweeper

    def swept(self, fs: FileSystem | None = None, **changes: Any) -> Sweeper:
        """Return a janitor that has done all that is to be done now."""
        sweeper = self.sweeper(fs, **changes)
        self.sweep(sweeper)
        return sweeper

    def work(self, sweeper: Sweeper, steps: int, *, seconds: float = 10) -> None:
        """Let it take some steps, with so much time before each."""
        for _ in range(steps):
            self.clock.move(seconds)
            sweeper.step()

    def sweep(self, sweeper: Sweeper) -> Usage:
        for _ in range(1000):
            self.clock.move(sweeper.config.sweep_seconds if sweeper.is_idle else 0.0)
            if sweeper.step() > 0 and sweeper.is_idle:
                break
        return sweeper.report.usage
