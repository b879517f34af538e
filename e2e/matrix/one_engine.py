# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in this process, asks it round after round, and returns what it answered and counted.

The process is a fork of one that has imported vLLM and started nothing, because imports take longer than these models.
So blocks reach the next engine only through the volume.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.matrix import shapes
from e2e.matrix.asking import Request
from e2e.matrix.rendering import Rendered, engine_arguments, server_arguments
from e2e.matrix.shapes import VOCABULARY

ANSWER_TOKENS = 3
AT_ONCE_COLD = 8
LOGPROBS = 5
SETTLE_SECONDS = 60.0
QUIET_SECONDS = 2.0
"""Without a further block: then all are written."""
COUNT_SECONDS = 0.3
"""In which an engine that only read tells what it counted."""

_ENGINE: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "kvtier_connector.vllm_adapter.offloading_connector",
)
_COUNTED = (
    "vllm:kvtier_",
    "vllm:prefix_cache",
    "vllm:external_prefix_cache",
    "vllm:num_preemptions",
    "vllm:spec_decode",
)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How an engine is asked."""

    at_once: int = 1
    """Requests that it has at a time."""
    answer_tokens: int = ANSWER_TOKENS
    does_write: bool = False
    """Whether to wait until all that it computed lies on the volume."""


def import_engine(*, device: str) -> None:
    """Import what engines need, once for all that are started from this process."""
    server_arguments()
    for name in (*_ENGINE, f"vllm.v1.worker.{'cpu' if device == 'cpu' else 'gpu'}_worker"):
        importlib.import_module(name)


def run(
    rendered: Rendered, rounds: Mapping[str, Sequence[Request]], *, log: Path, pace: Pace, limit_seconds: float
) -> dict[str, Any]:
    """Ask an engine of its own in a process of its own; return `answers` by round, or `error`.

    Args:
        rendered: what it is started with.
        rounds: what it is asked, by name.
        log: file for what it prints.
        pace: how it is asked.
        limit_seconds: when it is ended.
    """
    context: Any = multiprocessing.get_context(_start_method())
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, rendered, rounds, log, pace))
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


def _start_method() -> str:
    """Return how an engine's process begins: as a fork, unless this process is one of one that has used the GPU."""
    import torch

    has_used = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()  # noqa: SLF001 - nothing public tells
    return "spawn" if has_used else "fork"


def _child(sender: Any, rendered: Rendered, rounds: Mapping[str, Sequence[Request]], log: Path, pace: Pace) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    # The package comes from this checkout, and not from a mount.
    os.environ.update({name: value for name, value in rendered.env.items() if name != "PYTHONPATH"})
    try:
        result = _serve(rendered, rounds, pace)
    except BaseException as error:  # noqa: BLE001  whatever ended it is the result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    sender.send(json.dumps(result))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and of the engine would keep the process.
    os._exit(0)


def _serve(rendered: Rendered, rounds: Mapping[str, Sequence[Request]], pace: Pace) -> dict[str, Any]:
    from vllm import LLM

    began = time.monotonic()
    parsed, loras = engine_arguments(rendered.argv)
    llm = LLM.from_engine_args(parsed)
    config = llm.llm_engine.vllm_config
    result: dict[str, Any] = {
        "block_tokens": config.cache_config.block_size,
        "attention": _backends(llm),
        "answers": {},
        "counts": {},
        "seconds": {"start": round(time.monotonic() - began, 1)},
    }
    before = _counts(llm)
    for name, requests in rounds.items():
        began = time.monotonic()
        answers = []
        size = AT_ONCE_COLD if name == "cold" else pace.at_once
        for first in range(0, len(requests), size):
            answers += _ask(llm, requests[first : first + size], loras, pace.answer_tokens)
        _settle(llm, COUNT_SECONDS)
        after = _counts(llm)
        result["answers"][name] = answers
        result["counts"][name] = {key: value - before.get(key, 0) for key, value in after.items()}
        result["seconds"][name] = round(time.monotonic() - began, 1)
        before = after
    if pace.does_write:
        _settle(llm, QUIET_SECONDS)
        result["written"] = _counts(llm)
    llm.llm_engine.engine_core.shutdown()
    return result


def _backends(llm: Any) -> list[str]:
    """Return the kinds of layers that keep KV, as the engine made them."""
    found = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(layer).__name__ for layer in found})


def _ask(llm: Any, requests: Sequence[Request], loras: Mapping[str, str], answer_tokens: int) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=answer_tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    adapters = [_adapter(request.lora, loras) for request in requests] if loras else None
    outputs = llm.generate(
        [_prompt(request) for request in requests], parameters, use_tqdm=False, lora_request=adapters
    )
    return [
        {
            "tokens": list(output.outputs[0].token_ids)[:ANSWER_TOKENS],
            "logprobs": [
                {str(token): entry.logprob for token, entry in step.items()}
                for step in output.outputs[0].logprobs[:ANSWER_TOKENS]
            ],
            "cached_tokens": output.num_cached_tokens,
            "prompt_tokens": len(output.prompt_token_ids or ()),
        }
        for output in outputs
    ]


def _adapter(name: str, loras: Mapping[str, str]) -> Any:
    """Return an adapter as vLLM's API server names it to the engine."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1 + list(loras).index(name), loras[name]) if name else None


def _prompt(request: Request) -> dict[str, Any]:
    salted = {"cache_salt": request.salt} if request.salt else {}
    if request.embedding is not None:
        return {"prompt_embeds": _embed(request.tokens, request.embedding), **salted}
    pictured = {} if request.image is None else {"multi_modal_data": {"image": _picture(request.image)}}
    return {"prompt_token_ids": list(request.tokens), **pictured, **salted}


def _embed(tokens: Sequence[int], seed: int) -> Any:
    """Return a vector for each token, the same in every process."""
    import torch

    table = torch.randn((VOCABULARY, shapes.LLAMA["hidden_size"]), generator=torch.Generator().manual_seed(seed))
    return table.to(torch.bfloat16)[list(tokens)]


def _picture(seed: int) -> Any:
    """Return a picture of noise, the same in every process."""
    import numpy as np
    from PIL import Image

    side = shapes.PICTURE_SIDE
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def _settle(llm: Any, quiet_seconds: float) -> None:
    """Wait until counters stand still; an idle engine counts the work of its I/O workers in its next step."""
    deadline = time.monotonic() + SETTLE_SECONDS
    last: list[float] = []
    since = time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < quiet_seconds:
        llm.llm_engine.engine_core.engine_core.step_fn()
        counts = _counts(llm)
        moved = [counts.get(f"vllm:kvtier_disk_{name}", 0) for name in ("written_blocks", "read_blocks", "queued_jobs")]
        if moved != last:
            last, since = moved, time.monotonic()
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
