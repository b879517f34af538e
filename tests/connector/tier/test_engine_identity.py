# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on one directory, whose adapter is rewritten and whose weights are replaced: never a wrong token.

Each engine answers as one that computes; what is shared is read, and nothing else is.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import DIGEST, run_script, write_config
from safetensors.torch import load_file, save_file

from kvtier_demo.model import make_model

SCRIPT = Path(__file__).with_name("engine_identity_script.py")
CACHED = 7 * 128
"""Of 900 tokens."""
RANK = 8


def write_adapter(directory: Path, model: Path, seed: int) -> None:
    """Write a LoRA adapter that changes the answers; another seed is another one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            out_features, in_features = weight.shape
            prefix = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, in_features, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, RANK, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**described, "task_type": "CAUSAL_LM", "bias": "none"}))


def write_updated_model(directory: Path, model: Path) -> None:
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = {
        name: each + 0.3 * each.std() * torch.randn(each.shape, generator=generator).to(each.dtype)
        if each.ndim > 1
        else each
        for name, each in weights.items()
    }
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})


def run(directory: Path, *acts: str) -> dict[str, Any]:
    config = write_config(directory, directory / "volume")
    result = run_script(SCRIPT, f"--directory={directory}", f"--config={config}", *acts, timeout_seconds=400)
    for name, answer in result.items():
        if name != "metrics":
            sys.stdout.write(f"{name:8} {answer['cached_tokens']:4} tokens cached, {answer['tokens']}\n")
    return result


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_adapters_that_are_rewritten_and_weights_that_are_replaced_never_give_an_answer_of_the_old_ones(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model")
    write_updated_model(tmp_path / "updated", tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model", 1)
    first = run(tmp_path, "base", "adapter", "blocks")
    write_adapter(tmp_path / "adapter", tmp_path / "model", 2)
    second = run(tmp_path, "base", "adapter", "update", "base_updated", "other", "blocks")
    third = run(tmp_path, "base", "adapter", "other")

    assert second["base"] == {"tokens": first["base"]["tokens"], "cached_tokens": CACHED}
    assert second["adapter"]["cached_tokens"] == 0
    assert second["adapter"]["tokens"] != first["adapter"]["tokens"] != first["base"]["tokens"]
    assert third["base"] == second["base"]
    assert third["adapter"] == {"tokens": second["adapter"]["tokens"], "cached_tokens": CACHED}
    # The second engine computed with the updated weights, stored that, and the third one has the model's own.
    assert second["base_updated"]["cached_tokens"] == 0
    assert second["base_updated"]["tokens"] != second["base"]["tokens"]
    assert third["other"]["cached_tokens"] == 0
    assert third["other"]["tokens"] != second["other"]["tokens"]
    (epoch,) = [path for path in (tmp_path / "volume").iterdir() if path.name.startswith(f"{DIGEST}.")]
    assert len(list(epoch.rglob("*.kvb"))) >= CACHED // 128
    identity = json.loads((tmp_path / "volume" / DIGEST / "tier.json").read_text())["identity"]
    assert identity["engine.backends"][0].startswith("Attention/CPU_ATTN/")
    assert len(identity["engine.layout"]) == 1
