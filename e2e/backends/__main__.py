# SPDX-License-Identifier: Apache-2.0
"""``python -m e2e.backends``: start each connector as it is rendered, see the hit, and see it again in a new engine.

A prompt is computed, the engine's own prefix cache is emptied, and the prompt is asked again; a second engine has only
what the connector keeps beyond a process. Times are to the first token. Exits with 1 where a promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml
from e2e.bench.report import table_row
from e2e.engines import weights
from e2e.engines.process import EngineEnded
from e2e.engines.weights import SHAPES
from e2e.matrix import rendering
from e2e.matrix.asking import Request, tokens
from e2e.matrix.engine import ForkedEngine, Round, prepare
from e2e.matrix.proof import is_tie
from e2e.matrix.rendering import PASSWORD, Rendered
from pydantic import BaseModel

from kvtier_operator.parts.connectors.rendering import ON_CPU_BUILD, ON_DEVICE

RESULTS: Final = Path(__file__).with_name("results")
PAGE: Final = RESULTS / "README.md"
TEMPLATE: Final = Path(__file__).with_name("backends.md.in")
CHUNK_TOKENS: Final = 256
"""LMCache's: the end of a prompt that fills none may be computed."""
TRIES: Final = 5
LIMIT_SECONDS: Final = 300.0
"""For one start, and for one prompt."""
MEMCPY: Final = "e2e.backends.lmcache_memcpy"
HANDED_OVER: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
"""Request of a proxy to the engine that prefills; the answer says where the blocks are."""

_REDIS: Final = (("--port", "6379", "--requirepass", PASSWORD), ("--port", "6380"))
_EXTERNAL: Final = "vllm:external_prefix_cache_hits"
_READ: Final = "vllm:kvtier_disk_read_blocks"
_BYTES: Final = "vllm:nixl_bytes_transferred"


class BackendCase(BaseModel, frozen=True, extra="forbid"):
    """One connector."""

    title: str
    connector: dict[str, Any]
    decode: dict[str, Any] | None = None
    """Connector of the engine that decodes, where two hand blocks over."""
    lies: str
    """Where the bytes lie."""
    devices: tuple[str, ...]
    copies: bool = False
    """Whether a class of the test copies on the CPU build."""
    offers: int = 1
    """How often a prompt must be computed until it is kept."""
    others: int = 0
    """Prompts that are computed between a prompt and its hit."""
    cpu_memory: str = "512Mi"
    """Memory of the tier on the CPU build."""

    @property
    def is_shared(self) -> bool:
        """Whether another engine can find anything at all."""
        return any(word in self.lies for word in ("volume", "Redis", "Bundled", "pool"))


CASES: Final = {
    title: BackendCase(title=title, **fields)
    for title, fields in yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text()).items()
}


class BackendBench:
    """The machine that the cases run on."""

    def __init__(self, device: str, work: Path) -> None:
        """Store."""
        self.device = device
        self.work = work
        self.shape = SHAPES["llama_small" if device == "cpu" else "llama_3b"]
        self.tokens, self.rounds = (2048, 1) if device == "cpu" else (16384, 3)

    def prompt(self, seed: int) -> Request:
        """Return a prompt that shares no beginning with that of another seed."""
        return Request(tokens=tokens(self.tokens, self.shape["vocab_size"], seed=seed))

    def render(self, case: BackendCase, connector: Mapping[str, Any], name: str = "tier") -> Rendered:
        """Return what an engine of the case is started with."""
        return _on_this_build(
            rendering.render(self._tier(case, connector, name), self.work / name, volume=self.work / "volume")
        )

    def start(self, rendered: Rendered, case: BackendCase, log: str) -> ForkedEngine:
        """Start an engine."""
        plugin = MEMCPY if case.copies and self.device == "cpu" else ""
        return ForkedEngine(rendered, self.work / f"{log}.log", limit_seconds=LIMIT_SECONDS, plugin=plugin)

    def _tier(self, case: BackendCase, connector: Mapping[str, Any], name: str) -> dict[str, Any]:
        is_cpu = self.device == "cpu"
        model = self.work / "model"
        # An engine with vLLM's dummy weights has a directory of its own on the volume: no other one finds anything.
        weights.write(model, self.shape)
        args = ["--skip-tokenizer-init", "--enforce-eager", "--dtype=bfloat16", "--seed=0"]
        args += ["--gpu-memory-utilization=0.15", f"--max-model-len={4096 if is_cpu else 32768}"]
        args += [] if is_cpu else ["--kv-cache-memory-bytes=4294967296"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1"} if is_cpu else {}
        if is_cpu and "MultiProcess" in case.title:
            # LMCache's server takes blocks out of the engine's memory, as it does on a GPU.
            env["LMCACHE_MP_TRANSFER_MODE"] = "lmcache_driven"
        is_ours = connector["type"] == "Bundled" or "nixl" in connector.get("hybrid", {})
        spec: dict[str, Any] = {
            "model": {"name": str(model), "config": json.loads((model / "config.json").read_text())},
            "engine": {
                "accelerator": {"resource": "none" if is_cpu and not case.copies else "nvidia.com/gpu"},
                "args": args,
                "env": [{"name": name, "value": value} for name, value in env.items()],
            },
            "connector": dict(connector),
            "cpu": {"size": case.cpu_memory if is_cpu else "8Gi"},
            # No janitor runs here whose permit engines would store by.
            **({"disk": {"splitHits": "Off"}, "janitor": {"enabled": False}} if is_ours else {}),
        }
        if is_ours or connector["type"] == "VLLMTiering":
            spec["volume"] = {"existingClaim": "prefill-blocks"}
        return rendering.body_of(name, spec)


def _on_this_build(rendered: Rendered) -> Rendered:
    """Return it with vLLM's tier in host memory for the CPU build where that build runs another connector beside it."""
    if "VLLM_CPU_KVCACHE_SPACE" not in rendered.env:
        return rendered
    device, cpu = (json.dumps(spec, sort_keys=True, separators=(",", ":"))[1:-1] for spec in (ON_DEVICE, ON_CPU_BUILD))
    return replace(rendered, argv=tuple(word.replace(device, cpu) for word in rendered.argv))


def first_token(engine: ForkedEngine, request: Request) -> tuple[float, Round]:
    """Return the milliseconds to an answer of one token, and the answer."""
    found = engine.ask([request], answer_tokens=1)
    return 1000 * found.seconds, found


def hit(engine: ForkedEngine, request: Request) -> tuple[float, Round]:
    """Return `first_token` of a prompt that the tier holds whole; of the last try if it never does.

    Blocks that are still being stored are computed again: on a busy machine, storing takes longer than `forget` waits.
    """
    for _ in range(TRIES):
        engine.forget()
        took, found = first_token(engine, request)
        if found.counts.get(_EXTERNAL, 0) > len(request.tokens) - CHUNK_TOKENS:
            break
    return took, found


def measure(bench: BackendBench, case: BackendCase, result: dict[str, Any]) -> None:
    """Measure a connector in one engine, cold and again from its tier, and in a second one."""
    rendered, prompt = bench.render(case, case.connector), bench.prompt(1)
    with bench.start(rendered, case, "first") as engine:
        result["start_seconds"] = [round(engine.start_seconds, 1)]
        first_token(engine, bench.prompt(99))  # kernels are chosen and memory is touched
        engine.forget()
        result["cold_ms"], cold = first_token(engine, prompt)
        for _ in range(case.offers - 1):
            engine.forget()
            first_token(engine, prompt)
        for seed in range(50, 50 + case.others):
            first_token(engine, bench.prompt(seed))
        hits = [hit(engine, prompt) for _ in range(bench.rounds)]
        engine.forget()
        answer = engine.ask([prompt])
    result["hit_ms"] = statistics.median(took for took, _ in hits)
    result["hit_tokens"] = max(found.counts.get(_EXTERNAL, 0) for _, found in hits)
    result["same_tokens"] = all(_agree(found, cold) for _, found in hits)
    if not case.is_shared:
        return
    with bench.start(rendered, case, "second") as engine:
        result["start_seconds"].append(round(engine.start_seconds, 1))
        first_token(engine, bench.prompt(98))
        first_token(engine, bench.prompt(99))  # which the first engine has computed, too: the way of a hit is warm
        result["replica_ms"], found = first_token(engine, prompt)
        result["replica_hit_tokens"] = found.counts.get(_EXTERNAL, 0)
        result["same_tokens"] &= _agree(engine.ask([prompt]), answer)


def measure_pair(bench: BackendBench, case: BackendCase, result: dict[str, Any]) -> None:
    """Have one engine hand blocks over to another, which also finds them in memory and on the volume."""
    assert case.decode is not None
    both = {
        "prefill": bench.render(case, case.connector, "prefill"),
        "decode": bench.render(case, case.decode, "decode"),
    }
    # One address for all pods of this machine.
    here = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    ports = {"prefill": "5600", "decode": "5610"}
    both = {
        name: replace(each, env={**each.env, **here, "VLLM_NIXL_SIDE_CHANNEL_PORT": ports[name]})
        for name, each in both.items()
    }
    with (
        bench.start(both["prefill"], case, "prefill") as prefill,
        bench.start(both["decode"], case, "decode") as decode,
    ):

        def given(prompt: Request) -> Request:
            """Return what a proxy asks the second engine, after it asked the first one for a token."""
            (answer,) = prefill.ask([replace(prompt, transfer=HANDED_OVER)], answer_tokens=1).answers
            return replace(prompt, transfer=answer.transfer)

        first_token(decode, given(bench.prompt(97)))
        began, prompt = time.perf_counter(), bench.prompt(1)
        handed = first_token(decode, given(prompt))[1]
        result["handed_over_ms"] = 1000 * (time.perf_counter() - began)
        longer = decode.ask([given(bench.prompt(2))])
        prefill.forget()
        decode.forget()
        result["tier_ms"], again = first_token(decode, prompt)
        result["computed_ms"], _ = first_token(decode, bench.prompt(3))
        computed = prefill.ask([bench.prompt(2)])
        # This prompt is not handed over: the volume alone has it.
        prompt = bench.prompt(5)
        alone = prefill.ask([prompt])
        prefill.settle()
        result["volume_ms"], read = first_token(decode, prompt)
        decode.forget()
        is_same = _agree(again, handed) and _agree(longer, computed) and _agree(decode.ask([prompt]), alone)
        # The prefill engine ends between its answer and the decode: the blocks are gone, the request is answered.
        prompt = bench.prompt(4)
        request = given(prompt)
        prefill.kill()
        gone = decode.ask([request])
        result["prefill_gone_ms"] = 1000 * gone.seconds
        decode.forget()
        result["same_tokens"] = is_same and _agree(gone, decode.ask([prompt]))
        result["handed_over_bytes"] = handed.counts.get(_BYTES, 0)
        result["hit_tokens"] = again.counts.get(_EXTERNAL, 0)
        # Blocks that came from the volume must not have been handed over.
        result["replica_hit_tokens"] = 0 if read.counts.get(_BYTES) else read.counts.get(_EXTERNAL, 0)
        result["volume_blocks"] = read.counts.get(_READ, 0)


def _agree(one: Round, other: Round) -> bool:
    """Tell whether answers are equal; of two tokens that are as probable, either may come where less was computed."""
    pairs = zip(one.answers, other.answers, strict=True)
    return all(left.tokens == right.tokens or is_tie(left, right) for left, right in pairs)


@contextmanager
def redis(work: Path) -> Iterator[None]:
    """Run two empty Redis, with the operator's own flags: one with a password, and one without."""
    words = ["redis-server", "--save", "", "--appendonly", "no", "--maxmemory", str(12 << 30), "--bind", "127.0.0.1"]
    words += ["--maxmemory-policy", "allkeys-lru"]
    with (work / "redis.log").open("wb") as log:
        made = [subprocess.Popen([*words, *each], stdout=log, stderr=subprocess.STDOUT) for each in _REDIS]
    try:
        yield
    finally:
        for process in made:
            process.terminate()
            process.wait(10)


def problems(case: BackendCase, result: Mapping[str, Any]) -> list[str]:
    """Return what is not as promised: each case hits, its tokens are equal, and what is shared is read by another."""
    if "problem" in result:
        return [str(result["problem"])]
    told = {
        "tokens differ": result["same_tokens"],
        "no hit": result.get("hit_tokens"),
        "another engine found nothing": result.get("replica_hit_tokens") or not case.is_shared,
        "nothing was handed over": case.decode is None or result["handed_over_bytes"],
    }
    return [problem for problem, is_well in told.items() if not is_well]


def keep(path: Path, bench: BackendBench, result: Mapping[str, Any]) -> None:
    """Keep what was measured of a case, in place of what was known of it."""
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = [*(each for each in known if each["title"] != result["title"]), result]
    document = {"device": bench.device, "prompt_tokens": bench.tokens, "rounds": bench.rounds, "cases": cases}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def measured() -> str:
    """Return the page of what was measured of each connector."""
    rows = []
    for device, name in (("H200", "h200.json"), ("CPU", "cpu.json")):
        found = json.loads((RESULTS / name).read_text())
        cases = sorted(found["cases"], key=lambda each: list(CASES).index(each["title"]))
        rows += [_row(device, result, found["prompt_tokens"]) for result in cases]
    return TEMPLATE.read_text().format(rows="".join(rows))


def _row(device: str, result: Mapping[str, Any], prompt_tokens: int) -> str:
    case = CASES[result["title"]]
    name, _, how = case.title.partition(", ")
    shown = f"`{name}`, {how}" if how else f"`{name}`"
    if "problem" in result:
        return table_row([shown, device, result["problem"], *[""] * 4])
    if result.get("memcpy"):
        device = f"{device}, copied by a class of the test"
    if "beside" in result:
        device = f"{device}, {result['beside']}"
    # Older runs asked for eight tokens more, and counted them as well.
    read = min(prompt_tokens, int(result.get("replica_hit_tokens", 0)))
    cold, hit = (
        result.get(f"{one}_ms", result.get(f"{other}_ms")) for one, other in (("cold", "computed"), ("hit", "tier"))
    )
    if case.decode is not None:
        another = (
            f"handed over in {result['handed_over_ms']:.0f} ms; from the volume, {read:,.0f} tokens in "
            f"{result['volume_blocks']:.0f} blocks, in {result['volume_ms']:.0f} ms"
        )
    elif "replica_ms" in result or read:
        took = f" in {result['replica_ms']:.0f} ms" if "replica_ms" in result else ""
        another = f"read {read:,} tokens{took}" if read else f"computed{took}"
    else:
        another = "not asked" if case.is_shared else "nothing to read"
    restart = "as another replica" if read else another
    cells = [f"{cold:.0f}", f"{hit:.0f}", restart if case.is_shared or case.decode else "nothing is kept", another]
    return table_row([shown, device, *cells, case.lies])


def main() -> None:
    """Run the cases that were named, or all of the device."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends", description=__doc__)
    parser.add_argument("titles", nargs="*", metavar="TITLE", help="titles of cases; all of the device if left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS / "cpu.json", help="file that keeps the figures")
    parser.add_argument("--work", type=Path, default=Path(".kvtier/backends"), help="for models, volumes and logs")
    parser.add_argument("--write", action="store_true", help="run nothing: write results/README.md")
    parser.add_argument("--check", action="store_true", help="run nothing: exit with 1 where that is another")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(measured())
    if options.check and measured() != PAGE.read_text():
        sys.exit(f"{PAGE} is stale: run `make generate`")
    if options.write or options.check:
        return
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    prepare(device=options.device)
    wrong = []
    for case in CASES.values():
        if case.title not in (options.titles or CASES) or options.device not in case.devices:
            continue
        # Cases have the same prompts, and some the same keys.
        shutil.rmtree(options.work, ignore_errors=True)
        bench = BackendBench(options.device, options.work.resolve())
        bench.work.mkdir(parents=True)
        result: dict[str, Any] = {
            "title": case.title,
            "memcpy": case.copies and options.device == "cpu" and "MultiProcess" not in case.title,
        }
        try:
            with redis(bench.work):
                (measure if case.decode is None else measure_pair)(bench, case, result)
        except (EngineEnded, OSError) as error:
            result["problem"] = str(error)[:900]
        keep(options.results, bench, result)
        said = problems(case, result)
        print(f"{case.title}: {json.dumps(result)} {'; '.join(said)}", flush=True)
        wrong += [f"{case.title}: {problem}" for problem in said]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
