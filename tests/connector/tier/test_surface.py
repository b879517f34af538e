# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has every name and parameter that kvtier uses, and `vllm_surface` lists all of them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator

import pytest
from vllm.lora.model_manager import LoRAModelManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_surface import USES, Use, names_of

import kvtier_connector.vllm_adapter
from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier
from kvtier_connector.vllm_adapter.worker import KVTierMetadata, KVTierWorkerMetadata


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
MADE_BY_US = (CpuCopyWorker, KVTierManager, KVTierMetadata, KVTierWorkerMetadata, Declared)
OVERRIDDEN = [
    (ours, name)
    for ours in OURS
    for name in sorted(overridden_by(ours))
    if name != "__init__" or ours not in MADE_BY_US
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.owner.rpartition(".")[2])
def test_vllm_has_every_name_and_parameter_that_kvtier_uses(use: Use) -> None:
    assert list(use.differences()) == []


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_method_that_says_so_overrides_one_of_vllm_and_no_other_does(ours: type) -> None:
    marked = {name for name in vars(ours) if getattr(getattr(ours, name), "__override__", False)}
    assert marked - {"__init__"} == overridden_by(ours) - {"__init__"}


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_name_of_vllm_that_a_derived_class_uses_is_listed(ours: type) -> None:
    uses = uses_of(ours)
    calls = {call.partition("(")[0] for use in uses for call in use.called}
    names = {name.rstrip("?") for use in uses for name in use.read}
    own = {name for each in ours.__mro__ if each in OURS for name in overridden_by(each)}
    assert names_used_by(ours) - own <= calls | names


@pytest.mark.parametrize(("ours", "name"), OVERRIDDEN, ids=[f"{ours.__name__}.{name}" for ours, name in OVERRIDDEN])
def test_an_overriding_method_takes_every_argument_of_vllm(ours: type, name: str) -> None:
    (theirs, *_) = (getattr(base, name) for base in bases_of(ours) if name in vars(base))
    mine = inspect.signature(inspect.unwrap(getattr(ours, name))).parameters
    wanted = [each for each, value in inspect.signature(theirs).parameters.items() if value.kind not in REST]
    if not any(each.kind is each.VAR_KEYWORD for each in mine.values()):
        assert [each for each in mine if each in wanted] == wanted
    added = [each for each in mine.values() if each.name not in wanted and each.kind not in REST]
    # vLLM passes the configuration of a tier to its constructor.
    assert name == "__init__" or all(each.default is not each.empty for each in added)


REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def test_a_model_runner_registers_the_kv_caches_itself_so_that_it_is_among_the_callers() -> None:
    assert ".register_kv_caches(" in inspect.getsource(GPUModelRunner.initialize_kv_cache)


def test_a_model_with_adapters_knows_their_manager() -> None:
    assert "self.model.lora_manager = self" in inspect.getsource(LoRAModelManager.__init__)


def test_the_scheduler_reads_the_policy_of_failed_loads_after_it_made_the_connector() -> None:
    source = inspect.getsource(Scheduler.__init__)
    assert source.index("create_connector(") < source.index(".kv_load_failure_policy")


def test_vllm_derives_no_class_from_that_of_requests_by_which_the_tier_finds_adapters_and_salts() -> None:
    assert Request.__subclasses__() == []


def test_every_abstract_method_of_vllm_is_implemented() -> None:
    assert [ours for ours in OURS if inspect.isabstract(ours)] == []
    assert {SharedVolumeTier, CpuCopyWorker} <= set(OURS)
