# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine with the disk tier, asks it for one prompt in the named ways, prints the answers as JSON.

A process of its own for each engine: only a new process proves that nothing but the volume carried the blocks over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPT = [(7 * position * position + 13 * position) % 1900 + 100 for position in range(2000)]
WARM_UP = list(range(200, 300))
CHUNK_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tier", type=json.loads, required=True, help="one entry of secondary_tiers")
    parser.add_argument("--spec-module", default="kvtier_connector.tier.spec")
    parser.add_argument("--blocks", type=int, default=0, help="wait until the volume has so many block files")
    parser.add_argument("--salt", default="", help="cache salt of the prompts")
    parser.add_argument("--key", type=Path, help="file of the key that 'rekey' replaces")
    parser.add_argument(
        "asks",
        nargs="+",
        help="labels; 'reset' before one empties the GPU's cache, 'forget' the CPU tier too, 'rekey' replaces the key",
    )
    options = parser.parse_args()

    llm = LLM(
        model=str(options.model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=4096,
        seed=0,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "KVTierSpec",
                "spec_module_path": options.spec_module,
                "cpu_bytes_to_use": 512 << 20,
                "block_size": CHUNK_TOKENS,
                "eviction_policy": "lru",
                "offload_prompt_only": True,
                "secondary_tiers": [options.tier],
            },
        ),
    )

    def ask(prompt: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        (output,) = llm.generate(
            {"prompt_token_ids": prompt, **({"cache_salt": options.salt} if options.salt else {})},
            SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - started
        return {
            "seconds": round(seconds, 3),
            "cached_tokens": output.num_cached_tokens,
            "tokens": list(output.outputs[0].token_ids),
        }

    ask(WARM_UP)
    answers = {}
    for label in options.asks:
        if label in {"reset", "forget"}:
            assert llm.reset_prefix_cache(reset_connector=label == "forget")
        elif label == "rekey":
            replace_key(options.key)
        else:
            answers[label] = ask(PROMPT)
    deadline = time.monotonic() + 60
    suffixes = {".kvb", ".bin"}
    while sum(path.suffix in suffixes for path in options.directory.rglob("*")) < options.blocks:
        if time.monotonic() > deadline:
            sys.exit(f"the volume has fewer than {options.blocks} blocks after a minute")
        time.sleep(0.05)
    sys.stdout.write("ANSWERS " + json.dumps({**answers, "metrics": read_metrics(llm)}) + "\n")
    sys.stdout.flush()


def replace_key(path: Path) -> None:
    """Put another key in its place, as a changed Secret does, and wait until the engine has seen it."""
    path.write_bytes(bytes(32))
    # A mounted file is swapped: the directory changes, and is looked at every five seconds.
    path.with_name("another").write_bytes(bytes(32))
    time.sleep(6)


def read_metrics(llm: LLM) -> dict[str, float]:
    """Return the tier's metrics, those with a cause also by ``<name>:<cause>``."""
    metrics: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value"):
            metrics[metric.name] = metrics.get(metric.name, 0) + metric.value
            if "cause" in metric.labels:
                metrics[f"{metric.name}:{metric.labels['cause']}"] = metric.value
    return metrics


if __name__ == "__main__":
    main()
