# SPDX-License-Identifier: Apache-2.0
"""A block of a LoRA adapter is served for just these contents of the adapter, whatever lies at its path meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from engine_fleet import Engines
from engine_parts import prompt_of
from engine_rig import SimulatedEngine
from rig import wait_until
from vllm.lora.request import LoRARequest

from kvtier_connector.store.format import Header, decode_header
from kvtier_connector.store.layout import adapter_name_label
from kvtier_connector.tier import adapters
from kvtier_connector.tier.adapters import Adapters, Lora

PROMPT = prompt_of(12)
WEIGHTS = "adapter_model.safetensors"


def write(directory: Path, contents: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / WEIGHTS).write_text(contents)
    return directory


def request_for(directory: Path, name: str = "math", *, inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, 1 + sum(name.encode()), str(directory), load_inplace=inplace)


def ask(engine: SimulatedEngine, name: str, lora: LoRARequest | None) -> int:
    """Return how many tokens were computed; the engine compares every value that it builds upon."""
    computed = engine.ask(name, PROMPT, lora=lora)
    engine.run()
    return computed


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", "first")


def test_another_engine_reads_the_blocks_of_an_adapter_that_is_as_it_was(engines: Engines, adapter: Path) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    reader = engines.make()
    assert ask(reader, "b", request_for(adapter)) == len(PROMPT) - 12 * 16
    assert ask(reader, "none", None) == len(PROMPT)
    (file, *_) = (engines.rigs.root / "blocks").rglob("*.kvb")
    header = decode_header(file.read_bytes())
    assert isinstance(header, Header)
    assert header.lineage.adapter.startswith(adapter_name_label("math"))


def test_an_adapter_that_was_rewritten_at_its_path_is_a_miss_for_an_engine_that_starts_then(
    engines: Engines, adapter: Path
) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    write(adapter, "second")
    restarted = engines.make()
    assert ask(restarted, "b", request_for(adapter)) == len(PROMPT)
    assert restarted.metric("vllm:kvtier_disk_written_blocks") == 12


def test_names_and_paths_of_adapters_that_hold_the_same_are_kept_apart(
    engines: Engines, adapter: Path, tmp_path: Path
) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    elsewhere = Path(shutil.copytree(adapter, tmp_path / "elsewhere"))
    reader = engines.make()
    assert ask(reader, "b", request_for(elsewhere)) == len(PROMPT)
    assert ask(reader, "c", request_for(adapter, "law")) == len(PROMPT)


def test_an_adapter_that_changed_under_a_running_engine_is_neither_stored_nor_loaded_and_that_is_counted(
    engines: Engines, adapter: Path
) -> None:
    engine = engines.make()
    assert ask(engine, "a", request_for(adapter)) == len(PROMPT)
    written = engine.metric("vllm:kvtier_disk_written_blocks")
    write(adapter, "second")
    engine.scheduler.reset_prefix_cache()
    assert ask(engine, "b", request_for(adapter, inplace=True)) == len(PROMPT)
    assert engine.metric("vllm:kvtier_disk_written_blocks") == written
    assert engine.metric("vllm:kvtier_disk_misses", "adapter") == 1
    # What it computed since has not come to lie on the volume under any name.
    assert ask(engines.make(), "c", request_for(adapter)) == len(PROMPT)


@pytest.mark.parametrize("lacking", ["adapter_config.json", WEIGHTS, "all"])
def test_an_adapter_that_cannot_be_read_here_is_served_without_the_volume(adapter: Path, lacking: str) -> None:
    reader = Adapters(skew_seconds=0)
    if lacking == "all":
        shutil.rmtree(adapter)
    else:
        (adapter / lacking).unlink()
    reading = reader.read(Lora("math", str(adapter)))
    wait_until(lambda: not reading.is_pending(), "the adapter is read")
    assert reading.identity is None
    reader.close()


def test_a_link_that_leads_elsewhere_is_a_change(engines: Engines, adapter: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(adapter)
    other = write(tmp_path / "other", "second")
    engine = engines.make()
    assert ask(engine, "a", request_for(link)) == len(PROMPT)
    (tmp_path / "next").symlink_to(other)
    (tmp_path / "next").rename(link)
    engine.scheduler.reset_prefix_cache()
    engine.manager.reset_cache()
    assert ask(engine, "b", request_for(link)) == len(PROMPT)
    assert engine.metric("vllm:kvtier_disk_misses", "adapter") == 1


def test_a_path_that_hangs_costs_requests_the_patience_once(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "PATIENCE_SECONDS", 0.05)
    pipe = adapter / WEIGHTS
    pipe.unlink()
    os.mkfifo(pipe)
    reader = Adapters(skew_seconds=-60)
    first = reader.read(Lora("math", str(adapter)))
    wait_until(lambda: not first.is_pending(), "nobody waits any more")
    assert first.identity is None
    wait_until(lambda: reader.read(Lora("law", str(adapter))).is_done, "others do without")
    reader.close()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="an adapter is looked at before vLLM loads it, not after")
def test_an_adapter_that_is_rewritten_between_the_look_and_the_load_is_read_for_its_own_contents_only(
    engines: Engines, adapter: Path
) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    reader = engines.make()
    reader.wait_until_known(12)
    reader.add("b", PROMPT, lora=request_for(adapter))
    context = reader.side._req_status["b"].req_context
    wait_until(lambda: not reader.manager.request(context).is_pending, "the adapter was looked at")
    write(adapter, "second")
    reader.run()
