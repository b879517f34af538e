# SPDX-License-Identifier: Apache-2.0
"""Writes what docs/connectors.md shows of each connector: what is rendered for its YAML, and what was measured.

The command lines come from the operator's own planner, the figures from the files that runs left behind; nothing of
both is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from e2e.backends.__main__ import CASES, HITS, RESULTS
from e2e.matrix.rendering import engine_of

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "connectors.md"
TRANSFER: Final = "--kv-transfer-config="
SHOWN_FLAGS: Final = (TRANSFER, "--no-disable-hybrid-kv-cache-manager")
SHOWN_ENV: Final = ("LMCACHE_", "FLEXKV_", "MOONCAKE_", "VLLM_NIXL_")
WIDTH: Final = 124
INDENT: Final = "    "
BEGIN: Final = "<!-- measured: written by `python -m e2e.backends.page --write` from what runs left behind -->\n"
END: Final = "<!-- end of what is written -->\n"
FENCE: Final = re.compile(r"(```yaml\n((?:[^`]*\n)*?)```\n)((?:\n? {4}\S[^\n]*\n)*)")

HEAD: Final = """
| Connector | ran on | cold, ms | hit, ms | after a restart | another replica | bytes lie in |
|---|---|---|---|---|---|---|
"""
NEVER: Final = ("FlexKV",)


def written(text: str) -> str:
    """Return the page with what is written anew."""
    text = FENCE.sub(lambda found: found[1] + _rendered(found[2]), text)
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + measured() + END + after


def _rendered(manifests: str) -> str:
    """Return the blocks that follow a block of YAML: what its tiers' engines are started with."""
    return "".join(f"\n{command_line(each)}" for each in yaml.safe_load_all(manifests))


def command_line(body: Mapping[str, Any]) -> str:
    """Return what the engines of a tier get for their connector, as an indented block."""
    container, _ = engine_of(body)
    words = [word for word in container["args"] if word.startswith(SHOWN_FLAGS)]
    words.sort(key=lambda word: not word.startswith(TRANSFER))
    seed = [f"{each['name']}={each['value']}" for each in container["env"] if each["name"] == "PYTHONHASHSEED"]
    more = [_variable(each) for each in container["env"] if each["name"].startswith(SHOWN_ENV)]
    return _wrapped(words) + _wrapped([*more, *seed] if more else [])


def _variable(each: Mapping[str, Any]) -> str:
    if "value" in each:
        return f"{each['name']}={each['value']}"
    return f"{each['name']} from the {'Secret' if 'secretKeyRef' in each['valueFrom'] else 'pod'}"


def _wrapped(words: list[str]) -> str:
    """Break at spaces and, within JSON, behind commas."""
    lines: list[str] = []
    for word in words:
        for at, piece in enumerate(re.findall(r"[^,]+,?", word) if '{"' in word else [word]):
            gap = " " if at == 0 else ""
            if lines and len(lines[-1]) + len(gap) + len(piece) <= WIDTH - len(INDENT):
                lines[-1] += gap + piece
            else:
                lines.append(piece)
    return "".join(f"{INDENT}{line}\n" for line in lines)


def measured() -> str:
    """Return the table of what ran."""
    rows = []
    for device, name in (("H200", "h200.json"), ("CPU", "cpu.json")):
        found = json.loads((RESULTS / name).read_text())
        cases = sorted(found["cases"], key=lambda each: list(CASES).index(each["title"]))
        rows += [_row(device, result, found["prompt_tokens"]) for result in cases]
    return HEAD + "".join([*rows, *(f"| `{title}` | never in an engine | | | | | |\n" for title in NEVER)]) + "\n"


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
    text = PAGE.read_text()
    new = written(text)
    if options.write:
        PAGE.write_text(new)
    if options.check and new != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is stale: run `make generate`")


if __name__ == "__main__":
    main()
