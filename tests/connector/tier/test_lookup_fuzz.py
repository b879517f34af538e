# SPDX-License-Identifier: Apache-2.0
"""Engines ask a volume that changes under them: blocks come, are evicted, purged and damaged, and the volume fails.

Whatever happens, a request gets the bytes of its own blocks or computes. Once the volume is quiet, each engine finds
exactly the part of a prompt that is there, and a block that was evicted can be written again.
"""

from __future__ import annotations

import errno
import functools
import itertools
import random
import shutil
from pathlib import Path

import pytest
from checks import check
from rig import Rig, Rigs, key, wait_until
from store_faults import FailingFs
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash

CHAINS, LONGEST, ENGINES, STEPS = 4, 24, 3, 60


def chain(number: int) -> list[OffloadKey]:
    return [key(100 * number + position) for position in range(LONGEST)]


def file_of(rigs: Rigs, of: OffloadKey) -> Path:
    name = get_offload_block_hash(of).hex()
    return rigs.root / "blocks" / name[:3] / f"{name}_g0.kvb"


class Fuzz:
    """Random things that happen to engines and their volume."""

    def __init__(self, rigs: Rigs, seed: int) -> None:
        self.rigs = rigs
        self.source = random.Random(seed)
        self.faults = [
            FailingFs(OSError(errno.EIO, "broken"), lambda call, path: call in {"open", "stat"} and ".kvb" in path)
            for _ in range(ENGINES)
        ]
        for fs in self.faults:
            fs.is_failing = False
        self.engines = [rigs.make(chunks=64, fs=fs, refresh_seconds=0.02) for fs in self.faults]
        self._requests = 0

    @property
    def engine(self) -> Rig:
        return self.source.choice(self.engines)

    def name(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def prefix(self) -> list[OffloadKey]:
        return chain(self.source.randrange(CHAINS))[: self.source.randint(1, LONGEST)]

    def present(self) -> list[Path]:
        return sorted((self.rigs.root / "blocks").rglob("*.kvb")) if self.rigs.root.exists() else []

    def store(self) -> None:
        self.engine.offload(self.prefix(), self.name())

    def serve(self) -> None:
        # Each byte of what is loaded is compared.
        self.engine.serve(self.prefix(), self.name())

    def evict(self) -> None:
        for path in self.source.sample(found := self.present(), min(len(found), self.source.randint(1, 8))):
            path.unlink()

    def damage(self) -> None:
        for path in self.source.sample(found := self.present(), min(len(found), 2)):
            content = bytearray(path.read_bytes())
            content[self.source.randrange(len(content))] ^= 1
            path.write_bytes(content)

    def purge(self) -> None:
        shutil.rmtree(self.rigs.root / "blocks", ignore_errors=True)

    def remove_generation(self) -> None:
        shutil.rmtree(self.rigs.root, ignore_errors=True)

    def forget_memory(self) -> None:
        self.engine.manager.reset_cache()

    def break_or_mend(self) -> None:
        fs = self.source.choice(self.faults)
        fs.is_failing = not fs.is_failing

    def step(self) -> None:
        often = [self.store, self.serve, self.serve, self.forget_memory]
        seldom = [self.evict, self.damage, self.break_or_mend]
        rare = [self.purge, self.remove_generation]
        (act,) = self.source.choices([*often, *seldom, *rare], [12] * 4 + [6] * 3 + [1] * 2)
        act()

    def end_faults(self) -> None:
        for fs in self.faults:
            fs.is_failing = False

    def length(self, number: int) -> int:
        """Return how many blocks of a chain are there from the first on."""
        keys = chain(number)
        return next((count for count, of in enumerate(keys) if not file_of(self.rigs, of).exists()), len(keys))

    def finds_all(self, engine: Rig, number: int) -> bool:
        """Serve a chain from the volume alone, and say whether all of it was found that is there."""
        engine.manager.reset_cache()
        return engine.serve(chain(number), self.name()).hit_blocks == self.length(number)

    def wait_until_all_is_found(self) -> None:
        """Damaged files are met and moved away meanwhile, and breakers close."""
        for engine, number in itertools.product(self.engines, range(CHAINS)):
            wait_until(functools.partial(self.finds_all, engine, number), f"chain {number} is found as it is")

    def are_written(self) -> bool:
        """Compute all chains, and say whether all blocks are there."""
        writer = self.engines[0]
        writer.manager.reset_cache()
        for number in range(CHAINS):
            writer.offload(chain(number), self.name())
        return all(self.length(number) == LONGEST for number in range(CHAINS))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_engines_find_what_is_there_on_a_volume_that_changes(
    rigs: Rigs, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("ASIDE_SECONDS", "DAMAGED_SECONDS"):
        monkeypatch.setattr(f"kvtier_connector.cascade.memory.{constant}", 0.05)
    fuzz = Fuzz(rigs, seed)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end_faults()
    fuzz.wait_until_all_is_found()
    wait_until(fuzz.are_written, "all blocks are written again")
    fuzz.wait_until_all_is_found()
    # Damaged files stay in quarantine for a person to look at.
    assert [each for each in check(rigs.root) if not each.path.startswith("quarantine/")] == []
