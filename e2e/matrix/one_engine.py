# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in this process, asks it round after round, and returns what it answered and counted.

The process is a fork of one that has imported vLLM and nothing more: imports take longer than these models, and what an
engine computed reaches the next one through the volume only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e.matrix import shapes
from e2e.matrix.asking import Request
from e2e.matrix.rendering import Rendered, engine_arguments
from e2e.matrix.shapes import VOCABULARY

ANSWER_TOKENS = 3
AT_ONCE_COLD = 8
LOGPROBS = 5
SETTLE_SECONDS = 60.0
QUIET_SECONDS = 2.0

_COUNTED = ("vllm:kvtier_", "vllm:prefix_cache", "vllm:external_prefix_cache", "vllm:num_preemptions")


def run(
    rendered: Rendered, rounds: Mapping[str, Sequence[Request]], *, log: Path, at_once: int, limit_seconds: float
) -> dict[str, Any]:
    """Ask an engine of its own in a process of its own; return `answers` by round, or `error`.

    Args:
        rendered: what it is started with.
        rounds: what it is asked, by name.
        log: file for what it prints.
        at_once: how many requests it has at a time.
        limit_seconds: when it is ended.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, rendered, rounds, log, at_once))
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit_seconds):
            return {"error": f"no answer within {limit_seconds:.0f} s"}
        return dict(json.loads(receiver.recv()))
    except EOFError:
        child.join()
        return {"error": f"the engine's process ended with {child.exitcode}"}
    finally:
        if child.is_alive():
            child.join(20)
        if child.is_alive():
            child.kill()
        child.join()


def _child(sender: Any, rendered: Rendered, rounds: Mapping[str, Sequence[Request]], log: Path, at_once: int) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.update(rendered.env)
    try:
        result = _serve(rendered, rounds, at_once)
    except BaseException as error:  # noqa: BLE001  whatever ended it is the result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    sender.send(json.dumps(result))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and of the engine would keep the process.
    os._exit(0)


def _serve(rendered: Rendered, rounds: Mapping[str, Sequence[Request]], at_once: int) -> dict[str, Any]:
    from vllm import LLM

    began = time.process_time()
    llm = LLM.from_engine_args(engine_arguments(rendered.argv))
    config = llm.llm_engine.vllm_config
    result: dict[str, Any] = {
        "start_seconds": round(time.process_time() - began, 1),
        "block_tokens": config.cache_config.block_size,
        "attention": _backends(llm),
        "answers": {},
        "counts": {},
    }
    before = _counts(llm)
    for name, requests in rounds.items():
        answers = []
        pace = AT_ONCE_COLD if name == "cold" else at_once
        for first in range(0, len(requests), pace):
            answers += _ask(llm, requests[first : first + pace])
        _settle(llm)
        after = _counts(llm)
        result["answers"][name] = answers
        result["counts"][name] = {key: value - before.get(key, 0) for key, value in after.items()}
        before = after
    llm.llm_engine.engine_core.shutdown()
    return result


def _backends(llm: Any) -> list[str]:
    """Return the kinds of layers that keep KV, as the engine made them."""
    found = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(layer).__name__ for layer in found})


def _ask(llm: Any, requests: Sequence[Request]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    outputs = llm.generate([_prompt(request) for request in requests], parameters, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs
            ],
            "cached_tokens": output.num_cached_tokens,
            "prompt_tokens": len(output.prompt_token_ids or ()),
        }
        for output in outputs
    ]


def _prompt(request: Request) -> dict[str, Any]:
    salted = {"cache_salt": request.salt} if request.salt else {}
    if request.is_embedded:
        return {"prompt_embeds": _embed(request.tokens), **salted}
    return {"prompt_token_ids": list(request.tokens), **salted}


def _embed(tokens: Sequence[int]) -> Any:
    """Return a vector for each token, the same in every process."""
    import torch

    table = torch.randn((VOCABULARY, shapes.LLAMA["hidden_size"]), generator=torch.Generator().manual_seed(3))
    return table.to(torch.bfloat16)[list(tokens)]


def _settle(llm: Any) -> None:
    """Wait until nothing more is written: an engine that rests tells in its next step what its movers did."""
    deadline = time.monotonic() + SETTLE_SECONDS
    last, since = -1.0, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < QUIET_SECONDS:
        llm.llm_engine.engine_core.engine_core.step_fn()
        counts = _counts(llm)
        written = counts.get("vllm:kvtier_disk_written_blocks", 0)
        if written != last or counts.get("vllm:kvtier_disk_queued_jobs", 0):
            last, since = written, time.monotonic()
        time.sleep(0.05)


def _counts(llm: Any) -> dict[str, float]:
    """Return the counters, those with a cause by ``<name>:<cause>`` too."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(_COUNTED) and hasattr(metric, "value"):
            found[metric.name] = found.get(metric.name, 0) + metric.value
            if "cause" in metric.labels:
                found[f"{metric.name}:{metric.labels['cause']}"] = metric.value
    return found
