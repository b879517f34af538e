# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM's CPU build has packed are told from others by every one of their elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_weights import Holder
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from kvtier_connector.fingerprints import weights


class Layer(torch.nn.Module):
    """One as vLLM has them on CPUs."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)


def packed(weight: torch.Tensor) -> torch.nn.Module:
    """Return a model whose weights vLLM has packed, as it does while it loads.

    A processor that does not compute with 16 bits may leave those as they are; they show as any others do.
    """
    is_always = weight.dtype is torch.float32 or "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = torch.nn.ModuleDict({"one": Layer(weight), "two": Layer(weight * 2)})
    for layer in model.values():
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        assert not (is_always and layer.weight.numel())
    return model


def digest(weight: torch.Tensor) -> str | None:
    return Holder(packed(weight)).look.digest()


@pytest.mark.parametrize("shape", [(1024, 640), (64, 64)], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_any_element_shows_and_the_same_weights_are_the_same(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = digest(weight)
    assert before is not None
    assert digest(weight) == before
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 5), (7, shape[1] // 2)):
        changed = weight.clone()
        # The least change that there is.
        changed[row, column] = torch.nextafter(changed[row, column].float(), torch.tensor(9.0)).to(dtype)
        if changed[row, column] == weight[row, column]:
            changed[row, column] = weight[row, column] * (1 + torch.finfo(dtype).eps)
        assert changed[row, column] != weight[row, column]
        assert digest(changed) != before
    swapped = weight.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    assert digest(swapped) != before


def test_a_model_that_it_would_take_long_to_look_at_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(1024, 640)
    monkeypatch.setattr(weights, "MOST_OPERATIONS", 2.0 * 640 * 640 * 1024)
    assert digest(weight) is None
