# SPDX-License-Identifier: Apache-2.0
"""Our connector as a child of vLLM's MultiConnector, where another child is asked first."""

from __future__ import annotations

from engine_fleet import Engines
from engine_parts import prompt_of
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier_connector.vllm_adapter.connector import KVTierConnector
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.worker import KVTierWorkerMetadata, WorkerQuestion

FIRST = Declared(("attention",), "one", "weights of the first")
SECOND = Declared(("attention",), "one", "weights of the second")


def test_vllm_finds_the_class_by_its_name_alone() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is KVTierConnector


def test_workers_are_asked_with_the_steps_until_each_has_answered_and_in_the_order_of_their_ranks() -> None:
    question = WorkerQuestion(2)
    asked = question.ask()
    assert asked
    assert question.take({}) is None
    assert question.take({1: (asked, SECOND)}) is None
    assert question.number == asked
    assert question.take({0: (asked, FIRST)}) == [FIRST, SECOND]
    assert not question.number
    assert question.take({0: (asked, FIRST), 1: (asked, SECOND)}) is None


def test_answers_to_a_question_that_was_dropped_count_for_nothing() -> None:
    question = WorkerQuestion(1)
    dropped = question.ask()
    question.drop()
    assert question.take({0: (dropped, FIRST)}) is None
    question.ask()
    assert question.take({0: (dropped, FIRST)}) is None
    assert question.take({0: (question.number, SECOND)}) == [SECOND]


def test_the_answers_of_several_workers_are_put_together() -> None:
    one = KVTierWorkerMetadata(declared={0: (1, FIRST)})
    both = one.aggregate(KVTierWorkerMetadata(declared={1: (1, SECOND)}))
    assert both.declared == {0: (1, FIRST), 1: (1, SECOND)}


def test_an_engine_whose_declaration_is_not_passed_on_shares_the_volume_with_others(engines: Engines) -> None:
    prompt = prompt_of(12, seed=1)
    alone = engines.make()
    alone.ask("stores", prompt)
    alone.run()
    assert engines.count()
    child = engines.make(is_child=True)
    # Nothing is known of the volume before a step has asked the worker.
    assert child.ask("asks the worker", prompt_of(3, seed=2)) == len(prompt_of(3, seed=2))
    child.run()
    child.wait_until_attached()
    assert child.ask("reads", prompt) < len(prompt)
    another = prompt_of(12, seed=3)
    child.ask("stores", another)
    child.run()
    assert engines.assert_volume_holds(child, another)
    third = engines.make()
    third.wait_until_attached()
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
    child.ask("stores", prompt)
    child.run()
    assert child.metric("vllm:kvtier_disk_active") == 0
    assert engines.count() == 0, "blocks of other weights have no name"
