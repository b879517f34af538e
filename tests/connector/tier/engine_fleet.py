# SPDX-License-Identifier: Apache-2.0
"""Simulated engines that share one directory, what lies there of the prompts that they were asked, and these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_parts import BLOCK_TOKENS, Shape, page_of, prompt_of, values_of
from engine_rig import SimulatedEngine, TierUnderTest
from rig import ON_THREADS, Rigs
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, make_offload_key

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES


class Engines:
    """Makes engines on one shared directory, and closes those that were not closed."""

    def __init__(self, rigs: Rigs) -> None:
        self.rigs = rigs
        self._made: list[SimulatedEngine] = []

    def make(
        self,
        shape: Shape | None = None,
        *,
        fs: FileSystem = ON_THREADS,
        weights: int = 0,
        is_child: bool = False,
        **settings: Any,
    ) -> SimulatedEngine:
        """Start an engine of these weights whose tier has these settings; a child's declaration is not passed on."""
        config_file = self.rigs.config_file(**settings)
        made = SimulatedEngine(config_file, shape or Shape(), fs, weights=weights, is_child=is_child)
        self._made.append(made)
        return made

    def keys_of(
        self, engine: SimulatedEngine, prompt: Sequence[int], *, salt: str | None = None, group: int = 0
    ) -> list[OffloadKey]:
        return [make_offload_key(each, group) for each in engine.hashes_of(prompt, salt)]

    def file_of(self, engine: SimulatedEngine, prompt: Sequence[int], chunk: int, *, group: int = 0) -> Path:
        return self.rigs.block_file(self.keys_of(engine, prompt, group=group)[chunk])

    def count(self) -> int:
        return len(list((self.rigs.root / "blocks").rglob("*.kvb")))

    def assert_volume_holds(self, engine: SimulatedEngine, prompt: Sequence[int], *, salt: str | None = None) -> int:
        """Check each file of a prompt's chunks, and return how many there are."""
        values = values_of(prompt, salt)
        size = BLOCK_TOKENS * engine.shape.blocks_per_chunk
        count = 0
        for group in range(len(engine.shape.windows)):
            for number, key in enumerate(self.keys_of(engine, prompt, salt=salt, group=group)):
                for path in (self.rigs.root / "blocks").rglob(f"{get_offload_block_hash(key).hex()}_g{group}.kvb"):
                    count += 1
                    expected = page_of(values[number * size : (number + 1) * size], group).tobytes()
                    content = path.read_bytes()[HEADER_BYTES:][: len(expected)]
                    assert content == expected, f"chunk {number} on the volume holds other bytes"
        return count

    def close(self) -> None:
        for engine in self._made:
            engine.close()
        TierUnderTest.fs = ON_THREADS


PROMPT = prompt_of(20)
REST = len(PROMPT) - 20 * BLOCK_TOKENS
LATER = prompt_of(8, seed=9)


def restart(
    engines: Engines, shape: Shape | None = None, fs: FileSystem = ON_THREADS, **settings: object
) -> SimulatedEngine:
    """Start another engine, which knows what the volume has."""
    made = engines.make(shape, fs=fs, **settings)
    made.wait_until_attached()
    return made


def finish(engine: SimulatedEngine) -> None:
    engine.run()
    engine.assert_nothing_is_left()


def stored(engines: Engines, prompt: Sequence[int] = PROMPT, shape: Shape | None = None) -> SimulatedEngine:
    """Start an engine and have it compute a prompt whose blocks the volume takes."""
    made = engines.make(shape)
    assert made.ask("stores", prompt) == len(prompt)
    finish(made)
    return made
