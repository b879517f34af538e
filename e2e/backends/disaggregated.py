# SPDX-License-Identifier: Apache-2.0
"""Two engines, rendered for prefill and for decode: NIXL hands the blocks over, and the volume keeps them for both."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from e2e.backends import __main__ as alone
from e2e.backends.pod import Pod

HANDED_OVER: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Request of a proxy to the engine that prefills; the answer says where the blocks are."""
HITS: Final = "vllm:external_prefix_cache_hits_total"
BYTES: Final = "vllm:nixl_bytes_transferred_sum"
READ: Final = "vllm:kvtier_disk_read_blocks_total"
COUNTED: Final = frozenset({HITS, BYTES, READ})
SETTLED_SECONDS: Final = 3.0
"""After which no block has come to the volume, so that all have."""


def complete(pod: Pod, ids: list[int], *, count: int, transfer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send one prompt and return the answer."""
    asked: dict[str, Any] = {"model": alone.pod_model(pod), "prompt": ids, "max_tokens": count, "temperature": 0}
    asked["return_token_ids"] = True
    if transfer is not None:
        asked["kv_transfer_params"] = dict(transfer)
    return dict(json.loads(pod.ask("POST", "/v1/completions", asked)))


def tokens(answer: Mapping[str, Any]) -> list[int]:
    """Return the tokens of an answer."""
    return list(answer["choices"][0]["token_ids"])


def proxied(prefill: Pod, decode: Pod, ids: list[int], *, count: int) -> dict[str, Any]:
    """Do what a proxy does: prefill for one token, and decode with the blocks that the first engine holds."""
    first = complete(prefill, ids, count=1, transfer=HANDED_OVER)
    given = first.get("kv_transfer_params")
    if not given:
        raise RuntimeError(f"the engine that prefills names no blocks: {first}")
    return complete(decode, ids, count=count, transfer=given)


def by_source(pod: Pod) -> dict[str, float]:
    """Return what vLLM counts of prompt tokens by where they came from, and of NIXL's transfers."""
    found: dict[str, float] = {}
    for line in pod.ask("GET", "/metrics", None).decode().splitlines():
        name, _, value = line.rpartition(" ")
        family = name.split("{")[0]
        if family in COUNTED:
            found[family] = found.get(family, 0.0) + float(value)
        if family.startswith("vllm:nixl_num_failed") and family.endswith("_total"):
            found[family] = found.get(family, 0.0) + float(value)
    return found


def start(document: Mapping[str, Any], work: Path, port: int, run: alone.BackendRun) -> dict[str, Pod]:
    """Start both engines at the same time and return those that serve, by the title of their case."""
    pods = {}
    for at, case in enumerate(document["cases"]):
        more = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 10 * at)}  # one address for all pods of this machine
        pods[case["title"]] = Pod(case, work, port=port + at, name=f"{case['title']}-{port}", more_env=more)
    for pod in pods.values():
        pod.start()
    results: dict[str, dict[str, Any]] = {title: {} for title in pods}
    serving = alone.wait_ready(run, list(pods.values()), results, run.options.start_seconds)
    if len(serving) < len(pods):
        for pod in pods.values():
            pod.stop()
        raise SystemExit(json.dumps(results, indent=1))
    return pods


def measure(run: alone.BackendRun, pods: Mapping[str, Pod], found: dict[str, Any]) -> None:
    """Hand one prompt over, and compare with what is computed or read from the tier."""
    prefill, decode = pods["prefill"], pods["decode"]
    warm = alone.prompt(97, run.tokens)
    proxied(prefill, decode, warm, count=1)
    before = by_source(decode)
    ids = alone.prompt(1, run.tokens)
    began = time.perf_counter()
    handed = tokens(proxied(prefill, decode, ids, count=1))
    found["handed_over_ms"] = 1000 * (time.perf_counter() - began)
    after = by_source(decode)
    found["decode_counts"] = {name: value - before.get(name, 0.0) for name, value in after.items()}
    eight = tokens(proxied(prefill, decode, alone.prompt(2, run.tokens), count=8))
    alone.forget(prefill)
    alone.forget(decode)
    # Without a proxy: the tier has the blocks, from the engine that computed them.
    before = by_source(decode)
    began = time.perf_counter()
    again = complete(decode, ids, count=1)
    found["tier_ms"] = 1000 * (time.perf_counter() - began)
    after = by_source(decode)
    found["tier_counts"] = {name: value - before.get(name, 0.0) for name, value in after.items()}
    began = time.perf_counter()
    complete(decode, alone.prompt(3, run.tokens), count=1)
    found["computed_ms"] = 1000 * (time.perf_counter() - began)
    computed = tokens(complete(prefill, alone.prompt(2, run.tokens), count=8))
    found["same_tokens"] = tokens(again) == handed and eight == computed


def from_volume(run: alone.BackendRun, pods: Mapping[str, Pod], volume: Path, found: dict[str, Any]) -> None:
    """Have one engine compute a prompt and hand nothing over: the other one has it from the volume alone."""
    prefill, decode = pods["prefill"], pods["decode"]
    ids = alone.prompt(5, run.tokens)
    computed = tokens(complete(prefill, ids, count=8))
    settle(volume)
    before = by_source(decode)
    began = time.perf_counter()
    first = tokens(complete(decode, ids, count=1))
    found["volume_ms"] = 1000 * (time.perf_counter() - began)
    after = by_source(decode)
    found["volume_counts"] = {name: value - before.get(name, 0.0) for name, value in after.items()}
    alone.forget(decode)
    found["volume_same_tokens"] = first == computed[:1] and computed == tokens(complete(decode, ids, count=8))


def settle(volume: Path) -> None:
    """Wait until no more blocks come to the volume."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        blocks = sum(path.is_file() and path.suffix != ".partial" for path in volume.rglob("*"))
        if blocks != count:
            count, since = blocks, time.monotonic()
        time.sleep(0.2)


def problems(found: Mapping[str, Any]) -> list[str]:
    """Return what is not as promised."""
    told = {
        "tokens differ": found["same_tokens"] and found["volume_same_tokens"] and found["prefill_gone_same_tokens"],
        "nothing was handed over": found["decode_counts"].get(BYTES),
        "nothing came from the tier": found["tier_counts"].get(HITS),
        "nothing came from the volume": found["volume_counts"].get(READ) and found["volume_counts"].get(HITS),
        "what came from the volume was handed over": not found["volume_counts"].get(BYTES),
    }
    return [problem for problem, is_well in told.items() if not is_well]


def without_prefill(run: alone.BackendRun, pods: Mapping[str, Pod], found: dict[str, Any]) -> None:
    """End the prefill engine between its answer and the decode: the blocks are gone, and the request is answered."""
    prefill, decode = pods["prefill"], pods["decode"]
    ids = alone.prompt(4, run.tokens)
    given = complete(prefill, ids, count=1, transfer=HANDED_OVER)["kv_transfer_params"]
    prefill.kill()
    began = time.perf_counter()
    answer = tokens(complete(decode, ids, count=8, transfer=given))
    found["prefill_gone_ms"] = 1000 * (time.perf_counter() - began)
    alone.forget(decode)
    found["prefill_gone_same_tokens"] = answer == tokens(complete(decode, ids, count=8))


def main() -> None:
    """Start the pair, measure it, and write what was seen."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends.disaggregated", description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="what e2e.backends.render --pair wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvtier-backends/work"))  # noqa: S108  the script's own
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything")
    parser.add_argument("--start-seconds", type=float, default=900, help="for one start")
    options = parser.parse_args()
    document = json.loads(options.cases.read_text())
    model = Path(document["cases"][0]["tier"]["spec"]["model"]["name"])
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(document["config"]))
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    alone.clear(options.work, document["cases"])
    run = alone.BackendRun(options, document)
    found: dict[str, Any] = {"device": run.device, "prompt_tokens": run.tokens, "args": {}}
    for case in document["cases"]:
        found["args"][case["title"]] = case["args"]
    pods = start(document, options.work, options.port, run)
    try:
        measure(run, pods, found)
        from_volume(run, pods, pods["prefill"].volume, found)
        run.say(json.dumps({name: value for name, value in found.items() if name != "args"}))
        without_prefill(run, pods, found)
    finally:
        for pod in pods.values():
            pod.stop()
        (options.out / "disaggregated.json").write_text(json.dumps(found, indent=1) + "\n")
        with (options.out / "disaggregated.log").open("w") as log:
            for title, pod in pods.items():
                log.write(f"===== {title}\n{pod.log.read_text(errors='replace')[-20000:]}\n")
    print(json.dumps({name: value for name, value in found.items() if name != "args"}, indent=1))
    if wrong := problems(found):
        sys.exit(", ".join(wrong))


if __name__ == "__main__":
    main()
