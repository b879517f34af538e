# SPDX-License-Identifier: Apache-2.0
"""Simulates a disk in each node above the shared volume: ``python -m e2e.bench.local_disk TRACE``.

Each replica has 150 GiB of host memory; all share a volume of 4 TiB; a token has 128 KiB of KV, as in an 8B model.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier_cli.trace import MOONCAKE_TOKENS, BlockCache, Trace, read
from kvtier_cli.warm import lines

BLOCK_BYTES: Final = MOONCAKE_TOKENS * 131_072
HOST, VOLUME = 150 << 30, 4 << 40
DISKS: Final = (512 << 30, 1 << 40, 2 << 40)


def serve(trace: Trace, *, size: int, replicas: int, is_sticky: bool, above: Sequence[int]) -> list[int]:
    """Return the blocks of each request that caches of this size have, or what the tiers above have if that is more.

    Args:
        trace: requests.
        size: bytes of each cache.
        replicas: how many caches there are.
        is_sticky: a conversation stays at its replica; else requests go to the replicas in turn.
        above: blocks of each request that other tiers have.
    """
    caches = [BlockCache(size // BLOCK_BYTES) for _ in range(replicas)]
    turns = itertools.cycle(range(replicas))
    found = []
    for request, had in zip(trace.requests, above, strict=True):
        # All prompts share their first block; the second one tells conversations apart.
        own = hash(request.blocks[1]) % replicas if is_sticky and len(request.blocks) > 1 else next(turns)
        found.append(max(had, caches[own].serve(request.blocks)))
    return found


def main() -> None:
    """Print a table."""
    trace = read(file := Path(sys.argv[1]), list(lines(file)), block_tokens=MOONCAKE_TOKENS)

    def share(blocks: Sequence[int]) -> float:
        return sum(blocks) * MOONCAKE_TOKENS / trace.tokens

    print("| replicas, requests | host memory | volume | disk of 0.5 TiB | 1 TiB | 2 TiB | beyond the volume |")
    print(f"|{'---|' * 7}")
    for replicas, is_sticky in itertools.product((1, 2, 4, 8), (False, True)):
        nothing = [0] * len(trace.requests)
        host = serve(trace, size=HOST, replicas=replicas, is_sticky=is_sticky, above=nothing)
        volume = serve(trace, size=VOLUME, replicas=1, is_sticky=False, above=host)
        disks = [serve(trace, size=size, replicas=replicas, is_sticky=is_sticky, above=host) for size in DISKS]
        both = [max(pair) for pair in zip(disks[-1], volume, strict=True)]
        figures = [share(host), share(volume) - share(host), *(share(disk) - share(host) for disk in disks)]
        cells = " | ".join(f"{figure:.1%}" for figure in [*figures, share(both) - share(volume)])
        print(f"| {replicas}, {'sticky' if is_sticky else 'in turn'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
