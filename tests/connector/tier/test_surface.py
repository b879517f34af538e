# SPDX-License-Identifier: Apache-2.0
"""What we rely on is there in this vLLM, and the table of it is complete: an upgrade fails here and not in a pod."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ScheduleEndContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import kvtier_connector.vllm_adapter
from kvtier_connector.vllm_adapter import supported
from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier
from kvtier_connector.vllm_adapter.supported import RELIED_ON, Reliance, names_of


def classes_of_ours() -> Iterator[type]:
    """Yield the classes of the tier that derive from one of vLLM's."""
    for module in pkgutil.iter_modules(kvtier_connector.vllm_adapter.__path__):
        loaded = importlib.import_module(f"kvtier_connector.vllm_adapter.{module.name}")
        for found in vars(loaded).values():
            if isinstance(found, type) and found.__module__ == loaded.__name__ and bases_of(found):
                yield found


def bases_of(ours: type) -> list[type]:
    return [base for base in ours.__mro__ if base.__module__.startswith("vllm")]


def reliances_on(ours: type) -> list[Reliance]:
    owners = {f"{base.__module__}:{base.__name__}" for base in bases_of(ours)}
    return [reliance for reliance in RELIED_ON if reliance.owner in owners]


def replaced_by(ours: type) -> set[str]:
    """Return the methods of vLLM that the class replaces."""
    theirs = {name for base in bases_of(ours) for name, value in vars(base).items() if callable(getattr(base, name))}
    hidden = {name for name in theirs if name.startswith("__") and name != "__init__"}
    return (set(vars(ours)) & theirs) - hidden


def names_used_by(ours: type) -> set[str]:
    """Return what the class reads of itself, or of its parents, that is vLLM's."""
    theirs = {name for base in bases_of(ours) for name in names_of(base)}
    tree = ast.parse(textwrap.dedent(inspect.getsource(ours)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
            or (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "super"
            )
        )
    } & theirs


OURS = list(classes_of_ours())
OVERRIDDEN = [(ours, call) for ours in OURS for on in reliances_on(ours) for call in on.overridden]


def test_nothing_that_we_rely_on_is_missing() -> None:
    assert supported.examine().missing == ()


def test_the_release_at_hand_is_one_that_is_said_to_be_tested() -> None:
    assert supported.examine().standing is supported.Standing.TESTED


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_method_of_vllm_that_we_replace_is_in_the_table(ours: type) -> None:
    written = {call.partition("(")[0] for on in reliances_on(ours) for call in on.overridden}
    constructed = {"__init__" for on in reliances_on(ours) for call in on.called if call.startswith("__init__(")}
    assert replaced_by(ours) <= written | constructed


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_name_of_vllm_that_a_derived_class_uses_is_in_the_table(ours: type) -> None:
    table = reliances_on(ours)
    calls = {call.partition("(")[0] for on in table for call in (*on.overridden, *on.called)}
    names = {name.rstrip("?") for on in table for name in on.read}
    assert names_used_by(ours) - replaced_by(ours) <= calls | names


@pytest.mark.parametrize(("ours", "written"), OVERRIDDEN, ids=[f"{ours.__name__}.{call}" for ours, call in OVERRIDDEN])
def test_a_replaced_method_takes_all_that_vllm_may_pass(ours: type, written: str) -> None:
    name, _, inside = written.rstrip(")").partition("(")
    parameters = inspect.signature(inspect.unwrap(getattr(ours, name))).parameters
    for parameter in filter(None, inside.split(", ")):
        mine = parameters.get(parameter.rstrip("?"))
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        assert mine is not None or takes_any
        assert mine is None or not parameter.endswith("?") or mine.default is not mine.empty


def test_every_abstract_method_of_vllm_is_implemented() -> None:
    assert [ours for ours in OURS if inspect.isabstract(ours)] == []
    assert {SharedVolumeTier, CpuCopyWorker} <= set(OURS)


def test_vllm_finds_the_tier_by_the_configuration_that_the_operator_writes() -> None:
    config = {
        "type": "SharedVolumeTier",
        "module_path": "kvtier_connector.vllm_adapter.secondary_tier",
        "config_file": "/etc/kvtier/connector.json",
        "generation": "0123456789abcdef",
    }
    assert SecondaryTierFactory.get_tier_class(config) is SharedVolumeTier


def test_the_step_context_tells_which_requests_were_scheduled() -> None:
    assert ScheduleEndContext._fields == ("new_req_ids", "preempted_req_ids")


def test_a_gpu_spec_carries_what_the_copy_needs() -> None:
    spec = GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0])
    assert (list(spec.block_ids), spec.group_sizes, spec.block_indices) == ([3, 4], [2], [0])
