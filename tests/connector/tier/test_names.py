# SPDX-License-Identifier: Apache-2.0
"""A request that asks is told where the blocks of its prompt lie: those that the next one with it loads."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, Shape
from engine_rig import SimulatedEngine
from rig import Rigs, wait_until

PROMPT = list(range(100, 100 + 4 * BLOCK_TOKENS + 3))


@pytest.fixture
def engines(rigs: Rigs) -> Iterator[Engines]:
    made = Engines(rigs)
    yield made
    made.close()


def ask(engine: SimulatedEngine, name: str, prompt: list[int], **params: Any) -> dict[str, Any] | None:
    """Run a request, and return what its answer says of the blocks."""
    told: list[dict[str, Any] | None] = []
    finished = engine.side.request_finished

    def note(request: Any) -> tuple[bool, dict[str, Any] | None]:
        delays, said = finished(request)
        told.append(said)
        return delays, said

    engine.side.request_finished = note
    engine.add(name, prompt, **params)
    engine.run()
    engine.side.request_finished = finished
    return told[-1]


@pytest.mark.parametrize("windows", [(None,), (None, 2 * BLOCK_TOKENS)])
def test_the_names_are_those_of_the_files(engines: Engines, windows: tuple[int | None, ...]) -> None:
    engine = engines.make(Shape(windows=windows))
    told = ask(engine, "first", PROMPT, kvtier_blocks=True)
    assert told is not None
    root = Path(told["kvtier"]["directory"])
    named = told["kvtier"]["blocks"]
    assert root == engines.rigs.root
    assert len([path for path in named if path.endswith("_g0.kvb")]) == len(PROMPT) // BLOCK_TOKENS
    assert [path for path in named if not (root / path).is_file()] == []


def test_who_does_not_ask_is_told_nothing(engines: Engines) -> None:
    assert ask(engines.make(), "first", PROMPT) is None


def test_a_prompt_without_a_whole_block_has_none(engines: Engines) -> None:
    told = ask(engines.make(), "first", PROMPT[: BLOCK_TOKENS - 1], kvtier_blocks=True)
    assert told is not None
    assert told["kvtier"]["blocks"] == []


@pytest.mark.parametrize(
    ("params", "refused"), [({"kvtier_tenant": "../x"}, "tenant"), ({"kvtier_store": False}, "no_store"), ({}, None)]
)
def test_who_is_kept_off_the_volume_is_told_why(engines: Engines, params: dict[str, Any], refused: str | None) -> None:
    told = ask(engines.make(tenant_from="Parameter"), "first", PROMPT, kvtier_blocks=True, **params)
    assert told is not None
    assert told["kvtier"]["refused"] == refused
    assert bool(told["kvtier"]["blocks"]) == (refused is None)


def test_an_engine_without_a_directory_of_its_weights_names_none(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    engine = engines.make()
    with monkeypatch.context() as full:
        full.setattr(os, "memfd_create", exhausted)
        engine.update_weights(7)
        told = ask(engine, "meanwhile", PROMPT, kvtier_blocks=True)
    assert told is not None
    assert (told["kvtier"]["refused"], told["kvtier"]["blocks"]) == ("weights", [])
    steps = itertools.count()

    def has_moved() -> bool:
        engine.ask(f"then {next(steps)}", PROMPT)
        return engine.tier.root != str(engines.rigs.root)

    wait_until(has_moved, "the directory of the weights is used")
    told = ask(engine, "afterwards", PROMPT, kvtier_blocks=True)
    assert told is not None
    assert told["kvtier"]["refused"] is None
    assert told["kvtier"]["directory"] == engine.tier.root
