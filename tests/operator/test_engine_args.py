# SPDX-License-Identifier: Apache-2.0
"""No flag of vLLM's engine is unknown to the identity: a release that adds one fails here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import yaml

from kvtier_operator.plan.engine_args import IDENTITY, is_identity

FILE = Path(__file__).with_name("engine_flags.yaml")
SINCE_0_33 = {"monokernel", "sleep-mode-backend", "watchdog-config"}
"""Flags of the release that is supported for trial; ours has not got them."""

NEUTRAL = [flag for each in yaml.safe_load(FILE.read_text()) for flag in each["flags"]]
"""Flags that are not in IDENTITY; the file says why no block depends on them."""


def flags_of_vllm() -> set[str]:
    found = importlib.util.find_spec("vllm")
    tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (each.target for each in arguments.body if isinstance(each, ast.AnnAssign))
    return {each.id.strip("_").replace("_", "-") for each in fields if isinstance(each, ast.Name)}


def test_every_flag_of_the_engine_was_looked_at() -> None:
    assert len(NEUTRAL) == len(set(NEUTRAL))
    assert not IDENTITY & set(NEUTRAL)
    known = IDENTITY | set(NEUTRAL)
    assert flags_of_vllm() - known == set(), f"say in IDENTITY or {FILE.name} whether a block depends on it"
    assert known - flags_of_vllm() <= SINCE_0_33, "vLLM has no such flag"


@pytest.mark.parametrize(
    "flag", ["video-pruning-rate", "video-prun", "no-disable-sliding-window", "mm-hasher-algorithm"]
)
def test_flags_and_what_the_parser_takes_for_them_are_part_of_the_identity(flag: str) -> None:
    assert is_identity(flag)
    assert not is_identity("max-num-seqs")
