# SPDX-License-Identifier: Apache-2.0
"""Requests that run on while the weights are replaced: what the GPU holds of the earlier ones reaches nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fleet import Engines
from engine_parts import prompt_of
from engine_rig import SimulatedEngine
from rig import wait_until

from kvtier_connector.contract import MUST_BE_KNOWN, UNKNOWN
from kvtier_connector.fingerprints.weights import Weights

REFUSED = f"{UNKNOWN}{MUST_BE_KNOWN[0]}"
"""The label while nobody can tell of which weights a block is."""
PROMPT, OTHER = prompt_of(12), prompt_of(6, seed=2)


def replaced_under_a_request(engines: Engines, *, seed: int) -> SimulatedEngine:
    """Return an engine whose caches were reset while a request ran on, and its weights replaced then."""
    engine = engines.make()
    engine.add("runs on", PROMPT, answer=40)
    engine.run(lambda: engine.computed["runs on"] == len(PROMPT))
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "the GPU holds its blocks"
    with torch.no_grad():
        engine.model.weight.fill_(float(seed))
    return engine


def wait_until_active(engine: SimulatedEngine) -> None:
    wait_until(lambda: engine.metric("vllm:kvtier_disk_active") == 1, "the engine has a directory")


def stored(engine: SimulatedEngine) -> dict[str, int]:
    """Return how many blocks lie in the directory of each weights."""
    found = {each.name: len([*each.rglob("*.kvb")]) for each in Path(engine.tier.root).parent.iterdir()}
    return {name: blocks for name, blocks in found.items() if blocks}


@pytest.mark.parametrize("is_noticed", [True, False])
def test_blocks_of_earlier_weights_that_stay_on_the_gpu_are_stored_under_no_name(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, is_noticed: bool
) -> None:
    if not is_noticed:
        doubt = Weights.doubt
        monkeypatch.setattr(Weights, "doubt", lambda weights, **_: doubt(weights, is_clean=True))
    engine = replaced_under_a_request(engines, seed=7)
    # By vLLM's own cache it is answered with those blocks: that the reset has failed was told.
    monkeypatch.setattr(engine, "_check", lambda *_: None)
    engine.run()
    if is_noticed:
        wait_until(lambda: engine.tier._sites.here.volume.refused_field, "the engine does without the volume")
    else:
        wait_until_active(engine)
    engine.add("shares them", [*PROMPT, *OTHER])
    engine.run()
    assert bool(stored(engine)) is not is_noticed


def test_a_reset_with_nothing_left_on_the_gpu_gives_the_volume_back(engines: Engines) -> None:
    engine = replaced_under_a_request(engines, seed=7)
    engine.run()
    wait_until(lambda: engine.metric("vllm:kvtier_disk_refused", REFUSED) == 1, "the engine says that it is refused")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.add("settling", OTHER)
    engine.run()
    wait_until_active(engine)
    assert engine.metric("vllm:kvtier_disk_refused", REFUSED) == 0
    assert engine.ask("second", PROMPT) == len(PROMPT)
    engine.run()
    updated = engines.make()
    updated.update_weights(7)
    updated.add("settling", OTHER)
    updated.run()
    wait_until_active(updated)
    updated.wait_until_known(1)
    assert updated.ask("second", PROMPT) < len(PROMPT)


def test_what_a_request_leaves_to_be_stored_that_ends_under_the_reset_is_over_with_it(engines: Engines) -> None:
    engine = replaced_under_a_request(engines, seed=7)
    engine.abort("runs on")
    # Its blocks reach the CPU tier with the step that tells of the weights.
    assert engine.step().total_num_scheduled_tokens == 0
    engine.add("second", OTHER)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    engine.assert_nothing_is_left()


def test_a_reset_under_a_request_that_leaves_the_weights_as_they_are_costs_nothing(engines: Engines) -> None:
    engine = replaced_under_a_request(engines, seed=0)
    engine.run()
    engine.add("second", PROMPT)
    engine.run()
    assert engine.metric("vllm:kvtier_disk_active") == 1
    assert list(stored(engine)) == [Path(engine.tier.root).name]
