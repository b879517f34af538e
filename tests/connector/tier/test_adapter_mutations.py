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

from kvtier_connector.vllm_adapter.lora import Adapter, LoadedAdapters

PROMPT, OTHER = prompt_of(12), prompt_of(6, seed=2)
Break = Callable[[pytest.MonkeyPatch], None]


def without_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadedAdapters, "is_replaced", lambda *_: False)


def without_memory(patch: pytest.MonkeyPatch) -> None:
    note = Adapter.note

    def note_last(adapter: Adapter, rank: int, digest: str, workers: int) -> None:
        adapter.digests.pop(rank, None)
        note(adapter, rank, digest, workers)

    patch.setattr(Adapter, "note", note_last)


@pytest.mark.parametrize("leave_out", [None, without_comparison])
def test_a_waiting_request_is_computed_upon_blocks_of_other_weights_only_if_the_worker_does_not_compare(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_out: Break | None
) -> None:
    if leave_out is not None:
        leave_out(monkeypatch)
    first = write(tmp_path / "first", "one")
    engine = waiting_for_copies(engines, first)
    write(first, "two")
    engine.lora_manager.add_adapter(request_for(first, inplace=True))
    engine.copies.lag = 0
    with nullcontext() if leave_out is None else pytest.raises(AssertionError, match="holds other bytes"):
        engine.run()


@pytest.mark.parametrize("leave_out", [None, without_memory])
def test_the_cpu_tier_serves_blocks_of_earlier_contents_only_if_the_earlier_contents_are_forgotten(
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
