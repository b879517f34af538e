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
from e2e.backends.render import engine_of

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.parts import render
from kvtier_operator.plan import make_unchecked_plan

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "connectors.md"
ON_GPU: Final = tuple(ROOT / f"e2e/backends/results/{day}-h200/backends.json" for day in ("2026-11-22", "2026-11-23"))
"""Later ones count before earlier ones. In the first, engines started while another replica was measured, and LMCache
was loaded with a shim, for it was built for another PyTorch."""
ON_CPU: Final = Path(__file__).with_name("results") / "cpu.json"

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
LIES: Final = {
    "Bundled": "host memory, volume",
    "VLLMTiering": "host memory, volume",
    "VLLMOffloading, storeThreshold 2": "host memory",
    "SimpleCPU": "host memory",
    "SimpleCPU, Disk": "file on the node's disk",
    "SimpleCPU, Lazy": "host memory",
    "LMCache, memory": "host memory",
    "LMCache, Redis": "host memory, Redis",
    "LMCache, Redis with a password": "host memory, Redis",
    "LMCache, Redis that is not there": "host memory",
    "LMCache, node's disk": "host memory, node's disk",
    "LMCache, MultiProcess": "host memory",
    "LMCache, MultiProcess with Redis": "host memory, Redis",
    "LMCache, MultiProcess, Redis that is not there": "host memory",
    "Hybrid, LMCache with Redis": "host memory, Redis",
    "Hybrid, NIXL": "as `Bundled`",
    "Mooncake": "memory of the engines, as one pool",
}
"""By the titles of `cases`."""
SHARED: Final = ("volume", "Redis", "pool")
NEVER: Final = ("FlexKV",)
HITS: Final = "external_prefix_cache_hits_total"


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
    plan = make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:docs")
    container = engine_of(list(render(plan)))
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
    for device, found in (("H200", on_gpu()), ("CPU", json.loads(ON_CPU.read_text()))):
        rows += [
            _row(device, result, found["prompt_tokens"])
            for result in sorted(found["cases"], key=lambda each: list(LIES).index(each["title"]))
        ]
        if "pair" in found:
            rows.append(_pair(device, found["pair"]))
    rows += [f"| `{title}` | never in an engine | | | | | |\n" for title in NEVER]
    return HEAD + "".join(rows) + "\n"


def on_gpu() -> dict[str, Any]:
    """Return what runs on a GPU have measured, each case in its newest run."""
    first, *later = [json.loads(path.read_text()) for path in ON_GPU]
    cases = {result["title"]: result for result in first["cases"] if "LMCache" not in result["title"]}
    for result in cases.values():
        result.pop("replica_ms", None)
    for found in later:
        assert found["prompt_tokens"] == first["prompt_tokens"]
        cases |= {result["title"]: result for result in found["cases"]}
    return {**first, "cases": list(cases.values())}


def _row(device: str, result: Mapping[str, Any], prompt_tokens: int) -> str:
    title, lies = result["title"], LIES[result["title"]]
    name, _, how = title.partition(", ")
    shown = f"`{name}`, {how}" if how else f"`{name}`"
    if "hit_ms" not in result:
        told = "still starting when the time was over"
        if "exited before becoming healthy" in result["problem"]:
            told = "its cache server ended"
        if "Cannot reach the LMCache MP server" in result["problem"]:
            told = "LMCache 0.5.3 has no way to start its cache server by itself"
        if result.get("start_seconds"):
            told = "served, and did not answer"
        return f"| {shown} | {device} | {told} | | | | |\n"
    if result.get("memcpy"):
        device = f"{device}, copied by a class of the test"
    if "beside" in result:
        device = f"{device}, {result['beside']}"
    is_shared = any(word in lies for word in SHARED)
    # The second request, for eight tokens more, counts as well.
    read = min(prompt_tokens, int(result.get("replica_hit_tokens", {}).get(HITS, 0)))
    took = f" in {result['replica_ms']:.0f} ms" if "replica_ms" in result else ""
    if read:
        another = f"read {read:,} tokens{took}"
    elif "replica_ms" in result:
        another = f"computed{took}"
    else:
        another = "not asked" if is_shared else "nothing to read"
    restart = ("as another replica" if read else another) if is_shared else "nothing is kept"
    return (
        f"| {shown} | {device} | {result['cold_ms']:.0f} | {result['hit_ms']:.0f} | {restart} | {another} | {lies} |\n"
    )


def _pair(device: str, found: Mapping[str, Any]) -> str:
    blocks = int(found["volume_counts"]["vllm:kvtier_disk_read_blocks_total"])
    tokens = int(found["volume_counts"][f"vllm:{HITS}"])
    another = (
        f"handed over in {found['handed_over_ms']:.0f} ms; from the volume, {tokens:,} tokens in {blocks} blocks, "
        f"in {found['volume_ms']:.0f} ms"
    )
    return (
        f"| `Hybrid`, NIXL | {device} | {found['computed_ms']:.0f} | {found['tier_ms']:.0f} | as another replica "
        f"| {another} | {LIES['Hybrid, NIXL']} |\n"
    )


def take(paths: list[Path]) -> None:
    """Keep what runs on the CPU build have measured; a case that ran again replaces what was known of it."""
    empty: dict[str, Any] = {"device": "cpu", "cases": []}
    kept: dict[str, Any] = json.loads(ON_CPU.read_text()) if ON_CPU.exists() else empty
    cases: dict[str, dict[str, Any]] = {result["title"]: result for result in kept["cases"]}
    for path in paths:
        found = json.loads(path.read_text())
        if "cases" not in found:
            kept["pair"] = {name: value for name, value in found.items() if name != "args"}
            continue
        kept |= {"prompt_tokens": found["prompt_tokens"], "rounds": found["rounds"]}
        for result in found["cases"]:
            cases[result["title"]] = {key: value for key, value in result.items() if key not in {"args", "tokens"}}
    ON_CPU.parent.mkdir(exist_ok=True)
    ON_CPU.write_text(json.dumps({**kept, "cases": list(cases.values())}, indent=1) + "\n")


def main() -> None:
    """Write the page, or tell whether it is what would be written."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends.page", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page is another")
    parser.add_argument("--take", nargs="+", type=Path, default=[], help="what runs on the CPU build wrote")
    options = parser.parse_args()
    if options.take:
        take(options.take)
    text = PAGE.read_text()
    new = written(text)
    if options.write:
        PAGE.write_text(new)
    if options.check and new != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is stale: run `make generate`")


if __name__ == "__main__":
    main()
