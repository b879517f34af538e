# SPDX-License-Identifier: Apache-2.0
"""An engine whose weights are replaced while it runs leaves the volume, and never serves or stores a wrong block."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import engine_fleet as prompts
import pytest
import torch
from engine_fleet import Engines
from engine_parts import Shape, answer_of, prompt_of
from engine_rig import SimulatedEngine
from rig import wait_until
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.v1.outputs import KVConnectorOutput

from kvtier_connector.contract.engine import REPLACED_WEIGHTS
from kvtier_connector.vllm_adapter.fingerprint import LoadedWeights
from kvtier_connector.vllm_adapter.worker import KVTierWorkerMetadata, find_caller

PROMPT, OTHER = prompt_of(12, seed=1), prompt_of(6, seed=2)
HITS = 12 * 16


def ask(engine: SimulatedEngine, name: str, prompt: list[int] = PROMPT) -> int:
    """Return how many tokens were computed; the engine compares every value that it builds upon."""
    computed = engine.ask(name, prompt)
    engine.run()
    return computed


def blocks_of(engines: Engines) -> int:
    return len(list(engines.rigs.root.parent.rglob("*.kvb")))


def reset_all(engine: SimulatedEngine) -> None:
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def is_away(engine: SimulatedEngine) -> bool:
    return engine.metric("vllm:kvtier_disk_refused", REPLACED_WEIGHTS) == 1


@pytest.mark.parametrize("by_data", [False, True], ids=["in-place", "by-data"])
@pytest.mark.parametrize("resets_connector", [False, True], ids=["default-reset", "full-reset"])
def test_replaced_weights_neither_read_old_blocks_nor_store_under_their_names(
    engines: Engines, caplog: pytest.LogCaptureFixture, *, resets_connector: bool, by_data: bool
) -> None:
    engine = engines.make()
    assert ask(engine, "a") == len(PROMPT)
    before = blocks_of(engines)
    engine.update_weights(7, resets_connector=resets_connector, by_data=by_data)
    assert ask(engine, "b") == len(PROMPT), "the CPU tier and the volume hold blocks of the old weights"
    assert ask(engine, "c", OTHER) == len(OTHER)
    assert blocks_of(engines) == before
    assert is_away(engine)
    assert engine.metric("vllm:kvtier_disk_active") == 0
    assert len([message for message in caplog.messages if "weights of this engine were replaced" in message]) == 1
    fresh = engines.make()
    assert ask(fresh, "d", OTHER) == len(OTHER)
    assert ask(fresh, "e") == len(PROMPT) - HITS
    engine.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("is_reported", "names", "is_async"),
    [(False, "a", False), (True, "a", False), (True, "ab", True)],
    ids=["under way", "reported", "two that share blocks, beside a step in flight"],
)
def test_a_request_gets_the_new_weights_whether_or_not_its_load_was_reported(
    engines: Engines, writer: SimulatedEngine, names: str, *, is_reported: bool, is_async: bool
) -> None:
    engine = prompts.restart(engines, Shape(is_async=is_async))
    engine.copies.lag = float("inf")
    for name in names:
        engine.add(name, prompts.PROMPT)
    engine.run(lambda: engine.copies.waiting > 0)
    if is_reported:
        engine.copies.lag = 0
        engine.run(lambda: not engine.is_loading("a"))
    assert engine.computed["a"] == 0
    engine.fill_weights(7)
    engine.copies.lag = 0
    engine.run()
    # Of two, one computes what the other one shares.
    assert len(names) > 1 or engine.computed["a"] == prompts.REST * is_reported + len(prompts.PROMPT)
    assert engine.answers == dict.fromkeys(names, answer_of(prompts.PROMPT, 1, salt=engine.source_of(None, None)))


@pytest.mark.parametrize(("most_wait", "steps"), [(1.0, 0), (-1.0, 1)], ids=["with its copies", "a step later"])
def test_a_request_that_computes_before_its_load_is_reported_gets_the_new_weights(
    engines: Engines, most_wait: float, steps: int
) -> None:
    engine = engines.make(Shape(is_splitting=True, most_tokens=512))
    assert ask(engine, "a") == len(PROMPT)
    engine.scheduler.reset_prefix_cache()
    engine.side.copying.value, engine.side.most_wait_seconds = 1e18, most_wait
    engine.add("b", PROMPT)
    for _ in range(steps):
        engine.step()
    engine.fill_weights(7)
    engine.step()
    assert engine.computed["b"] == len(PROMPT) - HITS
    engine.run()
    assert engine.computed["b"] == 2 * len(PROMPT) - HITS
    assert engine.answers["b"] == answer_of(PROMPT, 1, salt=engine.source_of(None, None))
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("windows", [(None,), (64,), (None, 64)], ids=["full", "windows", "both"])
def test_an_engine_comes_back_with_its_first_weights(engines: Engines, windows: tuple[int | None, ...]) -> None:
    engine = engines.make(Shape(windows=windows))
    assert ask(engine, "a") == len(PROMPT)
    engine.update_weights(7)
    assert ask(engine, "b") == len(PROMPT)
    engine.update_weights(0)
    ask(engine, "settling", OTHER)
    assert not is_away(engine)
    assert engine.metric("vllm:kvtier_disk_active") == 1
    assert ask(engine, "c") < len(PROMPT)


@pytest.mark.parametrize("resets", [(), (False,)], ids=["no-reset", "default-reset"])
def test_an_engine_stays_away_while_caches_may_hold_other_blocks(engines: Engines, resets: tuple[bool, ...]) -> None:
    engine = engines.make()
    assert ask(engine, "a") == len(PROMPT)
    engine.update_weights(7, resets_connector=False)
    assert ask(engine, "b", OTHER) == len(OTHER)
    engine.fill_weights(0)
    for _ in resets:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    ask(engine, "c", prompt_of(5, seed=4))
    assert is_away(engine)
    assert ask(engines.make(), "d", OTHER) == len(OTHER)


def test_a_full_reset_under_a_running_request_brings_no_engine_back(engines: Engines) -> None:
    engine = engines.make()
    engine.update_weights(7)
    engine.add("runs on", PROMPT, answer=40)
    engine.run(lambda: engine.computed["runs on"] == len(PROMPT))
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "the GPU holds its blocks"
    engine.fill_weights(0)
    engine.abort("runs on")
    ask(engine, "a", OTHER)
    assert is_away(engine)
    reset_all(engine)
    ask(engine, "b", OTHER)
    assert not is_away(engine)


def test_a_reset_that_leaves_the_weights_as_they_are_costs_no_block(engines: Engines, writer: SimulatedEngine) -> None:
    engine = prompts.restart(engines)
    reset_all(engine)
    engine.step()
    assert ask(engine, "a", prompts.PROMPT) == prompts.REST
    assert engine.metric("vllm:kvtier_disk_misses", "weights") == 0


def test_all_weights_are_compared_with_the_first_step_that_computes_after_a_reset(engines: Engines) -> None:
    engine = engines.make()
    reset_all(engine)
    idle: Any = engine.step().kv_connector_metadata
    assert (idle.weights, idle.is_reset) == (0, True), "weights may be absent until the engine computes again"
    engine.add("a", PROMPT, kvtier_load=False)
    first: Any = engine.scheduler.schedule().kv_connector_metadata
    reset_all(engine)
    second: Any = engine.scheduler.schedule().kv_connector_metadata
    assert (first.weights, second.weights, second.is_reset) == (1, 2, False)
    for number, is_original in ((1, False), (1, True), (2, True)):
        told = KVTierWorkerMetadata(weights={0: (number, is_original)})
        engine.side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
        assert engine.tier.attachment.is_current is (number == 2), "an answer of before the reset brings no engine back"


def test_steps_without_transfers_compare_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.make()
    engine.add("a", PROMPT, answer=30)
    engine.run(lambda: engine.computed["a"] == len(PROMPT))
    for _ in range(5):
        engine.step()
    checks: list[int] = []
    monkeypatch.setattr(LoadedWeights, "check", lambda _: checks.append(engine.steps))
    for _ in range(5):
        engine.step()
    assert checks == []


class Holder:
    def __init__(self, model: torch.nn.Module, **options: bool) -> None:
        self.model = model
        self.weights = self._look(**options)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _look(self, **options: bool) -> LoadedWeights:
        return LoadedWeights(find_caller("get_model"), **options)

    def has_changed(self, *, is_whole: bool = False) -> bool:
        if is_whole:
            self.weights.check_all()
        else:
            self.weights.check()
        return self.weights.has_changed


class Scaled(torch.nn.Module):
    """A layer with all that vLLM keeps of one: weights, saved scales, and tables that are computed anew."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(300).to(dtype), requires_grad=False)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("cos_sin_cache", torch.ones(8), persistent=False)


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "no_grad": lambda model: model.weight.mul_(2),
    "data of one word": lambda model: model.weight.data[0].add_(1),
    "data": lambda model: model.weight.data.mul_(2),
    "storage": lambda model: setattr(model.weight, "data", model.weight.data * 2),
    "parameter": lambda model: setattr(model, "weight", torch.nn.Parameter(model.weight.detach() * 2)),
    "buffer": lambda model: model.get_buffer("layer_scalar").mul_(2),
    "data of a buffer": lambda model: model.get_buffer("layer_scalar").data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_change_of_weights_or_saved_buffers_shows(change: str, *, is_inference: bool) -> None:
    holder = Holder(model := Scaled())
    assert not holder.has_changed()
    with torch.inference_mode(is_inference), torch.no_grad():
        CHANGES[change](model)
    assert holder.has_changed()
    assert holder.has_changed(is_whole=True)


def test_what_is_written_as_it_was_and_what_is_computed_anew_is_no_change() -> None:
    holder = Holder(model := Scaled())
    with torch.no_grad():
        model.weight.add_(0)
        model.get_buffer("cos_sin_cache").mul_(2)
    assert not holder.has_changed()
    model.weight.data.add_(1)
    assert holder.has_changed()
    model.weight.data.sub_(1)
    assert holder.has_changed(), "only a comparison of all weights takes it back"
    assert not holder.has_changed(is_whole=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_comparison_of_all_weights_sees_every_byte(dtype: torch.dtype) -> None:
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.arange(15).to(dtype), requires_grad=False) for name in ("one", "two")}
    )
    holder = Holder(model)
    for name in ("one", "two"):
        for place in range(15):
            model[name].data.view(torch.uint8)[place] ^= 1
            assert holder.has_changed(is_whole=True)
            model[name].data.view(torch.uint8)[place] ^= 1
            assert not holder.has_changed(is_whole=True)
    model["one"].data.copy_(model["one"].data[[1, 0, *range(2, 15)]])
    assert holder.has_changed(is_whole=True)


def test_weights_of_a_draft_model_count_and_experts_that_move_between_ranks_do_not() -> None:
    holder = Holder(torch.nn.Linear(2, 2))
    assert holder.weights.digest is not None
    holder.drafter = SimpleNamespace(model=torch.nn.Linear(2, 2))  # type: ignore[attr-defined]  # as vLLM's runner has
    assert holder.has_changed(is_whole=True)
    unreadable = Holder(torch.nn.Linear(2, 2, device="meta"))
    assert unreadable.weights.digest is None
    assert unreadable.has_changed()
    experts = torch.nn.Linear(2, 2)
    experts.get_expert_weights = list  # type: ignore[assignment]  # as vLLM's layers of experts have
    model = torch.nn.ModuleDict({"experts": experts, "router": torch.nn.Linear(2, 2)})
    moving, fixed = Holder(model, has_moving_experts=True), Holder(model)
    experts.weight.data.mul_(2)
    assert (moving.has_changed(), fixed.has_changed()) == (False, True)
    model["router"].weight.data.mul_(2)
    assert moving.has_changed()


def test_weights_that_a_kernel_packs_anew_have_changed_for_good() -> None:
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.float32)
    layer.weight.requires_grad_(requires_grad=False)
    weight = layer.weight.detach().clone()
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.numel() == 0, "vLLM's CPU build packs it"
    holder = Holder(layer)
    assert holder.weights.digest is None
    assert not holder.has_changed()
    assert not holder.has_changed(is_whole=True)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert holder.has_changed()
    assert holder.has_changed(is_whole=True)


def test_weights_that_nothing_identifies_are_not_shared(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadedWeights, "digest", None)
    monkeypatch.setattr("kvtier_connector.vllm_adapter.fingerprint.fingerprint_files", lambda *_: None)
    engine, other = engines.make(), engines.make()
    assert ask(engine, "a") == len(PROMPT)
    wait_until(lambda: blocks_of(engines) == len(PROMPT) // 16, "its blocks are written")
    reset_all(engine)
    assert ask(engine, "b") == len(PROMPT) - HITS
    assert ask(other, "c") == len(PROMPT)
    names = {path.name for path in engines.rigs.root.parent.iterdir() if path.is_dir()}
    assert len(names) == 2
    assert all(name.startswith(f"{engines.rigs.root.name}.p") for name in names)
