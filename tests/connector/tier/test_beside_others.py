# SPDX-License-Identifier: Apache-2.0
"""Our connector as a child of vLLM's MultiConnector, where another child is asked first."""

from __future__ import annotations

from typing import Any

from engine_fleet import Engines
from engine_parts import prompt_of
from rig import wait_until
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier_connector.fingerprints.packing import Declared
from kvtier_connector.tier.connector import KVTierConnector
from kvtier_connector.tier.exchange import Declarations, KVTierWorkerMetadata

FIRST = Declared(("attention",), "one", "weights of the first")
SECOND = Declared(("attention",), "one", "weights of the second")


def test_vllm_finds_the_class_by_its_name_alone() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is KVTierConnector


def test_what_came_through_before_the_first_step_is_used_at_once() -> None:
    used: list[Any] = []
    declarations = Declarations(2, lambda *given: used.append(given))
    declarations.begin([FIRST, SECOND])
    assert not declarations.is_asking
    assert used == [([FIRST, SECOND],)]


def test_workers_are_asked_with_the_steps_until_each_has_answered_and_in_the_order_of_their_ranks() -> None:
    used: list[Any] = []
    declarations = Declarations(2, lambda *given: used.append(given))
    declarations.begin([])
    assert declarations.is_asking
    declarations.take({})
    declarations.take({1: SECOND})
    assert declarations.is_asking
    assert not used
    declarations.take({0: FIRST})
    declarations.take({0: FIRST, 1: SECOND})
    assert used == [([FIRST, SECOND], 0.0)]
    assert not declarations.is_asking


def test_the_answers_of_several_workers_are_put_together() -> None:
    one = KVTierWorkerMetadata(declared={0: FIRST})
    assert one.aggregate(KVTierWorkerMetadata(declared={1: SECOND})).declared == {0: FIRST, 1: SECOND}


def test_an_engine_whose_declaration_is_not_passed_on_shares_the_volume_with_others(engines: Engines) -> None:
    prompt = prompt_of(12, seed=1)
    alone = engines.make()
    alone.ask("stores", prompt)
    alone.run()
    stored = engines.count()
    assert stored
    child = engines.make(is_child=True)
    # Nothing is known of the volume before a step has asked the worker.
    assert child.ask("asks the worker", prompt_of(3, seed=2)) == len(prompt_of(3, seed=2))
    child.run()
    child.wait_until_known(stored)
    assert child.ask("reads", prompt) < len(prompt)
    another = prompt_of(12, seed=3)
    child.ask("stores", another)
    child.run()
    assert engines.assert_volume_holds(child, another)
    third = engines.make()
    third.wait_until_known(engines.count())
    assert third.ask("reads", another) < len(another)


def test_weights_that_were_replaced_before_the_worker_was_asked_are_told_from_those_it_began_with(
    engines: Engines,
) -> None:
    prompt = prompt_of(12, seed=1)
    child = engines.make(is_child=True)
    child.update_weights(7)
    # As while the first request waits for another child.
    child.step()
    child.ask("asks of the weights", prompt_of(3, seed=2))
    wait_until(lambda: child.metric("vllm:kvtier_disk_active") == 1, "the engine has a directory")
    child.ask("stores", prompt)
    child.run()
    assert engines.count() == 0, "in the directory of the weights that the model came with"
