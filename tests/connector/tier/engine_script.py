# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine with the disk tier, asks it for one prompt in the named ways, prints the answers as JSON.

A process of its own for each engine: only a new process proves that nothing but the volume carried the blocks over.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from engine_under_test import ask, make_llm, read_metrics, tell
from vllm.config.kv_events import KVEventsConfig

PROMPT = [(7 * position * position + 13 * position) % 1900 + 100 for position in range(2000)]
WARM_UP = list(range(200, 300))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True, help="holds the model, and the volume")
    parser.add_argument("--config", type=Path, required=True, help="the connector's document")
    parser.add_argument("--blocks", type=int, default=0, help="wait until the volume has so many block files")
    parser.add_argument("--salt", default="", help="cache salt of the prompts")
    parser.add_argument("--events", type=int, help="port to publish KV events on")
    parser.add_argument(
        "asks",
        nargs="+",
        help="labels; 'reset' before one empties the GPU's cache, 'forget' the CPU tier too",
    )
    options = parser.parse_args()

    endpoint = f"tcp://*:{options.events}"
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv@pod@model")
    publishes = options.events is not None
    llm = make_llm(
        options.directory / "model",
        options.config,
        dtype="bfloat16",
        max_model_len=4096,
        cpu_bytes=512 << 20,
        eviction_policy="lru",
        offload_prompt_only=True,
        engine={"kv_events_config": events} if publishes else None,
        self_describing_kv_events=publishes,
    )

    def timed(prompt: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        (answer,) = ask(llm, [prompt], salt=options.salt)
        return {"seconds": round(time.perf_counter() - started, 3), **answer}

    timed(WARM_UP)
    answers = {}
    for label in options.asks:
        if label in {"reset", "forget"}:
            assert llm.reset_prefix_cache(reset_connector=label == "forget")
            if label == "forget":
                # The engine looks at its weights with the first step that computes, and reads nothing before.
                timed(WARM_UP)
        else:
            answers[label] = timed(PROMPT)
    deadline = time.monotonic() + 60
    while len(list(options.directory.rglob("*.kvb"))) < options.blocks:
        if time.monotonic() > deadline:
            sys.exit(f"the volume has fewer than {options.blocks} blocks after a minute")
        time.sleep(0.05)
    tell({**answers, "metrics": read_metrics(llm)})


if __name__ == "__main__":
    main()
