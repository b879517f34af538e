# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: reads commands as JSON lines, answers each with one JSON line.

A process for each engine, because only a new process proves that nothing but the volume carried the blocks over.
Times are taken here, beside the engine's client, from handing a request over to its first and its last token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from e2e.bench.models import joined_ids, prompt_ids
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM


def main() -> None:
    """Serve until the commands end."""
    # Whatever vLLM prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asyncio.run(_serve(settings, answers))


async def _serve(settings: dict[str, Any], answers: TextIO) -> None:
    began = time.perf_counter()
    transfer = settings["transfer"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **settings["engine"], kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer)
        )
    )
    blocks = engine.vllm_config.cache_config.num_gpu_blocks
    layout = await engine.collective_rpc("describe_kv_cache")
    ready = {"seconds": time.perf_counter() - began, "gpu_blocks": blocks, "layout": layout}
    answers.write(json.dumps(ready) + "\n")
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["do"] == "run":
            answer: Any = await _run(engine, command, settings["vocabulary"])
        elif command["do"] == "call":
            answer = await engine.collective_rpc(command["method"], args=tuple(command["arguments"]))
        elif command["do"] == "reset":
            answer = await _reset(engine, with_connector=command["connector"])
        else:
            break
        answers.write(json.dumps(answer) + "\n")
    engine.shutdown()


async def _reset(engine: AsyncLLM, *, with_connector: bool) -> bool:
    # A block is free only when its offload has been reported, which takes a few steps after the last token.
    for _ in range(200):
        if await engine.reset_prefix_cache(reset_connector=with_connector):
            return True
        await asyncio.sleep(0.05)
    return False


async def _run(engine: AsyncLLM, command: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Submit every request at its time, or so many at a time in their order, and report each."""
    requests = command["requests"]
    prompts = [_prompt(request, vocabulary) for request in requests]
    at_a_time = asyncio.Semaphore(command["at_a_time"] or len(prompts))
    is_answered = [asyncio.Event() for _ in prompts]

    async def ask(number: int) -> dict[str, Any]:
        request = requests[number]
        if (wait := request.get("start", 0.0) - (time.perf_counter() - began)) > 0:
            await asyncio.sleep(wait)
        async with at_a_time:
            if (earlier := request.get("after")) is not None:
                await is_answered[earlier].wait()
            parameters = SamplingParams(
                max_tokens=request.get("output_tokens", command["output_tokens"]),
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
            )
            submitted = time.perf_counter()
            first = last = submitted
            cached = 0
            output: list[int] = []
            async for answer in engine.generate(
                TokensPrompt(prompt_token_ids=prompts[number]), parameters, f"{command['name']}-{number}"
            ):
                last = time.perf_counter()
                if not output:
                    first, cached = last, answer.num_cached_tokens or 0
                output = list(answer.outputs[0].token_ids)
            is_answered[number].set()
        return {
            **request,
            "tokens": len(prompts[number]),
            "first": first - submitted,
            "at": first - began,
            "seconds": last - submitted,
            "cached": cached,
            "output": output,
        }

    began = time.perf_counter()
    results = await asyncio.gather(*(ask(number) for number in range(len(prompts))))
    return {"seconds": time.perf_counter() - began, "began": began, "requests": results}


def _prompt(request: dict[str, Any], vocabulary: int) -> list[int]:
    if "parts" in request:
        return joined_ids(request["parts"], vocabulary)
    return prompt_ids(request["seed"], request["tokens"], vocabulary)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
