# SPDX-License-Identifier: Apache-2.0
"""What an engine finds while its volume is still being walked: it asks for the blocks of each prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from engine_fleet import Engines
from engine_parts import Shape, prompt_of
from engine_rig import SimulatedEngine
from rig import PATIENCE_SECONDS, wait_until

from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.layout import BLOCKS

PROMPT, OTHER = prompt_of(12), prompt_of(5, seed=2)
STORED = 12 * 16


class NeverWalkedFs(FileSystem):
    """Directories of blocks are not listed until the test is over."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def scandir(self, path: str) -> object:
        if f"/{BLOCKS}" in path:
            self.is_over.wait(PATIENCE_SECONDS)
        return LOCAL.scandir(path)


@pytest.fixture
def fs() -> Iterator[NeverWalkedFs]:
    made = NeverWalkedFs()
    yield made
    made.is_over.set()


def restart(engines: Engines, fs: FileSystem, shape: Shape) -> SimulatedEngine:
    """Return an engine that has not been told what another one has stored of `PROMPT`."""
    writer = engines.make(shape)
    writer.ask("writer", PROMPT)
    writer.run()
    made = engines.make(shape, fs=fs)
    wait_until(lambda: made.metric("vllm:kvtier_disk_active") == 1, "the engine has a directory")
    assert made.metric("vllm:kvtier_disk_active") == 1
    return made


def test_a_prompt_that_nobody_has_costs_another_one_in_the_same_step_nothing(
    engines: Engines, fs: NeverWalkedFs
) -> None:
    reader = restart(engines, fs, Shape())
    reader.add("new", OTHER)
    reader.add("known", PROMPT)
    reader.run()
    assert reader.computed == {"new": len(OTHER), "known": len(PROMPT) - STORED}


@pytest.mark.parametrize("windows", [(64,), (None, 64)], ids=["windows-alone", "windows-beside"])
def test_the_end_of_what_is_stored_is_found_for_windows_whatever_comes_behind_it(
    engines: Engines, fs: NeverWalkedFs, windows: tuple[int | None, ...]
) -> None:
    reader = restart(engines, fs, Shape(windows=windows))
    reader.add("longer", [*PROMPT[:STORED], *OTHER])
    reader.run()
    assert reader.computed == {"longer": len(OTHER)}
