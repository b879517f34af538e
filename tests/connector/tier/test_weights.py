# SPDX-License-Identifier: Apache-2.0
"""Blocks are read for just the weights that computed them, also where the weights of a running engine are replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prompts
import pytest
import torch
from engine_fleet import Engines
from engine_parts import Shape, prompt_of
from engine_rig import SimulatedEngine
from rig import wait_until
from vllm.v1.outputs import KVConnectorOutput

from kvtier_connector.fingerprints.weights import LoadedModel, Weights, can_change_unseen, join
from kvtier_connector.store import identity
from kvtier_connector.tier.offloading_connector import KVTierConnector
from kvtier_connector.tier.worker import KVTierWorkerMetadata

PROMPT, OTHER = prompt_of(12, seed=1), prompt_of(6, seed=2)
HITS = 12 * 16


def ask(engine: SimulatedEngine, name: str, prompt: list[int] = PROMPT) -> int:
    """Return how many tokens were computed; the engine compares every value that it builds upon."""
    computed = engine.ask(name, prompt)
    engine.run()
    return computed


def settle(engine: SimulatedEngine) -> None:
    """Have the engine compute something, and wait until it has its directory."""
    ask(engine, f"settle {engine.steps}", OTHER)
    wait_until(lambda: engine.metric("vllm:kvtier_disk_active") == 1, "the engine has a directory")
    ask(engine, f"settled {engine.steps}", prompt_of(3, seed=3))


def directories(engines: Engines) -> list[str]:
    return sorted(path.name for path in engines.rigs.root.parent.iterdir() if path.is_dir())


def test_an_engine_whose_weights_were_replaced_never_reads_blocks_of_the_old_ones(
    engines: Engines, writer: SimulatedEngine
) -> None:
    engine = engines.make()
    assert ask(engine, "a") == len(PROMPT)
    engine.update_weights(7)
    assert ask(engine, "b") == len(PROMPT)
    settle(engine)
    assert ask(engine, "c") <= len(PROMPT)


def test_what_an_updated_engine_stores_is_read_by_no_engine_with_the_model_s_own_weights(engines: Engines) -> None:
    updated = engines.make()
    updated.update_weights(7)
    settle(updated)
    assert ask(updated, "a") == len(PROMPT)
    (own, epoch) = directories(engines)
    assert epoch.startswith(f"{own}.w")
    wait_until(lambda: list((engines.rigs.root.parent / epoch / "blocks").rglob("*.kvb")), "blocks of the new weights")
    document = identity.read(engines.rigs.root.parent / epoch)
    assert document is not None
    assert document["digest"] == epoch
    restarted = engines.make()
    assert ask(restarted, "b") == len(PROMPT)


def test_engines_with_the_same_update_share_its_blocks(engines: Engines) -> None:
    first, second = engines.make(), engines.make()
    for engine in (first, second):
        engine.update_weights(7)
        settle(engine)
    assert ask(first, "a") == len(PROMPT)
    second.wait_until_known(12)
    assert ask(second, "b") == len(PROMPT) - HITS


def test_a_reset_after_which_the_weights_are_as_before_costs_no_block_on_the_volume(
    engines: Engines,
) -> None:
    engine = engines.make()
    assert ask(engine, "a") == len(PROMPT)
    engine.update_weights(0)
    settle(engine)
    assert ask(engine, "b") == len(PROMPT) - HITS
    assert len(directories(engines)) == 1


def test_an_engine_comes_back_to_its_first_blocks_with_its_first_weights(engines: Engines) -> None:
    engine = engines.make()
    assert ask(engine, "a") == len(PROMPT)
    for seed in (7, 0):
        engine.update_weights(seed)
        settle(engine)
    engine.wait_until_known(12)
    assert ask(engine, "b") == len(PROMPT) - HITS


def test_a_request_after_a_reset_waits_for_the_look_and_then_reads_what_the_volume_has(
    engines: Engines, writer: SimulatedEngine
) -> None:
    engine = engines.make()
    engine.wait_until_known(engines.count())
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.step()
    engine.step()
    assert engine.tier.is_doubting, "a step that computes nothing may lie before the update"
    engine.add("a", prompts.PROMPT)
    engine.step()
    assert not engine.tier.is_doubting, "the request that waits is what the workers are asked for"
    assert engine.computed["a"] == 0
    assert engine.metric("vllm:kvtier_disk_read_blocks") == 0
    engine.run()
    assert engine.computed["a"] == prompts.REST
    assert engine.metric("vllm:kvtier_disk_misses", "weights") == 0


@pytest.mark.parametrize("windows", [(64,), (None, 64)], ids=["windows-alone", "windows-beside"])
def test_requests_of_a_model_with_windows_have_the_workers_asked_too(
    engines: Engines, windows: tuple[int | None, ...]
) -> None:
    shape = Shape(windows=windows)
    engines.make(shape).ask("writer", prompts.PROMPT)
    engine = engines.make(shape)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.step()
    engine.add("a", prompts.PROMPT)
    engine.run(lambda: not engine.tier.is_doubting)
    engine.run()


def test_a_request_that_reads_nothing_does_not_wait_for_the_look(engines: Engines, writer: SimulatedEngine) -> None:
    engine = engines.make()
    engine.wait_until_known(engines.count())
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.add("a", prompts.PROMPT, kvtier_load=False)
    engine.step()
    assert engine.computed["a"] == len(prompts.PROMPT)
    engine.run()


def test_an_answer_to_an_earlier_question_is_not_believed(engines: Engines) -> None:
    engine = engines.make()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("a", PROMPT)
    first: Any = engine.scheduler.schedule().kv_connector_metadata
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    second: Any = engine.scheduler.schedule().kv_connector_metadata
    assert (first.weights, second.weights) == (1, 2)
    for question, is_doubting in ((1, True), (2, False)):
        told = KVTierWorkerMetadata(weights={0: (question, "weights")})
        engine.side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
        assert engine.tier.is_doubting is is_doubting


def test_weights_that_nobody_can_look_at_are_shared_with_nobody() -> None:
    weights = Weights("original", is_shared=True)
    assert weights.epoch == ""
    weights.settle(None)
    alone = weights.epoch
    assert alone.startswith("p")
    weights.settle(None)
    assert weights.epoch not in {"", alone}
    weights.settle("original")
    assert weights.epoch == ""
    unknown = Weights(None, is_shared=True)
    unknown.settle("found")
    assert unknown.epoch.startswith("p")


def test_an_engine_that_can_be_given_weights_without_a_reset_shares_its_blocks_with_nobody() -> None:
    alone = Weights("original", is_shared=False)
    assert alone.epoch.startswith("p")
    alone.settle("original")
    assert alone.epoch.startswith("p")

    def config(**changes: Any) -> Any:
        extension = changes.pop("worker_extension_cls", "")
        return SimpleNamespace(
            weight_transfer_config=changes.get("weight_transfer_config"),
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
        )

    assert not can_change_unseen(config())
    assert can_change_unseen(config(weight_transfer_config=object()))
    assert can_change_unseen(config(worker_extension_cls="trainer.Extension"))


class Holder:
    """Has a model, as vLLM's workers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.look = self._look()

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _look(self) -> LoadedModel:
        return LoadedModel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_change_of_any_weight_shows(dtype: torch.dtype) -> None:
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.arange(15).to(dtype), requires_grad=False) for name in ("one", "two")}
    )
    holder = Holder(model)
    seen = [holder.look.digest()]
    for name in ("one", "two"):
        for place in range(15):
            model[name].data.view(torch.uint8)[place] ^= 1
            seen.append(holder.look.digest())
    swapped = model["one"].data[[1, 0, *range(2, 15)]]
    model["one"].data.copy_(swapped)
    seen.append(holder.look.digest())
    assert None not in seen
    assert len(set(seen)) == len(seen)


def test_weights_of_a_draft_model_count_and_what_cannot_be_read_is_unknown() -> None:
    holder = Holder(torch.nn.Linear(2, 2))
    before = holder.look.digest()
    holder.drafter = SimpleNamespace(model=torch.nn.Linear(2, 2))  # type: ignore[attr-defined]  # as vLLM's runner has
    assert holder.look.digest() != before
    holder.model = torch.nn.Linear(2, 2, device="meta")
    assert holder.look.digest() is None
    assert join(["a", None]) is None
    assert join([]) is None
    assert join(["a", "b"]) != join(["b", "a"])


def test_a_weight_that_a_kernel_keeps_elsewhere_makes_them_unknown() -> None:
    weights = {"one": torch.ones(4), "packed": torch.empty(0)}
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(each, requires_grad=False) for name, each in weights.items()}
    )
    assert Holder(model).look.digest() is None


def test_weights_that_can_be_told_neither_by_files_nor_by_a_look_are_no_tier(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LoadedModel, "digest", lambda self: None)
    engine = engines.make()
    assert isinstance(engine.connector, KVTierConnector)
    assert ask(engine, "a") == len(PROMPT)
    assert engine.metric("vllm:kvtier_disk_refused", "unknown engine.weights") == 1
    assert engine.metric("vllm:kvtier_disk_active") == 0
    assert not engines.rigs.root.exists()


def test_an_engine_answers_while_it_has_no_descriptors_for_the_directory_of_new_weights(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines.make()
    assert ask(engine, "before") == len(PROMPT)
    with monkeypatch.context() as full:
        full.setattr(os, "memfd_create", exhausted)
        engine.update_weights(7)
        assert ask(engine, "first") == len(PROMPT), "blocks of other weights are not read"
        assert ask(engine, "second", OTHER) == len(OTHER)
        assert len([message for message in caplog.messages if "no room" in message]) == 1

    def has_moved() -> bool:
        ask(engine, f"then {engine.steps}", OTHER)
        return engine.tier.root != str(engines.rigs.root)

    wait_until(has_moved, "the directory of the weights is used")
    settle(engine)
    assert Path(engine.tier.root).name in directories(engines), "it has the directory of its weights"


def exhausted(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
