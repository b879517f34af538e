# SPDX-License-Identifier: Apache-2.0
"""Runs one class of the matrix and says what came of it: works, works without disk, or refused, with the evidence.

One engine computes each prompt and answers it again from its own prefix cache. A second one, of another process, has
only the volume; its answers must be the same, token by token and probability by probability.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from e2e.matrix import asking, one_engine, rendering, weights
from e2e.matrix.asking import Request
from e2e.matrix.classes import ModelClass
from e2e.matrix.rendering import Rendered

from kvtier_operator.errors import SpecInvalid

LIMIT_SECONDS: Final = 280.0
TOLERANCE: Final = 0.5
"""How far log-probabilities may lie apart where the engines computed in pieces of other lengths: bfloat16 lets even an
engine's own hit differ from computing the prompt by half as much."""

_UNLIKE = 99.0
_READ = "vllm:kvtier_disk_read_blocks"
_EXTERNAL = "vllm:external_prefix_cache_hits"
_PREEMPTIONS = "vllm:num_preemptions"


def prove(model: ModelClass, work: Path, *, device: str) -> dict[str, Any]:
    """Run a class below ``work``; return its row."""
    if model.needs and device == "cpu":
        return {"verdict": "not run", "message": model.needs}
    directory = work / (model.of or model.name)
    place = work / "weights" / (model.of or model.name)
    weights.write(place, model.shape)
    args = [*model.args, *_drafting(model, work)]
    try:
        writer = rendering.render(tier_spec(model, place, device, args), directory)
        reader = rendering.render(tier_spec(model, place, device, (*args, *model.reader_args)), directory)
    except SpecInvalid as error:
        return {"verdict": "refused", "by": "the operator", "message": str(error)}
    vocabulary = model.shape["vocab_size"]
    prompts = _asked(model, asking.prompts(vocabulary))
    first, second = _asked(model, asking.pair(vocabulary, model.pair_tokens))
    twins = _asked(model, asking.twins(vocabulary))
    # What is asked last has the least time to reach the volume.
    rounds = {"cold": prompts, "pair": [first], "gpu": prompts, "twins": twins}
    evidence = directory / "writer.json"
    if model.of:
        made = json.loads(evidence.read_text())
    else:
        shutil.rmtree(directory / "volume", ignore_errors=True)
        made = one_engine.run(writer, rounds, log=directory / "writer.log", at_once=1, limit_seconds=LIMIT_SECONDS)
        evidence.write_text(json.dumps(made))
    if "error" in made:
        return _without(model, writer, prompts, directory, message=made["error"])
    strangers = [replace(each, salt="another") for each in prompts[:4]] if model.asks == "salted" else []
    read = one_engine.run(
        reader,
        {"strangers": strangers, "disk": prompts, "pair": [second]},
        log=directory / f"{model.name}-reader.log",
        at_once=model.at_once,
        limit_seconds=LIMIT_SECONDS,
    )
    (directory / f"{model.name}-reader.json").write_text(json.dumps(read))
    if "error" in read:
        return {"verdict": "failed", "by": "the second engine", "message": read["error"]}
    return judge(model, made, read)


def _without(
    model: ModelClass, writer: Rendered, prompts: Sequence[Request], directory: Path, *, message: str
) -> dict[str, Any]:
    """Say whose fault it is that the first engine ended: run it once more without the tier."""
    found = one_engine.run(
        rendering.without_tier(writer),
        {"cold": prompts},
        log=directory / f"{model.name}-without.log",
        at_once=1,
        limit_seconds=LIMIT_SECONDS,
    )
    if "error" not in found:
        return {"verdict": "failed", "by": "kvtier", "message": message}
    return {"verdict": "refused", "by": "vLLM, without kvtier too", "message": found["error"]}


def _asked(model: ModelClass, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    settings: Mapping[str, Mapping[str, Any]] = {"salted": {"salt": "pepper"}, "embedded": {"is_embedded": True}}
    return asking.plain(prompts, **settings.get(model.asks, {}))


def _drafting(model: ModelClass, work: Path) -> list[str]:
    if model.draft is None:
        return []
    place = work / "weights" / f"{model.name}-draft"
    weights.write(place, model.draft, seed=weights.SEED + 1)
    settings = {"method": "draft_model", "model": str(place), "num_speculative_tokens": 2}
    return [f"--speculative-config={json.dumps(settings)}"]


def tier_spec(model: ModelClass, place: Path, device: str, args: Sequence[str]) -> dict[str, Any]:
    """Return the ``spec`` of the tier that a user would apply."""
    config = json.loads((place / "config.json").read_text())
    is_cpu = device == "cpu"
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--dtype=bfloat16", "--max-model-len=4096", *args]
    # Tiny engines share one machine.
    flags += ["--gpu-memory-utilization=0.1", "--kv-cache-memory-bytes=256M"] if is_cpu else []
    return {
        "model": {"name": str(place), "config": config},
        "engine": {
            "image": rendering.IMAGE,
            "accelerator": {"resource": "none" if is_cpu else "nvidia.com/gpu"},
            "args": flags,
        },
        "cpu": {"size": "256Mi"},
        "volume": {"existingClaim": "blocks"},
        "disk": {"admission": {"costAware": False}},
        **model.spec,
    }


def judge(model: ModelClass, made: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the answers and say what they show."""
    gpu, disk, cold = made["answers"]["gpu"], read["answers"]["disk"], made["answers"]["cold"]
    both = list(zip(gpu, disk, strict=True))
    # Of a prompt of which as much was cached, the rest is computed by the same steps, to the same bits.
    alike = [(one, other) for one, other in both if one["cached_tokens"] == other["cached_tokens"]]
    alike = alike if model.at_once == 1 else []
    lengths = _numbers(gpu, "prompt_tokens")
    row: dict[str, Any] = {
        "prompts": len(gpu),
        "lengths": [min(lengths), max(lengths)],
        "block_tokens": made["block_tokens"],
        "same_tokens": sum(one["tokens"] == other["tokens"] for one, other in both),
        "alike": len(alike),
        "alike_difference": max((difference(*pair) for pair in alike), default=0.0),
        "largest_difference": round(max(difference(*pair) for pair in both), 6),
        "recompute_difference": round(max(map(difference, cold, gpu)), 6),
        "twins_difference": difference(*made["answers"]["twins"]),
        "gpu_tokens": sum(_numbers(gpu, "cached_tokens")),
        "disk_tokens": sum(_numbers(disk, "cached_tokens")),
        "disk_blocks": read["counts"]["disk"].get(_READ, 0),
        "external_tokens": read["counts"]["disk"].get(_EXTERNAL, 0),
        "stranger_blocks": read["counts"]["strangers"].get(_READ, 0),
        "preemptions": read["counts"]["disk"].get(_PREEMPTIONS, 0),
        "pair_tokens": read["answers"]["pair"][0]["cached_tokens"],
        "pair_common": model.pair_tokens * 2 // 3,
        "seconds": [made["start_seconds"], read["start_seconds"]],
    }
    row["verdict"] = verdict(row)
    return row


def verdict(row: Mapping[str, Any]) -> str:
    """Say in one word what the numbers show."""
    if row["twins_difference"] <= TOLERANCE:
        return "blind: the answers do not depend on the prefix"
    if row["same_tokens"] < row["prompts"] or row["alike_difference"] or row["largest_difference"] > TOLERANCE:
        return "wrong answers"
    if row["stranger_blocks"]:
        return "wrong answers: blocks were read for another identity"
    return "works" if row["disk_blocks"] and row["external_tokens"] else "works without disk"


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how far the log-probabilities of two answers lie apart; those of unlike tokens are not alike at all."""
    worst = 0.0
    for left, right in zip(one["logprobs"], other["logprobs"], strict=True):
        shared = left.keys() & right.keys()
        worst = max([worst, *(abs(left[token] - right[token]) for token in shared)])
        worst = worst if shared else _UNLIKE
    return worst


def _numbers(answers: Iterable[Mapping[str, Any]], name: str) -> list[int]:
    return [int(answer[name] or 0) for answer in answers]
