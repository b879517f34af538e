# SPDX-License-Identifier: Apache-2.0
"""Writes results/README.md: what was measured of each connector, from the files that runs left behind."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from e2e.backends.__main__ import CASES, HITS, RESULTS

PAGE: Final = RESULTS / "README.md"
HEAD: Final = """# What ran of each connector, and what it measured

<!-- written by `python -m e2e.backends.page --write` -->

Each line was started with exactly the command line, environment and files that the operator renders
([how](../README.md)). A prompt is computed, the engine's own prefix cache is emptied, and the prompt is asked again.
Times are to the first token; the tokens were equal in each. vLLM 0.32.0, a Llama with random weights.

| Connector | ran on | cold, ms | hit, ms | after a restart | another replica | bytes lie in |
|---|---|---|---|---|---|---|
"""
TAIL: Final = """
- *H200*: the shape of Llama 3.2 3B in bf16, a prompt of 16,384 tokens (1.75 GiB of KV), median of three hits, 8 GiB of
  host memory for each engine. LMCache 0.5.3 and the lazy mode of `SimpleCPU` ran on
  [a host with 16 cores](2026-11-23-h200/README.md), the other cases on
  [a host with two GPUs and 32 cores](2026-11-22-h200/README.md).
- Times of second engines are left out of the older run, because other engines started meanwhile. A second engine of
  `Bundled`, `VLLMTiering` and `LMCache` with Redis read all blocks and gave the same tokens.
- *CPU*: vLLM's CPU build, two processors shared with other work, a small Llama, 2,048 tokens, one request each. These
  times show that a connector works, not how fast it is.
- *Not asked*: no second engine of `Mooncake` was tried.
- `make test-backends` gives `LMCache` on a CPU a class that copies, because LMCache 0.5.6 has none for the CPU build.
"""
NEVER: Final = ("FlexKV",)


def measured() -> str:
    """Return the page."""
    rows = []
    for device, name in (("H200", "h200.json"), ("CPU", "cpu.json")):
        found = json.loads((RESULTS / name).read_text())
        cases = sorted(found["cases"], key=lambda each: list(CASES).index(each["title"]))
        rows += [_row(device, result, found["prompt_tokens"]) for result in cases]
    return HEAD + "".join([*rows, *(f"| `{title}` | never in an engine | | | | | |\n" for title in NEVER)]) + TAIL


def _row(device: str, result: Mapping[str, Any], prompt_tokens: int) -> str:
    case = CASES[result["title"]]
    name, _, how = case.title.partition(", ")
    shown = f"`{name}`, {how}" if how else f"`{name}`"
    if "problem" in result:
        return f"| {shown} | {device} | {result['problem']} | | | | |\n"
    if result.get("memcpy"):
        device = f"{device}, copied by a class of the test"
    if "beside" in result:
        device = f"{device}, {result['beside']}"
    if case.decode is not None:
        another = (
            f"handed over in {result['handed_over_ms']:.0f} ms; from the volume, "
            f"{result['replica_hit_tokens'][HITS]:,.0f} tokens in {result['volume_blocks']:.0f} blocks, "
            f"in {result['volume_ms']:.0f} ms"
        )
        cells = (f"{result['computed_ms']:.0f}", f"{result['tier_ms']:.0f}", "as another replica", another, case.lies)
        return f"| {shown} | {device} | {' | '.join(cells)} |\n"
    # Older runs asked for eight tokens more, and counted them as well.
    read = min(prompt_tokens, int(result.get("replica_hit_tokens", {}).get(HITS, 0)))
    took = f" in {result['replica_ms']:.0f} ms" if "replica_ms" in result else ""
    another = "not asked" if case.is_shared else "nothing to read"
    if "replica_ms" in result or read:
        another = f"read {read:,} tokens{took}" if read else f"computed{took}"
    restart = ("as another replica" if read else another) if case.is_shared else "nothing is kept"
    cells = (f"{result['cold_ms']:.0f}", f"{result['hit_ms']:.0f}", restart, another, case.lies)
    return f"| {shown} | {device} | {' | '.join(cells)} |\n"


def main() -> None:
    """Write the page, or tell whether it is what would be written."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends.page", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page is another")
    options = parser.parse_args()
    new = measured()
    if options.write:
        PAGE.write_text(new)
    if options.check and new != PAGE.read_text():
        sys.exit(f"{PAGE} is stale: run `make generate`")


if __name__ == "__main__":
    main()
