# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: the parent sends commands through a pipe, the process answers each.

A new process proves that only the volume carried the blocks over. Times are taken in the engine's process, beside its
client: from handing a request over to its first and its last token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Self

from e2e.bench import models

from kvtier_connector.pod_tools.shm import clear_stale_regions

START_LIMIT_SECONDS = 300.0
CLOSE_LIMIT_SECONDS = 40.0
LOG_LINES_SHOWN = 30


class EngineFailed(Exception):
    """The engine's process ended, or did not answer in time; the message ends with its log."""


class BenchEngine:
    """One engine; a context manager that ends the process and those it started. One thread."""

    def __init__(self, name: str, settings: Mapping[str, Any], environment: Mapping[str, str], directory: Path) -> None:
        """Start the process and wait until the engine serves.

        Args:
            name: For messages and the names of its files.
            settings: The engine's arguments, `transfer`, `seeds_weights` and `vocabulary`.
            environment: Of the process.
            directory: For the settings and the log.

        Raises:
            EngineFailed: it does not start.
        """
        self.name = name
        clear_stale_regions()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        plugin = directory / "plugin"
        models.offer_plugin(plugin)
        made = {**environment, "PYTHONPATH": os.pathsep.join([str(plugin), environment["PYTHONPATH"]])}
        if settings["seeds_weights"]:
            made[models.SEEDS_WEIGHTS] = "1"
        self._log = directory / f"{name}.log"
        self._pipe, theirs = Pipe()
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __name__, str(path), str(theirs.fileno())],
                stdout=log,
                stderr=log,
                env=made,
                pass_fds=(theirs.fileno(),),
                # So that it and its children can be ended together.
                start_new_session=True,
            )
        try:
            self.facts: dict[str, Any] = self._answer(START_LIMIT_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        output_tokens: int = 1,
        at_a_time: int = 0,
        limit_seconds: float = 300.0,
    ) -> dict[str, Any]:
        """Submit requests; all at once unless told how many at a time.

        Each has the `parts` of its prompt. It may also say how many `output_tokens` it wants, at which second to
        `start`, and the number of the one it comes `after`.
        """
        asked = {"requests": list(requests), "output_tokens": output_tokens, "at_a_time": at_a_time}
        return dict(self._ask({"do": "run", "name": f"r{time.monotonic_ns()}", **asked}, limit_seconds))

    def forget(self, *, cpu_tier: bool = False) -> None:
        """Empty the engine's own prefix cache, and the CPU tier too if asked; the volume keeps what it has."""
        if not self._ask({"do": "reset", "connector": cpu_tier}, 60.0):
            raise EngineFailed(f"{self.name}: the prefix cache cannot be emptied: blocks are still in use")

    def close(self) -> None:
        """End the engine at once, as a crash would: what the volume has by now is all that the next one finds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        # Freeing pinned and GPU memory takes its children a while, and the next engine needs it.
        deadline = time.monotonic() + CLOSE_LIMIT_SECONDS
        while _is_group_alive(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        clear_stale_regions()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine."""
        self.close()

    def _ask(self, command: Mapping[str, Any], limit_seconds: float) -> Any:
        try:
            self._pipe.send(command)
        except OSError as error:
            raise EngineFailed(f"{self.name}: ended\n{self._tail()}") from error
        return self._answer(limit_seconds)

    def _answer(self, limit_seconds: float) -> Any:
        deadline = time.monotonic() + limit_seconds
        while not self._pipe.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
            # A child may hold the pipe open after the process itself is gone, so its end alone says nothing.
            if self._process.poll() is not None:
                raise EngineFailed(f"{self.name}: ended with {self._process.returncode}\n{self._tail()}")
            if time.monotonic() >= deadline:
                raise EngineFailed(f"{self.name}: no answer in {limit_seconds:.0f} s\n{self._tail()}")
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise EngineFailed(f"{self.name}: ended\n{self._tail()}") from None

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


def _is_group_alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold spaces; after it come state, parent and process group.
            state, _, found = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False


def main() -> None:
    """Serve until the commands end."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asyncio.run(_serve(settings, Connection(int(sys.argv[2]))))


async def _serve(settings: dict[str, Any], pipe: Connection) -> None:
    began = time.perf_counter()
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = settings["transfer"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **settings["engine"], kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer)
        )
    )
    blocks = engine.vllm_config.cache_config.num_gpu_blocks
    pipe.send({"seconds": time.perf_counter() - began, "gpu_blocks": blocks})
    with contextlib.suppress(EOFError):
        while True:
            command = await asyncio.to_thread(pipe.recv)
            if command["do"] == "run":
                answer: Any = await _run(engine, command, settings["vocabulary"])
            else:
                answer = await _reset(engine, with_connector=command["connector"])
            pipe.send(answer)
    engine.shutdown()


async def _reset(engine: Any, *, with_connector: bool) -> bool:
    # A block is free only when its offload has been reported, which takes a few steps after the last token.
    for _ in range(200):
        if await engine.reset_prefix_cache(reset_connector=with_connector):
            return True
        await asyncio.sleep(0.05)
    return False


async def _run(engine: Any, command: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Submit every request at its time, or so many at a time in their order, and report each."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    requests = command["requests"]
    prompts = [models.joined_ids(request["parts"], vocabulary) for request in requests]
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


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
