# SPDX-License-Identifier: Apache-2.0
"""The engine of the traffic benchmark: vLLM's asynchronous engine, which answers many requests at their own times.

Times are taken in the engine's process, beside its client: from handing a request over to its first and its last token.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from e2e.bench.cells import StepCounts
from e2e.engines.process import EngineEnded, EngineProcess

START_LIMIT_SECONDS = 300.0
FIRST_TOKEN = 3
"""Below are the special tokens."""
_COUNTED_SECONDS = 0.1
"""vLLM's figures of the last step come a moment after its tokens."""
Requests = Sequence[Mapping[str, Any]]
_Result = TypeVar("_Result")


class BenchEngine(EngineProcess):
    """One engine. It ends at once, as in a crash: what the volume has by then is all that the next one finds."""

    def __init__(self, name: str, settings: Mapping[str, Any], directory: Path) -> None:
        """Start it with `settings`: the engine's arguments, `transfer` and `vocabulary`; logs go to the directory."""
        log = directory / f"{name}.log"
        super().__init__(_Inside, settings, method="spawn", log=log, limit_seconds=START_LIMIT_SECONDS)

    def run(self, requests: Requests, at_a_time: int, *, until: float, limit_seconds: float) -> dict[str, Any]:
        """Submit requests, all at once unless told how many at a time; return those answered `until` some second.

        Each has the `parts` of its prompt. It may also say how many `output_tokens` it wants, at which second to
        `start`, and the number of the one it comes `after`, and after which `gap` in seconds.
        """
        return dict(self.call("run", list(requests), at_a_time, until, limit_seconds=limit_seconds))

    def forget(self, *, cpu_tier: bool = False) -> None:
        """Empty the engine's own prefix cache, and the CPU tier too if asked; the volume keeps what it has."""
        if not self.call("reset", cpu_tier, limit_seconds=60.0):
            raise EngineEnded("the prefix cache cannot be emptied: blocks are still in use")


def joined_ids(parts: Iterable[tuple[int, int]], vocabulary: int) -> list[int]:
    """Return a prompt of parts, each a seed and a number of tokens: prompts that begin with equal parts share a prefix.

    One token that all prompts share ends it, so that parts of whole blocks can be answered from the cache whole.
    """
    return [*(token for seed, tokens in parts for token in _part_ids(seed, tokens, vocabulary)), FIRST_TOKEN]


@functools.lru_cache(maxsize=4096)
def _part_ids(seed: int, tokens: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(FIRST_TOKEN, vocabulary), k=tokens))


class _Inside:
    """The engine, in its own process; its event loop runs in a thread, also between calls."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._vocabulary = settings["vocabulary"]
        self._requests = 0
        self._counts = StepCounts()
        began = time.perf_counter()
        self._engine: Any = self._wait(self._start(settings))
        gc.freeze()  # as vLLM's server does, so that no collection stops requests for half a second
        blocks = self._engine.vllm_config.cache_config.num_gpu_blocks
        self.facts = {"seconds": time.perf_counter() - began, "gpu_blocks": blocks}

    async def _start(self, settings: Mapping[str, Any]) -> Any:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = KVTransferConfig(**settings["transfer"]) if settings["transfer"] else None
        arguments = AsyncEngineArgs(**settings["engine"], kv_transfer_config=transfer)
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: self._counts])

    def _wait(self, action: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result()

    def run(self, requests: Requests, at_a_time: int, until: float) -> dict[str, Any]:
        return self._wait(self._run(requests, at_a_time, until))

    def reset(self, with_connector: bool) -> bool:
        return self._wait(self._reset(with_connector))

    def shut_down(self) -> None:
        self._engine.shutdown()

    async def _reset(self, with_connector: bool) -> bool:
        # A block is free only when its offload has been reported, which takes a few steps after the last token.
        for _ in range(200):
            if await self._engine.reset_prefix_cache(reset_connector=with_connector):
                return True
            await asyncio.sleep(0.05)
        return False

    async def _run(self, requests: Requests, at_a_time: int, until: float) -> dict[str, Any]:
        """Submit every request at its time, or so many at a time in their order, and report each."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [joined_ids(request["parts"], self._vocabulary) for request in requests]
        slots = asyncio.Semaphore(at_a_time or len(prompts))
        is_answered = [asyncio.Event() for _ in prompts]

        async def ask(number: int) -> dict[str, Any]:
            request = requests[number]
            if (wait := request.get("start", 0.0) - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(wait)
            async with slots:
                if (earlier := request.get("after")) is not None:
                    await is_answered[earlier].wait()
                    await asyncio.sleep(request.get("gap", 0.0))
                parameters = SamplingParams(
                    max_tokens=request.get("output_tokens", 1), temperature=0.0, ignore_eos=True, detokenize=False
                )
                self._requests += 1
                prompt = TokensPrompt(prompt_token_ids=prompts[number])
                submitted = time.perf_counter()
                first = last = submitted
                cached = 0
                output: list[int] = []
                async for answer in self._engine.generate(prompt, parameters, str(self._requests)):
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
        before = vars(self._counts).copy()
        tasks = [asyncio.create_task(ask(number)) for number in range(len(prompts))]
        await asyncio.wait(tasks, timeout=until or None)
        seconds = time.perf_counter() - began
        await asyncio.sleep(_COUNTED_SECONDS)
        counts = {name: count - before[name] for name, count in vars(self._counts).items()}
        answered = [task.result() for task in tasks if task.done()]
        return {"seconds": seconds, "began": began, "counts": counts, "requests": answered}
