# SPDX-License-Identifier: Apache-2.0
"""Runs the page kernel without a GPU: interpreted on ordinary memory, or compiled for one that is not there.

A process of its own, because Triton decides on import which of them it is. vLLM's CPU build hides Triton, so that a
module of this name takes its place.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

triton_utils = ModuleType("vllm.triton_utils")
triton_utils.__dict__.update(HAS_TRITON=True, triton=triton, tl=tl)
sys.modules["vllm.triton_utils"] = triton_utils
sys.modules["vllm"] = ModuleType("vllm")

from kvtier_connector.tier import page_kernel  # noqa: E402 - needs the module above

HOPPER = GPUTarget("cuda", 90, 32)


def compile_kernel(*, to_staging: bool) -> str:
    """Return the kernel in the GPU's assembly language, compiled as `move_pages` has it compiled."""
    source = ASTSource(
        page_kernel._kernel,
        {
            "table": "*i64",
            "moves": "*i64",
            "first_move": "i32",
            "staging": "i64",
            "cell_bytes": "i32",
            "blocks_per_chunk": "i32",
            "TILE": "constexpr",
            "TO_STAGING": "constexpr",
        },
        constexprs={"TILE": page_kernel.TILE_WORDS, "TO_STAGING": to_staging},
    )
    return str(triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["ptx"])


def main() -> None:
    if sys.argv[1] == "interpret":
        answer = str(page_kernel.try_kernel(torch.device("cpu")))
    else:
        answer = "\n".join(compile_kernel(to_staging=to_staging) for to_staging in (True, False))
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
