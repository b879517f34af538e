# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has every name and parameter that kvtier uses, and `vllm_surface` lists all of them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.lora.model_manager import LoRAModelManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ScheduleEndContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_surface import USES, Use, names_of

import kvtier_connector.vllm_adapter
from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier


def derived_classes() -> Iterator[type]:
    """Yield the classes of kvtier that derive from one of vLLM's."""
    for module in pkgutil.iter_modules(kvtier_connector.vllm_adapter.__path__):
        loaded = importlib.import_module(f"kvtier_connector.vllm_adapter.{module.name}")
        for found in vars(loaded).values():
            if isinstance(found, type) and found.__module__ == loaded.__name__ and bases_of(found):
                yield found


def bases_of(ours: type) -> list[type]:
    return [base for base in ours.__mro__ if base.__module__.startswith("vllm")]


def uses_of(ours: type) -> list[Use]:
    owners = {f"{base.__module__}:{base.__name__}" for base in bases_of(ours)}
    return [use for use in USES if use.owner in owners]


def overridden_by(ours: type) -> set[str]:
    """Return the methods of vLLM that the class overrides."""
    theirs = {name for base in bases_of(ours) for name, value in vars(base).items() if callable(getattr(base, name))}
    hidden = {name for name in theirs if name.startswith("__") and name != "__init__"}
    return (set(vars(ours)) & theirs) - hidden


def names_used_by(ours: type) -> set[str]:
    """Return the attributes of vLLM that the class reads of itself or of its parents."""
    theirs = {name for base in bases_of(ours) for name in names_of(base)}
    tree = ast.parse(textwrap.dedent(inspect.getsource(ours)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr != "__new__"
        and (
            (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
            or (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "super"
            )
        )
    } & theirs


OURS = list(derived_classes())
OVERRIDDEN = [(ours, call) for ours in OURS for use in uses_of(ours) for call in use.overridden]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.owner.rpartition(".")[2])
def test_vllm_has_every_name_and_parameter_that_kvtier_uses(use: Use) -> None:
    assert list(use.differences()) == []


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_method_of_vllm_that_kvtier_overrides_is_listed(ours: type) -> None:
    written = {call.partition("(")[0] for use in uses_of(ours) for call in use.overridden}
    constructed = {"__init__" for use in uses_of(ours) for call in use.called if call.startswith("__init__(")}
    assert overridden_by(ours) <= written | constructed


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_name_of_vllm_that_a_derived_class_uses_is_listed(ours: type) -> None:
    uses = uses_of(ours)
    calls = {call.partition("(")[0] for use in uses for call in (*use.overridden, *use.called)}
    names = {name.rstrip("?") for use in uses for name in use.read}
    assert names_used_by(ours) - overridden_by(ours) <= calls | names


@pytest.mark.parametrize(("ours", "written"), OVERRIDDEN, ids=[f"{ours.__name__}.{call}" for ours, call in OVERRIDDEN])
def test_an_overriding_method_takes_every_argument_of_vllm(ours: type, written: str) -> None:
    name, _, inside = written.rstrip(")").partition("(")
    parameters = inspect.signature(inspect.unwrap(getattr(ours, name))).parameters
    for parameter in filter(None, inside.split(", ")):
        mine = parameters.get(parameter.rstrip("?"))
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        assert mine is not None or takes_any
        assert mine is None or not parameter.endswith("?") or mine.default is not mine.empty


class Theirs:
    """Stands for a class of vLLM."""

    def __init__(self, config: Any) -> None:
        self.config = config
        local = config
        del local

    def lookup(self, key: str, context: object, *, exclude: int | None = None) -> None: ...

    @classmethod
    def definitions(cls, extra: object) -> None: ...


@pytest.mark.parametrize(
    ("used", "told"),
    [
        ({"overridden": ("lookup(key, context, exclude)", "definitions(extra)"), "read": ("config",)}, ""),
        ({"called": ("__init__(config)", "lookup(key, context)", "lookup(key, context, tenant?)")}, ""),
        ({"read": ("local",)}, "has no local"),
        ({"overridden": ("gone()",)}, "has no gone"),
        ({"called": ("lookup(key)",)}, "takes (key, context, exclude), and we know (key)"),
        ({"called": ("lookup(key, context, tenant)",)}, "takes (key, context, exclude)"),
        ({"overridden": ("lookup(key, context)",)}, "takes (key, context, exclude), and we know (key, context)"),
        ({"overridden": ("lookup(context, key, exclude)",)}, "and we know (context, key, exclude)"),
    ],
)
def test_a_difference_is_told_with_both_signatures(used: dict[str, tuple[str, ...]], told: str) -> None:
    lines = list(Use(f"{__name__}:Theirs", **used).differences())
    assert [told in line for line in lines] == ([True] if told else [])


def test_a_model_runner_registers_the_kv_caches_itself_so_that_it_is_among_the_callers() -> None:
    assert ".register_kv_caches(" in inspect.getsource(GPUModelRunner.initialize_kv_cache)


def test_a_model_with_adapters_knows_their_manager() -> None:
    assert "self.model.lora_manager = self" in inspect.getsource(LoRAModelManager.__init__)


def test_the_scheduler_reads_the_policy_of_failed_loads_after_it_made_the_connector() -> None:
    source = inspect.getsource(Scheduler.__init__)
    assert source.index("create_connector(") < source.index(".kv_load_failure_policy")


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


def test_the_step_context_has_the_requests_that_were_scheduled() -> None:
    assert ScheduleEndContext._fields == ("new_req_ids", "preempted_req_ids")


def test_a_gpu_spec_has_the_blocks_of_each_group() -> None:
    spec = GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0])
    assert (list(spec.block_ids), spec.group_sizes, spec.block_indices) == ([3, 4], [2], [0])
