# SPDX-License-Identifier: Apache-2.0
"""No flag of vLLM's engine is unknown to the identity: a release that adds one fails here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from kvtier_operator.plan.engine_flags import IDENTITY, NEUTRAL, is_identity

SINCE_0_33 = {"monokernel", "sleep-mode-backend", "watchdog-config"}
"""Flags of the release that is supported for trial; ours has not got them."""


def flags_of_vllm() -> set[str]:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (each.target for each in arguments.body if isinstance(each, ast.AnnAssign))
    return {each.id.strip("_").replace("_", "-") for each in fields if isinstance(each, ast.Name)}


def test_every_flag_of_the_engine_was_looked_at() -> None:
    neutral = [flag for flags in NEUTRAL.values() for flag in flags]
    assert len(neutral) == len(set(neutral))
    assert not IDENTITY & set(neutral)
    known = IDENTITY | set(neutral)
    assert flags_of_vllm() - known == set(), "say in engine_flags.py whether a block depends on it"
    assert known - flags_of_vllm() <= SINCE_0_33, "vLLM has no such flag"


@pytest.mark.parametrize(
    "flag", ["video-pruning-rate", "video-prun", "no-disable-sliding-window", "mm-hasher-algorithm"]
)
def test_flags_and_what_the_parser_takes_for_them_are_part_of_the_identity(flag: str) -> None:
    assert is_identity(flag)


def test_a_flag_that_changes_no_block_is_not() -> None:
    assert not is_identity("max-num-seqs")
