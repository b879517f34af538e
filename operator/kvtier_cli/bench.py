# SPDX-License-Identifier: Apache-2.0
"""The verb ``bench``: what a prompt costs computed, from the volume, and from an engine's own memory.

`vllm bench serve` runs inside the pods of two engines. The first engine computes the prompts and stores their blocks.
The second engine answers the same prompts from the volume; the first one, asked again, from its memory.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import click

from kvtier_cli import client, output
from kvtier_cli.output import FINE, FOUND
from kvtier_cli.status import is_ready
from kvtier_operator import names
from kvtier_operator.errors import ClusterUnavailable
from kvtier_operator.observe.engine_view import SOURCES, hits

Document = dict[str, Any]
_ENGINES: Final = 2
_RESULT: Final = "kvtier-bench "
_SCRIPT: Final = f"""\
import json, os
os.environ.setdefault("OPENAI_API_KEY", os.environ.get("VLLM_API_KEY", ""))
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
found = serve.main(parser.parse_args())
figures = {{name: value for name, value in found.items() if isinstance(value, (int, float))}}
print("\\n{_RESULT}" + json.dumps(figures))
"""
"""Runs `vllm bench serve`. The command `vllm` itself asks for package metadata, which vLLM's CPU build lacks."""
_QUEUED: Final = "vllm:kvtier_disk_queued_jobs"
_WRITTEN: Final = "vllm:kvtier_disk_written_bytes_total"
_STORED_SECONDS: Final = 120.0
POLL_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class BenchLoad:
    """Options of `vllm bench serve` that all passes share."""

    requests: int
    tokens: int
    output_tokens: int
    concurrency: int
    seed: int

    def words(self, pod: names.Manifest) -> list[str]:
        """Return the command line for the engine of a pod."""
        args = dict(word.lstrip("-").partition("=")[::2] for word in _engine(pod)["args"])
        address = pod["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        return [
            f"--base-url=http://{host}:{names.HTTP_PORT}",
            f"--model={args['model']}",
            f"--served-model-name={args['served-model-name']}",
            f"--tokenizer={args.get('tokenizer', args['model'])}",
            "--dataset-name=random",
            f"--random-input-len={self.tokens}",
            f"--random-output-len={self.output_tokens}",
            f"--num-prompts={self.requests}",
            f"--max-concurrency={self.concurrency}",
            f"--seed={self.seed}",
            "--ignore-eos",
            "--temperature=0",
            "--disable-tqdm",
            "--percentile-metrics=ttft,tpot",
            "--metric-percentiles=50,99",
        ]


@click.command(
    epilog=output.examples("kvtier bench llama", "kvtier bench llama --tokens 8192 --requests 32 --concurrency 8")
)
@client.tier_argument
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True, help="prompts of each pass")
@click.option("--tokens", type=click.IntRange(16), default=2048, show_default=True, help="tokens of a prompt")
@click.option("--output-tokens", type=click.IntRange(1), default=32, show_default=True, help="tokens of an answer")
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="requests at once")
@click.option("--seed", type=click.IntRange(0), help="of the random prompts  [default: new prompts in each run]")
@output.output_option()
@client.cluster_options
def bench(tier: str, *, seed: int | None, where: client.Where, output_format: str, **load: int) -> int:
    """Compare computed prompts with hits on the volume and in memory, with `vllm bench serve` in two engines of TIER.

    TIER needs two ready engines, without other requests meanwhile, and 1 GiB of free memory in each engine's container.
    Exit code 1: a request failed, or the second engine found nothing on the volume.
    """
    asked = BenchLoad(seed=secrets.randbelow(1 << 31) if seed is None else seed, **load)
    body = where.client.tier(where.asked_namespace, tier)
    pods = _pods(where, tier)
    least = ((body["spec"].get("disk") or {}).get("admission") or {}).get("minReuse", 1)
    passes = [_measure(where, pods[0], asked, "computed")]
    for _ in range(1, least):
        _measure(where, pods[0], asked, "again, until it is stored (disk.admission.minReuse)")
    _wait_for_blocks(where, pods[0])
    passes.append(_measure(where, pods[1], asked, "another engine"))
    passes.append(_measure(where, pods[0], asked, "same engine"))
    document = {"tier": tier, "seed": asked.seed, "passes": passes}
    output.show(document, output_format, lambda: _page(document))
    return FINE if (not any(each["failed"] for each in passes) and passes[1]["hits"].get("disk", 0) > 0) else FOUND


def _pods(where: client.Where, tier: str) -> list[names.Manifest]:
    """Return two ready engines."""
    namespace = where.asked_namespace
    found = [pod for pod in where.client.pods(namespace, tier, names.COMPONENT_ENGINE) if is_ready(pod)]
    if len(found) < _ENGINES:
        raise ClusterUnavailable(
            f"{tier} has {len(found)} ready engines, and a hit on the volume takes two: one that stores and one that "
            f"loads. Set spec.replicas to 2, or see kvtier status {tier} -n {namespace}"
        )
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))[:_ENGINES]


def _engine(pod: names.Manifest) -> Any:
    return next(each for each in pod["spec"]["containers"] if each["name"] == names.ENGINE_CONTAINER)


def _measure(where: client.Where, pod: names.Manifest, load: BenchLoad, name: str) -> Document:
    """Run the load in a pod and return its times, with the share of prompt tokens by where they came from."""
    engine = pod["metadata"]["name"]
    output.tell_step(f"{name}: {load.requests} prompts of {load.tokens} tokens in {engine}")
    before = hits([where.client.fetch(pod, names.HTTP_PORT, "/metrics")])
    lines: list[str] = []
    command = ["python3", "-c", _SCRIPT, *load.words(pod)]
    code, complaint = where.client.execute(pod, names.ENGINE_CONTAINER, command, lines.append)
    after = hits([where.client.fetch(pod, names.HTTP_PORT, "/metrics")])
    return {"pass": name, "engine": engine, **read_result(lines, code, complaint), "hits": _shares(before, after)}


def read_result(lines: list[str], code: int, complaint: str) -> Document:
    """Return the figures of `vllm bench serve` out of the lines that it printed.

    Raises:
        ClusterUnavailable: it printed none.
    """
    found = next((line.removeprefix(_RESULT) for line in lines if line.startswith(_RESULT)), None)
    if found is None:
        said = complaint.strip()[-600:] or "\n".join(lines)[-600:] or "nothing"
        raise ClusterUnavailable(f"`vllm bench serve` ended with {code} and printed no result: {said}")
    result = json.loads(found)
    return {
        "requests": result["completed"],
        "failed": result["failed"],
        "seconds": round(result["duration"], 3),
        "ttftMs": {name: round(result[f"{name}_ttft_ms"], 1) for name in ("mean", "p50", "p99")},
        "tpotMs": round(result["p50_tpot_ms"], 1),
        "promptTokensPerSecond": round(result["total_input_tokens"] / result["duration"], 1),
    }


def _shares(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    prompt = after["promptTokens"] - before["promptTokens"]
    found = {
        SOURCES.get(source, source): (count - before["bySource"].get(source, 0)) / (prompt or 1)
        for source, count in after["bySource"].items()
    }
    return {source: round(share, 3) for source, share in found.items() if share > 0}


def _wait_for_blocks(where: client.Where, pod: names.Manifest) -> None:
    """Wait until an engine has written all blocks that it holds for the volume."""
    deadline, before = time.monotonic() + _STORED_SECONDS, ""
    while time.monotonic() < deadline:
        page = where.client.fetch(pod, names.HTTP_PORT, "/metrics").splitlines()
        now = "".join(line for line in page if line.startswith((_QUEUED, _WRITTEN)))
        is_idle = all(float(line.split()[-1]) == 0 for line in page if line.startswith(_QUEUED))
        if is_idle and now == before:
            return
        before = now
        time.sleep(POLL_SECONDS)


def _page(document: Mapping[str, Any]) -> str:
    rows = [("PASS", "ENGINE", "REQUESTS", "TTFT mean", "P50", "P99", "TPOT P50", "PROMPT TOKENS/s", "CACHED")]
    for each in document["passes"]:
        cached = ", ".join(f"{source} {share:.0%}" for source, share in each["hits"].items()) or "none"
        failed = f", {each['failed']} failed" if each["failed"] else ""
        times = [f"{value:,.0f} ms" for value in (*each["ttftMs"].values(), each["tpotMs"])]
        rate = f"{each['promptTokensPerSecond']:,.0f}"
        rows.append((each["pass"], each["engine"], f"{each['requests']}{failed}", *times, rate, cached))
    computed, loaded = (each["ttftMs"]["p50"] for each in document["passes"][:2])
    if not document["passes"][1]["hits"].get("disk"):
        verdict = f"the second engine found nothing on the volume: kvtier status {document['tier']} may say why"
    elif loaded < computed:
        verdict = f"a hit on the volume gives the first token {computed / max(loaded, 0.1):.1f} times as soon"
    else:
        verdict = f"loading from this volume takes {loaded / max(computed, 0.1):.1f} times as long as computing"
    return f"{output.columns(rows)}\n{verdict}\n"
