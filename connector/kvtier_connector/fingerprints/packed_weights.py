# SPDX-License-Identifier: Apache-2.0
"""Looks at weights that a kernel has packed: vLLM's CPU build keeps them in a layer's ``cpu_linear``, in no tensor.

Where the packed tensor can be reached, it is looked at itself. Where the library hides it, the layer multiplies the
rows of the identity, one after the other: each product is a column of the weights, and exact in every type. That is as
much work as a prompt as long as the layer is wide, so it is done for small models only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

_ROWS: Final = 512
"""Of the identity that are multiplied at once."""
MOST_OPERATIONS: Final = 1e12
"""For one model: seconds on a few cores."""


class PackedWeights:
    """Those of one model, which are looked at as long as that is little work."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Store the model."""
        self._model = model
        self._left = MOST_OPERATIONS

    def unpack(self, name: str, weight: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """Return what shows every change of a weight that lies elsewhere; None if nothing does.

        Args:
            name: Of the parameter, in the model.
            weight: What is left of it: nothing but its type.
        """
        layer = self._model.get_submodule(name.rpartition(".")[0])
        linear = getattr(layer, "cpu_linear", None)
        held = _held_by(linear)
        tensors = [each for each in held.values() if isinstance(each, torch.Tensor) and each.numel()]
        if tensors:
            return iter(tensors)
        handler = held.get("handler")
        width, height = getattr(handler, "k", None), getattr(handler, "n", None)
        if not callable(linear) or not isinstance(width, int) or not isinstance(height, int):
            return None
        self._left -= 2.0 * width * width * height
        if self._left < 0:
            return None
        return _multiply(linear, weight, width)


def _held_by(function: Any) -> dict[str, Any]:
    """Return what a function that was made within another one keeps of that."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _multiply(linear: Callable[..., torch.Tensor], weight: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    for first in range(0, width, _ROWS):
        rows = torch.zeros(min(_ROWS, width - first), width, dtype=weight.dtype)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        with torch.inference_mode():
            yield linear(rows, weight, None)
