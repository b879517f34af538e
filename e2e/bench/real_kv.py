# SPDX-License-Identifier: Apache-2.0
"""Makes the KV of a small model that has learnt something: ``python e2e/bench/real_kv.py --out KV.bin``.

Run it with the Python of vLLM's CPU build. No weights are fetched: a Llama of a few million parameters is trained for
some minutes on the source text of the packages that are installed, until its loss is far below that of guessing. The
file has the bytes of chunks one after the other, as vLLM lays them out: for each 16 tokens and each layer K, rotated,
then V, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, KV_HEADS, HEADS, HEAD_DIM = 6, 2, 4, 64
VOCABULARY = 4096
BLOCK_TOKENS = 16
SEQUENCE = 512
BATCH = 8
TEXT_BYTES = 12 << 20
HELD_BACK = 64
"""Sequences that the model does not learn from: their KV is what is written."""


def read_text() -> str:
    """Return source text of installed packages, the same on the same machine."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("transformers/models/*/*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        parts.append(text)
        size += len(text)
        if size > TEXT_BYTES:
            break
    return "\n".join(parts)


def tokens_of(text: str) -> torch.Tensor:
    """Return the text as tokens of a vocabulary learnt from it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines[:40_000], trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    ids = [number for encoding in tokenizer.encode_batch(lines) for number in encoding.ids]
    count = len(ids) // SEQUENCE
    return torch.tensor(ids[: count * SEQUENCE]).view(count, SEQUENCE)


def train(model: LlamaForCausalLM, sequences: torch.Tensor, seconds: float) -> tuple[int, float]:
    """Train for so long; return the steps, and the loss of the last of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    began, step, losses = time.monotonic(), 0, [0.0]
    while (elapsed := time.monotonic() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 - elapsed / seconds))
        batch = sequences[torch.randint(len(sequences), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses = [*losses[-19:], loss.item()]
    return step, sum(losses) / len(losses)


def kv_of(model: LlamaForCausalLM, sequence: torch.Tensor) -> torch.Tensor:
    """Return what vLLM would keep of a sequence: [blocks, layers, 2, tokens, heads, dimensions] in bfloat16."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=sequence[None], past_key_values=cache, use_cache=True)
    layers = []
    found: list[Any] = cache.layers
    for layer in found:
        both = torch.stack((layer.keys[0], layer.values[0]))  # [2, heads, tokens, dimensions]
        both = both.transpose(1, 2).reshape(2, -1, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
        layers.append(both.transpose(0, 1))
    return torch.stack(layers, dim=1).to(torch.bfloat16)


def main() -> None:
    """Train, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="of training")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    sequences = tokens_of(read_text())
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HEADS * HEAD_DIM, intermediate_size=704, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
            max_position_embeddings=SEQUENCE, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.train()
    steps, loss = train(model, sequences[HELD_BACK:], options.seconds)
    model.eval().to(torch.bfloat16)
    with options.out.open("wb") as file:
        for sequence in sequences[:HELD_BACK]:
            file.write(kv_of(model, sequence).contiguous().view(torch.uint8).numpy().tobytes())
    told = {
        "parameters": sum(each.numel() for each in model.parameters()), "tokens": sequences.numel(), "steps": steps,
        "loss": round(loss, 2), "loss_of_guessing": round(math.log(VOCABULARY), 2), "bytes": options.out.stat().st_size,
    }  # fmt: skip
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
