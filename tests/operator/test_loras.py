# SPDX-License-Identifier: Apache-2.0
"""Adapters: what a user may write, what engines are told, and what is said of one that vLLM cannot use."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from tiers import engine_pod, plan_of, tier

from kvtier_operator.api.parse import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts.crash_causes import explain
from kvtier_operator.plan import TierPlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config.lora import LoRAConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.exceptions import LoRAAdapterNotFoundError
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.utils.argparse_utils import FlexibleArgumentParser

SQL = {"name": "sql", "source": {"claim": "adapters", "path": "team/sql"}}
CHAT = {"name": "org/chat.v2", "source": {"hub": "org/chat-lora"}}
ROOT = {"name": "root", "source": {"claim": "another.claim"}}


def planned(*loras: Any, args: tuple[str, ...] = (), **model: Any) -> TierPlan:
    found = {"name": "meta-llama/Llama-3.1-8B-Instruct", "loras": list(loras), **model}
    return plan_of(tier(model=found, engine={"args": list(args)}))


def args_of(plan: TierPlan) -> list[str]:
    return list(engine_pod(plan)["containers"][0]["args"])


def test_vllm_reads_the_adapters_that_were_declared() -> None:
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


def test_adapters_change_no_block_of_the_model_and_so_no_generation() -> None:
    assert planned(SQL).generation.digest == planned().generation.digest


def test_at_most_eight_adapters_are_computed_together_unless_more_are_asked_for() -> None:
    many = [{**SQL, "name": f"a{number}"} for number in range(20)]
    assert "--max-loras=8" in args_of(planned(*many))
    assert "--max-loras=20" in args_of(planned(*many, maxLorasAtOnce=20))


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(SpecInvalid, match="given twice"):
        parse(tier(model={"name": "m", "loras": [SQL, SQL]}))


def test_an_adapter_that_vllm_refuses_is_told_with_the_remedy() -> None:
    helper = PEFTHelper.from_dict({"r": 64, "lora_alpha": 16, "target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match="rank") as refused:
        helper.validate_legal(LoRAConfig(max_lora_rank=16))
    missing = LoRAAdapterNotFoundError("sql", "/opt/kvtier-loras/a/sql")
    for error, field in ((refused.value, "spec.model.maxLoraRank"), (missing, "spec.model.loras")):
        found = explain(f"Traceback\nValueError: {error}", 1)
        assert found.reason is Reason.ADAPTER_REFUSED
        assert field in found.remedy
