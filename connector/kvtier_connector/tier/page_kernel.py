# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel that moves KV pages between the blocks of a KV cache and the slots of a staging buffer."""

from __future__ import annotations

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

WORD_BYTES = 8
TILE_WORDS = 1024
"""What a program moves at once; a power of two."""
_WARPS = 4


def _move_pages(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - compiled by Triton
    table,  # noqa: ANN001 - [tensor, 4], int64, see cells.Group
    moves,  # noqa: ANN001 - int64, see cells.Cells.fill
    first_move,  # noqa: ANN001 - index into moves
    staging,  # noqa: ANN001 - address
    cell_bytes,  # noqa: ANN001 - number
    blocks_per_chunk,  # noqa: ANN001 - number
    TILE: tl.constexpr,  # noqa: N803 - Triton's style of constants
    TO_STAGING: tl.constexpr,  # noqa: N803 - Triton's style of constants
) -> None:
    """Move one page: the program (i, j) that of block i in tensor j."""
    move = tl.load(moves + first_move + tl.program_id(0))
    block = move & 0xFFFFFFFF
    place = move >> 32
    row = table + tl.program_id(1) * 4
    address = tl.load(row)
    stride_bytes = tl.load(row + 1)
    page_bytes = tl.load(row + 2)
    offset = tl.load(row + 3)
    slot = place // blocks_per_chunk
    inner = place % blocks_per_chunk
    # Sixteen bytes at once need the promise that every address is a multiple of them.
    page = tl.multiple_of((address + block * stride_bytes).to(tl.pointer_type(tl.int64)), 16)
    staged = staging + slot * cell_bytes + offset + inner * page_bytes
    staged = tl.multiple_of(staged.to(tl.pointer_type(tl.int64)), 16)
    words = tl.multiple_of(page_bytes // 8, 2)
    for start in range(0, words, TILE):
        index = start + tl.arange(0, TILE)
        is_inside = index < words
        if TO_STAGING:
            tl.store(staged + index, tl.load(page + index, mask=is_inside), mask=is_inside)
        else:
            tl.store(page + index, tl.load(staged + index, mask=is_inside), mask=is_inside)


# One compiled kernel for each direction, whatever the numbers: nothing is compiled while serving.
_kernel = triton.jit(
    do_not_specialize=["first_move", "staging", "cell_bytes", "blocks_per_chunk"],
)(_move_pages)


def move_pages(  # noqa: PLR0913 - what the kernel takes
    table: torch.Tensor,
    moves: torch.Tensor,
    *,
    span: slice,
    staging: torch.Tensor,
    cell_bytes: int,
    blocks_per_chunk: int,
    to_staging: bool,
) -> None:
    """Start moving the pages of `moves[span]` on the current stream."""
    _kernel[(span.stop - span.start, table.shape[0])](
        table,
        moves,
        span.start,
        staging.data_ptr(),
        cell_bytes,
        blocks_per_chunk,
        TILE=TILE_WORDS,
        TO_STAGING=to_staging,
        num_warps=_WARPS,
    )


def try_kernel(device: torch.device) -> str | None:
    """Compile the kernel and move a few pages there and back; say what is wrong with it, if anything is."""
    if not HAS_TRITON:
        return "Triton is not available"
    try:
        is_right = _moves_rightly(device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler, a driver or a missing program of theirs raises
        return f"the kernel does not run: {type(error).__name__}: {error}"
    return None if is_right else "the kernel moves pages wrongly"


def _moves_rightly(device: torch.device) -> bool:
    """Move blocks 2 and 0 of two tensors, with pages of a tile and a half, to places 3 and 0, and back."""
    page_bytes, blocks = TILE_WORDS * WORD_BYTES * 3 // 2, torch.tensor([2, 0], device=device)
    places = [3, 0]
    caches = torch.arange(2 * 3 * page_bytes, device=device).remainder_(251).to(torch.uint8).view(2, 3, page_bytes)
    restored = torch.zeros_like(caches)
    staging = torch.zeros((2, 2, 2, page_bytes), dtype=torch.uint8, device=device)  # [slot, tensor, inner, byte]
    moves = torch.tensor([-1, *(2 * (1 - i) | place << 32 for i, place in enumerate(places))], device=device)
    for cache, to_staging in ((caches, True), (restored, False)):
        rows = [(tensor.data_ptr(), page_bytes, page_bytes, 2 * i * page_bytes) for i, tensor in enumerate(cache)]
        move_pages(
            torch.tensor(rows, device=device),
            moves,
            span=slice(1, 3),
            staging=staging,
            cell_bytes=4 * page_bytes,
            blocks_per_chunk=2,
            to_staging=to_staging,
        )
    staged = staging.permute(1, 0, 2, 3).reshape(2, 4, page_bytes)
    return (
        torch.equal(staged[:, places], caches[:, blocks])
        and torch.equal(restored[:, blocks], caches[:, blocks])
        and not staged[:, [1, 2]].any()
        and not restored[:, 1].any()
    )
