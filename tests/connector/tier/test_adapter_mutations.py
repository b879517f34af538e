# SPDX-License-Identifier: Apache-2.0
"""Without any of what keeps the contents of an adapter apart in one engine, a block of earlier ones is computed upon.

Every case is tried twice: as it is, and with one thing left out, where the simulated engine must find other bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from engine_fleet import Engines
from engine_parts import Shape, prompt_of
from test_adapters import ask, request_for, waiting_for_copies, write

from kvtier_connector.vllm_adapter import lora
from kvtier_connector.vllm_adapter.lora import LoadedAdapters

PROMPT, OTHER = prompt_of(12), prompt_of(6, seed=2)
Break = Callable[[pytest.MonkeyPatch], None]


def without_check(patch: pytest.MonkeyPatch) -> None:
    obey = LoadedAdapters.obey

    def obey_unchecked(loaded: LoadedAdapters, orders: lora.Orders) -> None:
        obey(loaded, orders)
        loaded.refused.clear()

    patch.setattr(LoadedAdapters, "obey", obey_unchecked)


def without_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lora.Adapter, "note", note_last)


def note_last(adapter: lora.Adapter, rank: int, digest: str | None, _: int) -> None:
    adapter.digests[rank] = digest or ""
    adapter.identity = lora._identify(adapter.name, adapter.path, adapter.digests)


@pytest.mark.parametrize("leave_out", [None, without_check])
def test_chunks_of_earlier_contents_are_computed_upon_only_if_the_worker_does_not_check(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_out: Break | None
) -> None:
    if leave_out is not None:
        leave_out(monkeypatch)
    first, law = write(tmp_path / "first", "one"), write(tmp_path / "law", "law")
    engine = engines.make(Shape(most_loras=1))
    assert ask(engine, "first", request_for(first)) == len(PROMPT)
    engine.add("made room", OTHER, lora=request_for(law, "law"))
    engine.run()
    write(first, "two")
    engine.scheduler.reset_prefix_cache()
    engine.add("second", PROMPT, lora=request_for(first))
    with nullcontext() if leave_out is None else pytest.raises(AssertionError, match="holds other bytes"):
        engine.run()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_request_that_waits_is_computed_upon_blocks_of_other_weights_only_if_nobody_knows_that_it_waits(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    first = write(tmp_path / "first", "one")
    engine = waiting_for_copies(engines, first)
    side = engine.worker.connector_worker
    assert side is not None
    assert side._adapters is not None
    if not is_whole:
        for held in side._adapters._held.values():
            held.needed_by.clear()
    write(first, "two")
    engine.lora_manager.add_adapter(request_for(first, inplace=True))
    engine.copies.lag = 0
    with nullcontext() if is_whole else pytest.raises(AssertionError, match="holds other bytes"):
        engine.run()


@pytest.mark.parametrize("leave_out", [None, without_memory])
def test_the_cpu_tier_serves_blocks_of_earlier_contents_only_if_nobody_remembers_that_there_were_others(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_out: Break | None
) -> None:
    if leave_out is not None:
        leave_out(monkeypatch)
    first, law = write(tmp_path / "first", "one"), write(tmp_path / "law", "law")
    engine = engines.make(Shape(most_loras=1))
    assert ask(engine, "first", request_for(first)) == len(PROMPT)
    engine.add("made room", OTHER, lora=request_for(law, "law"))
    engine.run()
    write(first, "two")
    engine.add("told", OTHER, lora=request_for(first))
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("second", PROMPT, lora=request_for(first))
    with nullcontext() if leave_out is None else pytest.raises(AssertionError, match="holds other bytes"):
        engine.run()
