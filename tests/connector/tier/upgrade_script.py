# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine with the disk tier, perhaps one that computes otherwise, and prints its answers as JSON.

The engine's core runs in this process, so that a fault can be planted in the loaded model before kvtier looks at it.
Nothing that identifies the blocks changes with the fault: that is what a faulty release of vLLM would be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from engine_under_test import CHUNK_TOKENS, WARM_UP, ask, make_llm, read_metrics, tell, wait_until
from patience import be_patient
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

COMPARING = 1.0
"""Value of the metric while blocks are compared."""


def plant_rope(model: Any) -> None:
    """Rotate by angles of another base."""
    for layer in model.model.layers:
        rope = layer.self_attn.rotary_emb
        turned = type(rope).__new__(type(rope))
        turned.__dict__.update(rope.__dict__)
        turned.base = rope.base * 50
        with torch.no_grad():
            rope.cos_sin_cache.copy_(turned._compute_cos_sin_cache())


def plant_norm(model: Any) -> None:
    """Scale the norm before one layer."""
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.mul_(1.5)


def plant_scale(model: Any) -> None:
    """Quantize KV with other scales."""
    for layer in model.model.layers:
        attention = layer.self_attn.attn
        for scale in (attention._k_scale, attention._v_scale):
            scale.mul_(2)
        attention._k_scale_float *= 2
        attention._v_scale_float *= 2


PLANTS = {"rope": plant_rope, "norm": plant_norm, "scale": plant_scale}


def plant(change: Callable[[Any], None]) -> None:
    """Have a model changed right after it was loaded."""
    load = CPUModelRunner.load_model

    def load_and_change(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        change(self.get_model())

    CPUModelRunner.load_model = load_and_change


def prompt_of(name: str) -> list[int]:
    """Return a prompt of 1000 tokens that no other name has."""
    seed = sum(map(ord, name))
    return [(7 * position * position + 13 * position + 97 * seed) % 1900 + 100 for position in range(1000)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True, help="the connector's document")
    parser.add_argument("--volume", type=Path, required=True)
    parser.add_argument("--kv", default="auto", help="type of the KV cache")
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("acts", nargs="+", help="prompts; or stored, verdict: wait for blocks, a decision")
    options = parser.parse_args()
    be_patient()
    if options.plant:
        plant(PLANTS[options.plant])
    llm = make_llm(
        options.model,
        options.config,
        dtype="bfloat16",
        max_model_len=2048,
        cpu_bytes=256 << 20,
        engine={"kv_cache_dtype": options.kv},
        offload_prompt_only=True,
    )
    answers: dict[str, Any] = {}

    def has_decided() -> bool:
        # It tells with a step.
        ask(llm, [WARM_UP])
        return read_metrics(llm)["vllm:kvtier_disk_release"] != COMPARING

    def are_stored() -> bool:
        return len(list(options.volume.rglob("*.kvb"))) >= len(answers) * (1000 // CHUNK_TOKENS)

    for act in options.acts:
        if act == "stored":
            wait_until(are_stored, "the volume has the blocks")
        elif act == "verdict":
            # It notes the verdict before it acts upon it.
            wait_until(has_decided, "the engine has compared")
        else:
            (found,) = ask(llm, [prompt_of(act)])
            (anew,) = ask(llm, [prompt_of(act)], reads_cache=False)
            answers[act] = {**found, "computed": anew["tokens"]}
    tell({"release": vllm.__version__, "answers": answers, "metrics": read_metrics(llm)})


if __name__ == "__main__":
    main()
