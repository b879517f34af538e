# SPDX-License-Identifier: Apache-2.0
"""An engine that lays KV out in another way than the others is a stranger to their blocks, and serves without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier_connector.vllm_adapter.fingerprint import describe_layout

BLOCKS = 7


def attention(name: str = "CPU_ATTN", isa: str = "vec") -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name), isa=isa)


def cache(blocks: int = BLOCKS) -> torch.Tensor:
    return torch.full((blocks, 2, 16, 16), 9.0)


def describe_one(layer: Any, held: Any = None, blocks: int = BLOCKS) -> tuple[tuple[str, ...], str]:
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer.0": layer}))
    return describe_layout(config, {"layer.0": cache() if held is None else held}, blocks)


def test_the_layout_of_kv_does_not_depend_on_the_number_of_blocks() -> None:
    assert describe_one(attention()) == describe_one(attention(), cache(70), 70)
    assert describe_one(attention())[0] == ("SimpleNamespace/CPU_ATTN/vec",)


@pytest.mark.parametrize(
    "other",
    [
        (attention(isa="amx"), None),
        (attention(name="ZEN_ATTN"), None),
        (attention(), cache().to(torch.bfloat16)),
        (attention(), cache().transpose(1, 2).contiguous().transpose(1, 2)),
        (attention(), [cache(), cache()]),
    ],
)
def test_another_backend_instruction_set_type_or_order_is_another_layout(other: tuple[Any, Any]) -> None:
    assert describe_one(*other)[1] != describe_one(attention())[1]


def test_a_state_that_is_laid_out_the_other_way_is_another_layout() -> None:
    state = [torch.zeros(BLOCKS, 3, 24), torch.zeros(BLOCKS, 4, 4)]
    assert describe_one(None, state)[1] != describe_one(None, [torch.zeros(BLOCKS, 24, 3), state[1]])[1]
