# SPDX-License-Identifier: Apache-2.0
"""A GPU that only takes time: vLLM's CPU build, whose steps and copies end when those of one H200 would.

Scheduler, connector, CPU tier, I/O workers and volume are the real ones, with asynchronous scheduling as on a GPU. The
forward pass is left out, so answers mean nothing, and the model's KV is small: rates and the CPU tier are scaled by it.
It shows who waits for whom in traffic. It needs processors that nothing else uses.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from e2e.engines import weights

PACED: Final = "KVTIER_BENCH_PACED"
"""In the environment of an engine that is to be paced."""
SHAPE: Final = "paced"
"""Its model."""
_KV_BYTES_PER_TOKEN: Final = 131_072
"""Of the model whose times these are: 8B, in bfloat16."""
_TOKEN_SECONDS, _PAIR_SECONDS = 2.18e-5, 4.68e-10
"""Computing n tokens takes ``_TOKEN_SECONDS * n + _PAIR_SECONDS * n ** 2`` there."""
_LEAST_SECONDS = 0.008
"""A step of decodes."""
_LAUNCH_SECONDS, _CAPTURED_TOKENS = 0.028, 128
"""Launching a step takes so long on the CPU, if it has more tokens than vLLM captured a CUDA graph for."""
_IDLE_SECONDS, _WAKING_SECONDS = 0.4, 0.1
"""After so long without a step, launching the next one takes so much longer."""
_COPIED_BYTES_PER_SECOND = 50e9
"""Between host memory and the GPU."""


def scale() -> float:
    """Return the size of the model's KV as a share of that of the model whose times these are."""
    return weights.kv_bytes_per_token(weights.SHAPES[SHAPE]) / _KV_BYTES_PER_TOKEN


class _Device:
    """Does one step after the other, and in each direction one copy after the other."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.scheduled: Any = None
        """The step that begins with the next forward pass."""
        self._copied: dict[int, float] = {}
        """By job, when its copy ends."""
        self._last = {True: 0.0, False: 0.0}

    def begin_step(self) -> None:
        output, self.scheduled = self.scheduled, None
        if output is None or not output.num_scheduled_tokens:
            return
        cached = output.scheduled_cached_reqs
        before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        seconds = sum(
            _TOKEN_SECONDS * count + _PAIR_SECONDS * ((before[name] + count) ** 2 - before[name] ** 2)
            for name, count in output.num_scheduled_tokens.items()
        )
        now = time.perf_counter()
        launching = _LAUNCH_SECONDS if sum(output.num_scheduled_tokens.values()) > _CAPTURED_TOKENS else 0.0
        launching += _WAKING_SECONDS if launching and now - self.busy_until > _IDLE_SECONDS else 0.0
        self.busy_until = max(now + launching, max(self.busy_until, now) + max(_LEAST_SECONDS, seconds))
        time.sleep(launching)

    def begin_copy(self, job_id: int, seconds: float, *, is_store: bool) -> None:
        """Begin a copy after the steps and the copies that were begun before."""
        begins = max(time.perf_counter(), self.busy_until, self._last[is_store])
        self._last[is_store] = self._copied[job_id] = begins + seconds

    def has_copied(self, job_id: int) -> bool:
        return self._copied[job_id] <= time.perf_counter()

    def wait_for_copy(self, job_id: int) -> None:
        time.sleep(max(0.0, self._copied.get(job_id, 0.0) - time.perf_counter()))

    def end_copy(self, job_id: int) -> None:
        del self._copied[job_id]


class _Done:
    """An event or a stream of a device that has done everything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.record = self.synchronize = self.wait_stream = lambda *_: None
        self.device = "cpu"


def pace() -> None:
    """Pace this engine, where the environment asks for it."""
    if os.environ.get(PACED):
        device = _Device()
        _pace_steps(device)
        _pace_copies(device)


def _pace_steps(device: _Device) -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    runner: Any = GPUModelRunner
    output: Any = AsyncGPUModelRunnerOutput
    platform: Any = CpuPlatform
    execute, make, take = runner.execute_model, output.__init__, output.get_output
    check = platform.check_and_update_config.__func__

    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        device.scheduled = scheduled
        return execute(self, scheduled, *args, **kwargs)

    def forward(self: Any, input_ids: Any = None, *_: Any, **__: Any) -> Any:
        device.begin_step()
        return torch.zeros(input_ids.shape[0], self.model_config.get_hidden_size(), dtype=self.dtype)

    def make_output(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.ends_at = device.busy_until

    def take_output(self: Any) -> Any:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return take(self)

    def check_config(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.current_stream, cuda.stream = _Done, _Done, _Done, nullcontext
    runner.execute_model, runner._model_forward = execute_model, forward  # noqa: SLF001 - vLLM has no public place for the forward pass alone
    output.__init__, output.get_output = make_output, take_output
    platform.check_and_update_config = classmethod(check_config)


def _pace_copies(device: _Device) -> None:
    from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker

    worker: Any = CpuCopyWorker
    transfer = worker._transfer  # noqa: SLF001 - the one method that both directions call

    def copy(self: Any, job_id: int, *args: Any, is_store: bool) -> bool:
        transfer(self, job_id, *args, is_store=is_store)
        made = self._finished[-1]
        seconds = made.transfer_size / scale() / _COPIED_BYTES_PER_SECOND
        device.begin_copy(job_id, seconds, is_store=is_store)
        self._finished[-1] = replace(made, transfer_time=seconds)
        return True

    def get_finished(self: Any) -> list[Any]:
        ended = [result for result in self._finished if device.has_copied(result.job_id)]
        self._finished = [result for result in self._finished if result not in ended]
        for result in ended:
            device.end_copy(result.job_id)
        return ended

    def wait(_: Any, job_ids: set[int]) -> None:
        for job_id in job_ids:
            device.wait_for_copy(job_id)

    worker._transfer, worker.get_finished, worker.wait = copy, get_finished, wait  # noqa: SLF001 - as above
