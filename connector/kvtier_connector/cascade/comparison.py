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

PIECE_ELEMENTS: Final = 1024
"""Numbers whose error is measured together: the vectors of some tokens, with the rotated part of their keys."""
PART_PIECES: Final = 32
"""Pieces of a part."""
_PARTS_AT_ONCE: Final = 8
"""A quarter of a million numbers."""
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
    word, limit = np.dtype(_WORDS.get(element, np.uint8)), LIMITS.get(element)
    size = _PARTS_AT_ONCE * PART_PIECES * PIECE_ELEMENTS * word.itemsize
    ours, theirs = np.frombuffer(computed, np.uint8), np.frombuffer(stored, np.uint8)
    errors: list[float] = []
    for first in range(0, len(ours), size):
        mine, found = ours[first : first + size], theirs[first : first + size]
        if np.array_equal(mine, found):
            errors += [0.0] * -(-len(mine) // (PART_PIECES * PIECE_ELEMENTS * word.itemsize))
        elif limit is None:
            return Difference(1.0, 1, 1)
        else:
            errors += _errors(mine, found, element)
    return Difference(max(errors, default=0.0), sum(each > (limit or 0.0) for each in errors), len(errors))


def _errors(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], element: str) -> list[float]:
    """Return the error of each part."""
    is_equal = ours.view(_WORDS[element]) == theirs.view(_WORDS[element])
    mine, found = _numbers(ours, element), _numbers(theirs, element)
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


_WORDS: Final = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16} | dict.fromkeys(
    ("fp8_e4m3", "fp8_e5m2"), np.uint8
)


def _numbers(data: npt.NDArray[np.uint8], element: str) -> npt.NDArray[np.float32]:
    if element == "float32":
        return data.view(np.float32).copy()
    if element == "float16":
        return data.view(np.float16).astype(np.float32)
    if element == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _FP8[element][data]


def _sums(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    starts = np.arange(0, len(values), PIECE_ELEMENTS)
    return np.add.reduceat(values.astype(np.float64), starts)


def _fp8_numbers(exponent_bits: int) -> npt.NDArray[np.float32]:
    """Return the number of each byte of an 8-bit float with so many bits of exponent."""
    fraction_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    code = np.arange(256)
    exponent = (code >> fraction_bits) & (2**exponent_bits - 1)
    fraction = (code & (2**fraction_bits - 1)) / 2**fraction_bits
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.asarray(np.where(code >> 7, -1, 1) * size, np.float32)


_FP8: Final = {"fp8_e4m3": _fp8_numbers(4), "fp8_e5m2": _fp8_numbers(5)}
