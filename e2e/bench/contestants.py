# SPDX-License-Identifier: Apache-2.0
"""Who moves the blocks in the store benchmark: a plain reader and writer, ours, and vLLM's own fs code.

Each loads and stores the same blocks of one large buffer, as a tier does with the rows of vLLM's CPU tier.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier_connector.movers.engine import Movers
from kvtier_connector.movers.mover import MoversSettings
from kvtier_connector.movers.rows import Region as Rows
from kvtier_connector.movers.tasks import Lane, Task
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored
from kvtier_connector.store.breaker import Breaker
from kvtier_connector.store.checksums import checksum
from kvtier_connector.store.fs import O_DIRECT
from kvtier_connector.store.layout import BLOCKS, BlockKey
from kvtier_connector.store.shared import SharedStore

GENERATION = "bench"
"""A store's directory is named after its generation."""

Bytes = npt.NDArray[np.uint8]


class Region:
    """One page-aligned buffer of so many blocks, and a copy of what was written from it."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """Fill it with bytes that do not compress or repeat."""
        self.blocks = blocks
        self.block_bytes = block_bytes
        # A file without a name, so that processes can share it.
        self.file = os.memfd_create("kvtier-bench")
        os.ftruncate(self.file, blocks * block_bytes)
        self.memory = mmap.mmap(self.file, blocks * block_bytes)
        self._array: Bytes = np.frombuffer(self.memory, dtype=np.uint8)
        generator = np.random.default_rng(blocks)
        self._array[:] = np.frombuffer(generator.bytes(self._array.nbytes), dtype=np.uint8)
        self._digests = [hashlib.sha256(self.row(number)).digest() for number in range(blocks)]

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.block_bytes

    def view(self) -> memoryview:
        """Return the whole buffer."""
        return memoryview(self.memory)

    def row(self, number: int) -> memoryview:
        """Return one block."""
        start = number * self.block_bytes
        return memoryview(self.memory)[start : start + self.block_bytes]

    def erase(self) -> None:
        """Overwrite every block, so that what a load leaves must have come from the volume."""
        self._array[:] = 0

    def is_intact(self) -> bool:
        """Say whether every block holds again what was written."""
        return all(hashlib.sha256(self.row(n)).digest() == digest for n, digest in enumerate(self._digests))


class Contestant(ABC):
    """Moves all blocks of a region; `directory` is its own."""

    name: ClassVar[str]
    stores: ClassVar[bool] = True
    """Whether it takes part in the storing, too."""
    loads_from: ClassVar[str] = ""
    """The contestant that writes the files it loads; itself if empty."""
    is_one_thread: ClassVar[bool] = False
    """Whether more threads change nothing."""

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Store the settings."""
        self.directory = directory
        self.region = region
        self.is_direct = is_direct
        self.keys = [BlockKey(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0) for number in range(region.blocks)]

    @classmethod
    def directory_name(cls, name: str = "") -> str:
        """Return what a directory of this contestant, or of another one by name, can be called on any volume."""
        return re.sub(r"[^A-Za-z0-9]+", "-", name or cls.name).strip("-")

    @abstractmethod
    def load(self, pool: ThreadPoolExecutor) -> None:
        """Bring every block from the directory into the region."""

    @abstractmethod
    def store(self, pool: ThreadPoolExecutor) -> None:
        """Write every block of the region to the directory."""

    def prepare(self, threads: int) -> None:  # noqa: B027 - most need nothing
        """Start what a load or store of so many threads needs; this is not measured."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """End what `prepare` started."""

    def path(self, number: int) -> str:
        """Return where a contestant without a layout of its own keeps a block."""
        return f"{self.directory}/{number % 64:02x}/{number:08x}.bin"


class Plain(Contestant):
    """What the volume gives: whole files, one system call each way, no header and no checksum."""

    name = "plain parallel reader"

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Read each file into its row."""
        _all(pool, self._read, self.region.blocks)

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Write each row to its file."""
        _all(pool, self._write, self.region.blocks)

    def _read(self, number: int) -> None:
        with self._open(number, os.O_RDONLY) as fd:
            done = os.preadv(fd, [self.region.row(number)], 0)
        assert done == self.region.block_bytes

    def _write(self, number: int) -> None:
        os.makedirs(os.path.dirname(self.path(number)), exist_ok=True)  # noqa: PTH103, PTH120 - thousands of them
        with self._open(number, os.O_WRONLY | os.O_CREAT) as fd:
            done = os.pwritev(fd, [self.region.row(number)], 0)
        assert done == self.region.block_bytes

    @contextlib.contextmanager
    def _open(self, number: int, flags: int) -> Iterator[int]:
        fd = os.open(self.path(number), flags | (O_DIRECT if self.is_direct else 0), 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


class Kvtier(Contestant):
    """Ours, verified, straight into the row."""

    name = "kvtier store"

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Open the store."""
        super().__init__(directory, region, is_direct=is_direct)
        self.blocks = BlockStore(directory / GENERATION)

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Get each block."""
        _all(pool, self._get, self.region.blocks)

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Put each block."""
        _all(pool, self._put, self.region.blocks)

    def _get(self, number: int) -> None:
        outcome = self.blocks.get(self.keys[number], self.region.row(number))
        assert isinstance(outcome, Hit), outcome

    def _put(self, number: int) -> None:
        outcome = self.blocks.put(self.keys[number], self.region.row(number))
        assert isinstance(outcome, Stored), outcome


class KvtierStaged(Kvtier):
    """Ours, read and verified in a buffer of the thread and then copied, which no late read can spoil."""

    name = "kvtier store, staged"
    stores = False
    loads_from = Kvtier.name

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Prepare the buffers."""
        super().__init__(directory, region, is_direct=is_direct)
        self._of_thread = threading.local()

    def _staging(self) -> Bytes:
        staging: Bytes | None = getattr(self._of_thread, "staging", None)
        if staging is None:
            staging = self._of_thread.staging = np.frombuffer(mmap.mmap(-1, self.region.block_bytes), dtype=np.uint8)
        return staging

    def _get(self, number: int) -> None:
        staging = self._staging()
        outcome = self.blocks.get(self.keys[number], staging.data)
        assert isinstance(outcome, Hit), outcome
        np.copyto(np.frombuffer(self.region.row(number), dtype=np.uint8), staging)


class KvtierEncrypted(KvtierStaged):
    """Ours with encrypted blocks: decrypted in a buffer of the thread as they are read, encrypted in it for a write."""

    name = "kvtier store, encrypted"
    stores = True
    loads_from = ""

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Make a key and open the store."""
        super().__init__(directory, region, is_direct=is_direct)
        keys = directory.with_name(directory.name + " keys")
        keys.mkdir(parents=True, exist_ok=True)
        (keys / "k1").write_bytes(bytes(range(32)))
        self.blocks = BlockStore(directory / GENERATION, keys_dir=str(keys))
        assert self.blocks.keyring is not None
        self.blocks.keyring.activate("k1")

    def _put(self, number: int) -> None:
        staging = self._staging()
        np.copyto(staging, np.frombuffer(self.region.row(number), dtype=np.uint8))
        outcome = self.blocks.put(self.keys[number], staging.data, is_scratch=True)
        assert isinstance(outcome, Stored), outcome


class KvtierMovers(Kvtier):
    """Ours as the engine uses it: as many processes as the others have threads, each with a buffer of its own."""

    name = "kvtier movers"
    loads_from = Kvtier.name
    _movers: Movers

    def prepare(self, threads: int) -> None:
        """Start the processes and wait until all are ready."""
        region = self.region
        rows = region.view().cast("B", (region.blocks, region.block_bytes))
        self._movers = Movers(
            MoversSettings(root=str(self.directory / GENERATION), processes=threads, threads=1, deadline_seconds=60.0),
            store=SharedStore(self.directory / GENERATION),
            breaker=Breaker(),
            rows=rows,
            regions=[Rows(region.file, 0, region.blocks)],
        )
        rows.release()
        self._movers.start()
        dispatcher = self._movers._dispatcher  # noqa: SLF001 - an engine needs one of them; here all are measured
        while not all(dispatcher._is_ready(number) for number in range(threads)):  # noqa: SLF001 - as above
            time.sleep(0.01)

    def warm_up(self, pool: ThreadPoolExecutor) -> None:
        """Store and load other blocks and remove them: an engine's movers have long entered their pages."""
        keys = self.keys
        self.keys = [BlockKey(hashlib.sha256(key.hash).digest(), 0) for key in keys]
        self.store(pool)
        self.load(pool)
        shutil.rmtree(self.directory / GENERATION / BLOCKS)
        self.keys = keys

    def close(self) -> None:
        """End the processes."""
        self._movers.close(10.0)

    def load(self, pool: ThreadPoolExecutor) -> None:  # noqa: ARG002 - processes take the threads' place
        """Load each block."""
        self._run(Lane.LOAD, Hit)

    def store(self, pool: ThreadPoolExecutor) -> None:  # noqa: ARG002 - processes take the threads' place
        """Save each block."""
        self._run(Lane.STORE, Stored)

    def _run(self, lane: Lane, wanted: type[Hit | Stored]) -> None:
        self._movers.submit(enumerate([Task(lane, (key,), row) for row, key in enumerate(self.keys)]))
        left = len(self.keys)
        while left:
            for done in self._movers.collect():
                assert isinstance(done.outcome, wanted), done
                left -= 1
            # An engine's steps take longer; it has a processor of its own, which the volume's programs lack here.
            time.sleep(0.002)


class Checksum(Contestant):
    """The checksum alone, over bytes that are in memory already."""

    name = "checksum alone"
    stores = False
    loads_from = Plain.name

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Compute the checksum of each row."""
        _all(pool, lambda number: checksum(self.region.row(number)), self.region.blocks)

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Take no part in it."""


class FsJob(Contestant):
    """VLLM's fs code as its tier calls it: one job is one call on one thread."""

    name = "vLLM fs, one job"
    is_one_thread = True
    use_c: ClassVar[bool] = True

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Find the code; raise ImportError where vLLM is not installed."""
        super().__init__(directory, region, is_direct=is_direct)
        from vllm.v1.kv_offload.tiering.fs import io

        self.io: Any = io

    def path(self, number: int) -> str:
        """Return where vLLM's tier keeps a block, below its own directory."""
        name = self.keys[number].hash.hex()
        return f"{self.directory}/{name[:3]}/{name[3:5]}_g0/{name}.bin"

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Load every block in one call."""
        with self._implementation():
            pool.submit(self._load, list(range(self.region.blocks))).result()

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Store every block in one call."""
        with self._implementation():
            pool.submit(self._store, list(range(self.region.blocks))).result()

    def _load(self, numbers: list[int]) -> None:
        self.io.batch_load_block(*self._arguments(numbers))

    def _store(self, numbers: list[int]) -> None:
        self.io.batch_store_block(*self._arguments(numbers))

    def _arguments(self, numbers: list[int]) -> tuple[list[str], memoryview, list[int], int, bool]:
        size = self.region.block_bytes
        return [self.path(n) for n in numbers], self.region.view(), [n * size for n in numbers], size, self.is_direct

    @contextlib.contextmanager
    def _implementation(self) -> Iterator[None]:
        found = self.io._HAS_FSIO_C  # noqa: SLF001 - its only switch between the two
        self.io._HAS_FSIO_C = found and self.use_c  # noqa: SLF001 - as above
        try:
            yield
        finally:
            self.io._HAS_FSIO_C = found  # noqa: SLF001 - as above


class FsPerBlock(FsJob):
    """VLLM's fs code, called block by block on the threads."""

    name = "vLLM fs per block (C)"
    is_one_thread = False
    loads_from = FsJob.name

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Load each block in a call of its own."""
        with self._implementation():
            _all(pool, lambda number: self._load([number]), self.region.blocks)

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Store each block in a call of its own."""
        with self._implementation():
            _all(pool, lambda number: self._store([number]), self.region.blocks)


class FsPerBlockPython(FsPerBlock):
    """The same without its C extension."""

    name = "vLLM fs per block (Python)"
    use_c = False


ALL: tuple[type[Contestant], ...] = (
    Plain,
    Kvtier,
    KvtierStaged,
    KvtierMovers,
    KvtierEncrypted,
    FsJob,
    FsPerBlock,
    FsPerBlockPython,
    Checksum,
)


def _all(pool: ThreadPoolExecutor, task: Any, count: int) -> None:
    for future in [pool.submit(task, number) for number in range(count)]:
        future.result()
