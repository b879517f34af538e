# SPDX-License-Identifier: Apache-2.0
"""Quantities mean what they mean to the API server, and vLLM's flags what they mean to vLLM; owned ones are refused."""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiers import engine_pod, plan_of, tier

from kvtier_operator import quantity
from kvtier_operator.api import engine_spec, parse
from kvtier_operator.api.parse import problems
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts import engine
from kvtier_operator.parts.crash_causes import explain
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.engine_args import IDENTITY, is_identity

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@pytest.mark.parametrize(("text", "value"), TABLES["quantities"])
def test_a_quantity_has_the_value_that_the_api_server_gives_it(text: str, value: str | int) -> None:
    assert quantity.is_quantity(text)
    assert quantity.parse_quantity(text) == Fraction(value)


@pytest.mark.parametrize("text", TABLES["no_quantities"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    assert not quantity.is_quantity(text)
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse_quantity(text)


PARSERS = {"bytes": quantity.parse_bytes, "thousandths": quantity.parse_millis, "seconds": quantity.parse_seconds}


@pytest.mark.parametrize(("unit", "text", "count"), TABLES["counted"])
def test_bytes_processors_and_durations_are_counted_in_whole_units(unit: str, text: str, count: int) -> None:
    assert PARSERS[unit](text) == count


@pytest.mark.parametrize(("count", "text"), TABLES["written"])
def test_bytes_are_written_in_the_largest_exact_unit(count: int, text: str) -> None:
    assert quantity.format_bytes(count) == text


@pytest.mark.parametrize("text", ["", "7d12h", "1.5h", "30m1h", "h", "-1h", "1 h", "60"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        quantity.parse_seconds(text)


@given(st.integers(min_value=0, max_value=quantity.LARGEST))
def test_bytes_survive_a_round_trip(count: int) -> None:
    assert quantity.parse_bytes(quantity.format_bytes(count)) == count


@given(st.text(alphabet="0123456789.+-eEinumkKMGTP", max_size=12))
def test_every_text_is_a_quantity_or_refused(text: str) -> None:
    if quantity.is_quantity(text):
        assert abs(quantity.parse_quantity(text)) <= quantity.LARGEST
    else:
        with pytest.raises(ValueError, match="is not a quantity"):
            quantity.parse_quantity(text)


with warnings.catch_warnings():
    # Importing torch and vLLM warns of their own deprecations.
    warnings.simplefilter("ignore")
    from vllm.config.lora import LoRAConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.exceptions import LoRAAdapterNotFoundError
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.utils.argparse_utils import FlexibleArgumentParser

FULL = yaml.safe_load((Path(__file__).parents[2] / "crds" / "samples" / "full.yaml").read_text())
# The flags of adapters are refused only where the tier has some; the tests of those ask that.
for field in ("loras", "maxLoraRank", "maxLorasAtOnce"):
    del FULL["spec"]["model"][field]
OWNED = {*engine_spec.FLAGS, "--scheduler-cls"}
"""Flags that are refused for this tier, which splits hits."""


@pytest.fixture(scope="module")
def vllm_flags() -> list[str]:
    return sorted(make_arg_parser(FlexibleArgumentParser())._option_string_actions)


@pytest.fixture
def template() -> dict[str, Any]:
    """Return the pods that the operator renders for a tier without additions of its user."""
    return dict(engine.deployment(plan_of({**FULL, "spec": {**FULL["spec"], "engine": {}}}))["spec"]["template"])


def is_accepted(word: str) -> bool:
    return not problems({"spec": {**FULL["spec"], "engine": {"args": [word]}}})


def is_refused(template: dict[str, Any]) -> bool:
    return bool(problems({"spec": {**FULL["spec"], "engine": {"podTemplate": template}}}))


def test_the_owned_flags_of_vllm_and_all_their_abbreviations_are_refused(vllm_flags: list[str]) -> None:
    assert {flag for flag in vllm_flags if not is_accepted(flag)} == OWNED
    for flag in OWNED:
        for length in range(3 if flag.startswith("--") else 2, len(flag)):
            if [known for known in vllm_flags if known.startswith(flag[:length])] == [flag]:
                assert not is_accepted(flag[:length]), flag[:length]
                assert not is_accepted(f"{flag[:length].replace('-', '_').replace('__', '--', 1)}=x"), flag[:length]


def test_users_cannot_take_flags_mounts_and_labels_and_read_where_downloads_go(template: dict[str, Any]) -> None:
    rendered = {word.partition("=")[0] for word in template["spec"]["containers"][0]["args"]}
    # The name that clients ask for is the user's business: the last one given wins.
    assert rendered - {"--served-model-name", *engine_spec.HARMLESS} <= OWNED
    for volume in template["spec"]["volumes"]:
        assert is_refused({"volumes": [{"name": volume["name"], "emptyDir": {}}]}), volume
    for mount in template["spec"]["containers"][0]["volumeMounts"]:
        assert is_refused({"volumeMounts": [{"name": "mine", "mountPath": mount["mountPath"]}]}), mount
    for key, value in template["metadata"]["labels"].items():
        assert is_refused({"labels": {key: value}}), key
    variables = {entry["name"]: entry.get("value") for entry in template["spec"]["containers"][0]["env"]}
    assert re.search(r"points it at (\S+);", engine_spec.ENV["HF_HOME"])[1] == variables["HF_HOME"]
    assert set(engine_spec.ENV) - {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} <= set(variables)


def test_all_that_is_wrong_is_told_at_once_and_every_flag_was_looked_at() -> None:
    body = tier(modelName="x", cpu={"size": "64GB"}, engine={"nodeSelector": {}})
    found = {each.field: each.message for each in problems(body)}
    assert set(found) == {"spec.modelName", "spec.cpu.size", "spec.engine.nodeSelector"}
    assert 'or "64G" for what is sold as 64GB' in found["spec.cpu.size"]
    assert len(NEUTRAL) == len(set(NEUTRAL))
    assert not IDENTITY & set(NEUTRAL)
    known = IDENTITY | set(NEUTRAL)
    assert flags_of_vllm() - known == set(), f"say in IDENTITY or {FILE.name} whether a block depends on it"
    assert known - flags_of_vllm() <= SINCE_0_33, "vLLM has no such flag"


@pytest.mark.parametrize(("settings", "devices"), TABLES["devices"])
def test_a_pod_has_as_many_devices_as_the_model_is_split_over(settings: dict[str, object], devices: int) -> None:
    assert parse(tier(engine=settings)).engine.accelerator.per_pod == devices


SAME = ["--enable-prefix-caching", "--port=8000", "--host=0.0.0.0"]


@pytest.mark.parametrize("args", [[each] for each in SAME] + [[*SAME, "--max-model-len=4096"]])
def test_a_flag_that_the_operator_sets_to_the_same_is_taken_and_changes_nothing(args: list[str]) -> None:
    def rendered(*given: str) -> dict[str, Any]:
        plan = plan_of(tier(engine={"args": list(given)}))
        return {"pods": engine.deployment(plan)["spec"]["template"], "generation": plan.generation.digest}

    assert list(parse(tier(engine={"args": args})).engine.args) == args
    assert rendered(*args) == rendered(*(each for each in args if each not in SAME))


@pytest.mark.parametrize("args", TABLES["refused_args"])
def test_any_other_value_of_it_is_refused(args: list[str]) -> None:
    with pytest.raises(SpecInvalid, match="is not yours to set here"):
        parse(tier(engine={"args": args}))


FILE = Path(__file__).with_name("engine_flags.yaml")
SINCE_0_33 = {"monokernel", "sleep-mode-backend", "watchdog-config"}
"""Flags of the release that is supported for trial; ours has not got them."""

NEUTRAL = [flag for each in yaml.safe_load(FILE.read_text()) for flag in each["flags"]]
"""Flags that are not in IDENTITY; the file says why no block depends on them."""


def flags_of_vllm() -> set[str]:
    tree = ast.parse((Path(importlib.util.find_spec("vllm").origin).parent / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (each.target for each in arguments.body if isinstance(each, ast.AnnAssign))
    return {each.id.strip("_").replace("_", "-") for each in fields if isinstance(each, ast.Name)}


@pytest.mark.parametrize("flag", TABLES["identity"])
def test_flags_and_what_the_parser_takes_for_them_are_part_of_the_identity(flag: str) -> None:
    assert is_identity(flag)
    assert not is_identity("max-num-seqs")


SQL = {"name": "sql", "source": {"claim": "adapters", "path": "team/sql"}}
CHAT = {"name": "org/chat.v2", "source": {"hub": "org/chat-lora"}}
ROOT = {"name": "root", "source": {"claim": "another.claim"}}


def planned(*loras: Any, args: tuple[str, ...] = (), **model: Any) -> TierPlan:
    found = {"name": "meta-llama/Llama-3.1-8B-Instruct", "loras": list(loras), **model}
    return plan_of(tier(model=found, engine={"args": list(args)}))


def args_of(plan: TierPlan) -> list[str]:
    return list(engine_pod(plan)["containers"][0]["args"])


def test_vllm_reads_the_adapters_that_were_declared_and_one_it_refuses_is_told_with_the_remedy() -> None:
    args = args_of(planned(SQL, CHAT, ROOT, args=("--max-model-len", "8192"), maxLoraRank=64))
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(args)

    assert [(module.name, module.path) for module in read.lora_modules] == [
        ("sql", "/opt/kvtier-loras/adapters/team/sql"),
        ("org/chat.v2", "org/chat-lora"),
        ("root", "/opt/kvtier-loras/another.claim"),
    ]
    assert {module.base_model_name for module in read.lora_modules} == {"meta-llama/Llama-3.1-8B-Instruct"}
    assert read.max_model_len == 8192
    made = EngineArgs.from_cli_args(read)
    assert (made.enable_lora, made.max_lora_rank, made.max_loras) == (True, 64, 3)
    helper = PEFTHelper.from_dict({"r": 64, "lora_alpha": 16, "target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match="rank") as refused:
        helper.validate_legal(LoRAConfig(max_lora_rank=16))
    missing = LoRAAdapterNotFoundError("sql", "/opt/kvtier-loras/a/sql")
    for error, field in ((refused.value, "spec.model.maxLoraRank"), (missing, "spec.model.loras")):
        found = explain(f"Traceback\nValueError: {error}", 1)
        assert found.reason is Reason.ADAPTER_REFUSED
        assert field in found.remedy


def test_adapters_start_no_generation_two_of_one_name_are_refused_and_eight_are_computed_together() -> None:
    assert planned(SQL).generation.digest == planned().generation.digest
    many = [{**SQL, "name": f"a{number}"} for number in range(20)]
    assert "--max-loras=8" in args_of(planned(*many))
    assert "--max-loras=20" in args_of(planned(*many, maxLorasAtOnce=20))
    with pytest.raises(SpecInvalid, match="given twice"):
        parse(tier(model={"name": "m", "loras": [SQL, SQL]}))
