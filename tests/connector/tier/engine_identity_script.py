# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine with the disk tier and LoRA, and does in turn what it is told; prints the answers as JSON.

``base``, ``other`` and ``adapter`` ask; ``update`` replaces the weights in place as vLLM does, with the caches reset
first; ``blocks`` waits until the volume has as many blocks as were computed so far.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine_under_test import CHUNK_TOKENS, ask, make_llm, read_metrics, tell
from vllm.lora.request import LoRARequest

PROMPT = [(7 * position * position + 13 * position) % 1900 + 100 for position in range(900)]
OTHER = PROMPT[::-1]
SETTLING = list(range(200, 300))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True, help="holds the models, the adapter and the volume")
    parser.add_argument("--config", type=Path, required=True, help="the connector's document")
    parser.add_argument("acts", nargs="+")
    options = parser.parse_args()
    directory: Path = options.directory
    lora = LoRARequest("math", 1, str(directory / "adapter"))
    llm = make_llm(
        directory / "model",
        options.config,
        dtype="float32",
        max_model_len=1024,
        cpu_bytes=64 << 20,
        engine={"enable_lora": True, "max_lora_rank": 8},
    )
    answers = {}
    computed = 0
    for act in options.acts:
        if act == "update":
            assert llm.reset_prefix_cache(reset_connector=True)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory / "updated")})
            ask(llm, [SETTLING])
            wait_until_active(llm)
        elif act == "blocks":
            wait_for_blocks(directory, computed)
        else:
            (answers[act],) = ask(llm, [OTHER if act == "other" else PROMPT], lora=lora if act == "adapter" else None)
            computed += (len(PROMPT) - answers[act]["cached_tokens"]) // CHUNK_TOKENS
    tell({**answers, "metrics": read_metrics(llm)})


def wait_until_active(llm: object) -> None:
    deadline = time.monotonic() + 30
    while read_metrics(llm).get("vllm:kvtier_disk_active") != 1:  # type: ignore[arg-type]  # it is an LLM
        if time.monotonic() > deadline:
            sys.exit("the engine has no directory after the update")
        ask(llm, [SETTLING])  # type: ignore[arg-type]  # as above


def wait_for_blocks(directory: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(directory.rglob("*.kvb"))) < count:
        if time.monotonic() > deadline:
            sys.exit(f"the volume has fewer than {count} blocks after a minute")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
