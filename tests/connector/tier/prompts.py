# SPDX-License-Identifier: Apache-2.0
"""The prompts of the scheduler's tests, and how their engines start and end."""

from __future__ import annotations

from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, Shape, prompt_of
from engine_rig import SimulatedEngine
from rig import ON_THREADS

from kvtier_connector.store.fs import FileSystem

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
