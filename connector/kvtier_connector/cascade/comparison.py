# SPDX-License-Identifier: Apache-2.0
"""Compares a block that an engine computed with one that another release of vLLM stored: equal, but for rounding.

Pure. Two computations of one prompt differ in the last bits: another batch, or other kernels, add in another order. A
release that computes something else differs by much more, and everywhere in some layer: other angles of the rotary
embedding, another norm, other scales of quantized KV. So a block is compared in parts that are smaller than a layer,
and a part counts as different where a quarter of it is. A few tokens may differ by more: a rounding error
can lead a token to another expert.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

PIECE_ELEMENTS: Final = 1024
"""Numbers whose error is measured together: the vectors of some tokens, with the rotated part of their keys."""
PART_PIECES: Final = 32
"""Pieces of a part."""
_PARTS_AT_ONCE: Final = 8
"""A quarter of a million numbers."""
_FP8: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_TYPES: Final = _FP8 | {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHARE: Final = 0.75
"""The error of a part is the one that this share of its pieces do not exceed."""

LIMITS: Final = {"float32": 0.05, "bfloat16": 0.05, "float16": 0.05, "fp8_e4m3": 0.15, "fp8_e5m2": 0.2}
"""By type of the KV cache, the greatest error of a part, relative to the length of its vectors."""


class Difference(NamedTuple):
    """How two blocks differ."""

    error: float
    """Of the part that differs most, relative to the length of its vectors; 0 for equal bytes."""
    parts: int
    """How many parts exceed the limit."""
    of_parts: int


def compare(computed: memoryview, stored: memoryview, element: str) -> Difference:
    """Compare two blocks of equal length; `element` is one of `LIMITS`, others are equal or differ altogether.

    The numbers of some parts at a time are in memory, however long the blocks are.
    """
    width, limit = _TYPES.get(element, torch.uint8).itemsize, LIMITS.get(element)
    size = _PARTS_AT_ONCE * PART_PIECES * PIECE_ELEMENTS * width
    ours, theirs = np.frombuffer(computed, np.uint8), np.frombuffer(stored, np.uint8)
    errors: list[float] = []
    for first in range(0, len(ours), size):
        mine, found = ours[first : first + size], theirs[first : first + size]
        if np.array_equal(mine, found):
            errors += [0.0] * -(-len(mine) // (PART_PIECES * PIECE_ELEMENTS * width))
        elif limit is None:
            return Difference(1.0, 1, 1)
        else:
            errors += _errors(mine, found, element)
    return Difference(max(errors, default=0.0), sum(each > (limit or 0.0) for each in errors), len(errors))


def _errors(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], element: str) -> list[float]:
    """Return the error of each part."""
    mine, found = (torch.from_numpy(each.copy()).view(_TYPES[element]).float().numpy() for each in (ours, theirs))
    is_equal = (ours == theirs).reshape(len(mine), -1).all(axis=1)
    # Bytes that were never written may be no numbers; equal ones do not matter.
    mine[is_equal & ~np.isfinite(mine)] = 0
    found[is_equal & ~np.isfinite(found)] = 0
    with np.errstate(all="ignore"):
        apart = _sums((mine - found) ** 2)
        scale = np.maximum(_sums(mine**2), _sums(found**2))
        errors = np.sqrt(np.divide(apart, scale, out=np.zeros_like(apart), where=apart != 0))
    errors = np.nan_to_num(errors, nan=np.inf, posinf=np.inf)
    return [
        float(np.quantile(errors[first : first + PART_PIECES], _SHARE, method="lower"))
        for first in range(0, len(errors), PART_PIECES)
    ]


def _sums(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.add.reduceat(values.astype(np.float64), np.arange(0, len(values), PIECE_ELEMENTS))
