# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine of the scripts that tests run in processes of their own: one with the disk tier, asked greedily."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A fifth of what importing vLLM takes goes into looking for garbage among a million objects that stay.
gc.disable()

from engine_process import RESULT, transfer_config  # noqa: E402 - see above
from vllm import LLM, SamplingParams  # noqa: E402 - see above
from vllm.config import KVTransferConfig  # noqa: E402 - see above
from vllm.lora.request import LoRARequest  # noqa: E402 - see above

CHUNK_TOKENS = 128
WARM_UP = list(range(200, 300))
"""A prompt without a whole chunk."""
PATIENCE_SECONDS = 300.0


def make_llm(  # noqa: PLR0913 - keywords
    model: Path,
    config_file: Path,
    *,
    dtype: str,
    max_model_len: int,
    cpu_bytes: int,
    engine: dict[str, Any] | None = None,
    **offloading: Any,
) -> LLM:
    """Start an engine and wait until it uses the volume, or compares what it computes with what the volume has.

    ``engine`` are further settings of it, and ``offloading`` of its connector.
    """
    started = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=0,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **(engine or {}),
        kv_transfer_config=KVTransferConfig(
            **transfer_config(config_file, cpu_bytes_to_use=cpu_bytes, block_size=CHUNK_TOKENS, **offloading)
        ),
    )
    gc.freeze()
    gc.enable()

    def is_attached() -> bool:
        # It tells with a step.
        ask(started, [WARM_UP])
        metrics = read_metrics(started)
        return 1 in {metrics.get("vllm:kvtier_disk_active"), metrics.get("vllm:kvtier_disk_release")}

    wait_until(is_attached, "the engine uses the volume")
    return started


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition; end the process if it never holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(0.02)


def ask(
    llm: LLM, prompts: list[list[int]], *, salt: str = "", reads_cache: bool = True, lora: LoRARequest | None = None
) -> list[dict[str, Any]]:
    """Return, for each prompt, the answer and how many of the prompt's tokens came from a cache."""
    salted = {"cache_salt": salt} if salt else {}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt, **salted} for prompt in prompts],
        SamplingParams(
            max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=not reads_cache
        ),
        use_tqdm=False,
        lora_request=lora,
    )
    return [
        {"tokens": list(output.outputs[0].token_ids), "cached_tokens": output.num_cached_tokens} for output in outputs
    ]


def read_metrics(llm: LLM) -> dict[str, float]:
    """Return the tier's metrics and the count of preemptions, those with a cause also by ``<name>:<cause>``."""
    metrics: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(("vllm:kvtier_", "vllm:num_preemptions")) and hasattr(metric, "value"):
            metrics[metric.name] = metrics.get(metric.name, 0) + metric.value
            if "cause" in metric.labels:
                metrics[f"{metric.name}:{metric.labels['cause']}"] = metric.value
    return metrics


def tell(result: dict[str, Any]) -> None:
    sys.stdout.write(RESULT + json.dumps(result) + "\n")
    sys.stdout.flush()
