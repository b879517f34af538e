# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM engines, each in a process of its own.

The process is a fork of one that has imported vLLM and started nothing, because imports take longer than these models.
So blocks reach the next engine only through what its connector keeps.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from e2e.engines.process import EngineProcess
from e2e.engines.weights import PICTURE_SIDE, SEEDS_WEIGHTS, SHAPES, VOCABULARY, seed_weights
from e2e.matrix.asking import Request
from e2e.matrix.rendering import Rendered

ANSWER_TOKENS = 3
"""Tokens of an answer that are kept and compared."""
LOGPROBS = 5
SETTLE_SECONDS = 60.0
QUIET_SECONDS = 2.0
"""Without a further block: then all are written."""
COUNT_SECONDS = 0.3
"""In which an engine that only read tells what it counted."""
END_SECONDS = 20.0

_IMPORTED: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "kvtier_connector.vllm_adapter.offloading_connector",
)
_COUNTED = ("vllm:kvtier_", "vllm:nixl_", "vllm:prefix_cache", "vllm:external_prefix_cache", "vllm:num_preemptions")


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """The first tokens of an answer, and the log-probabilities of the likeliest at each."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    prompt_tokens: int
    transfer: Mapping[str, Any] | None = None
    """Where another engine finds the blocks, if the request asked for it."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Answers to some requests."""

    answers: list[ScoredAnswer]
    seconds: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    """By how much vLLM's counters rose, those with a cause by ``<name>:<cause>`` too."""


def prepare(*, device: str) -> str:
    """Import what engines need, once for all that are started from this process; return the version of vLLM."""
    # Before torch is imported: one thread, because these models are smaller than what it costs to share them.
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    if device == "cuda":
        # NVLink multicast is not everywhere; and both engines of a class are to choose the same kernels.
        os.environ.update(NCCL_NVLS_ENABLE="0", VLLM_ALLREDUCE_USE_SYMM_MEM="0", TRITON_CACHE_AUTOTUNING="1")
    import vllm

    _server_arguments()
    for name in (*_IMPORTED, f"vllm.v1.worker.{'cpu' if device == 'cpu' else 'gpu'}_worker"):
        importlib.import_module(name)
    return str(vllm.__version__)


class ForkedEngine(EngineProcess):
    """One engine. Use it from one thread, as a context manager; each call may raise EngineEnded."""

    def __init__(self, rendered: Rendered, log: Path, *, limit_seconds: float, plugin: str = "") -> None:
        """Start the engine, after `register` of the module `plugin`; the limit is of the start and of each call."""
        import torch

        method = "spawn" if torch.cuda.is_initialized() else "fork"
        super().__init__(_Inside, rendered, plugin, method=method, log=log, limit_seconds=limit_seconds)

    def ask(self, requests: Sequence[Request], *, at_once: int = 1, answer_tokens: int = ANSWER_TOKENS) -> Round:
        """Ask so many requests at a time."""
        return Round(**self.call("ask", list(requests), at_once, answer_tokens))

    def settle(self) -> None:
        """Wait until all that was computed lies on the volume."""
        self.call("settle", QUIET_SECONDS)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, and leave what the connector keeps."""
        self.call("forget")

    def __exit__(self, *_: object) -> None:
        """End it in order, and what is left of it by force."""
        self._pipe.close()
        self._process.join(END_SECONDS)
        self.kill()


class _Inside:
    """The engine, in its own process."""

    def __init__(self, rendered: Rendered, plugin: str) -> None:
        os.environ.update({**rendered.env, SEEDS_WEIGHTS: "1"})
        seed_weights()
        from kvtier_connector.cascade import lookup
        from kvtier_connector.cascade.rates import Rates, Way
        from kvtier_connector.cascade.split import Splits

        # These models are computed sooner than any block is looked up and read, and reading is to be seen.
        ways = {True: Way.SPLIT, False: Way.LOAD}
        Rates.choose = lambda *_, may_split=False, **__: ways[may_split]  # type: ignore[method-assign]  # see above
        lookup.LEAST_WAIT_SECONDS = lookup.MOST_WAIT_SECONDS
        Splits.join_seconds = 0.0
        if plugin:
            importlib.import_module(plugin).register()
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # As vLLM's API server reads a command line.
        cli_args = _server_arguments()
        parsed = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(list(rendered.argv))
        cli_args.validate_parsed_serve_args(parsed)
        self._loras = {module.name: module.path for module in parsed.lora_modules or ()}
        self._llm: Any = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
        self.facts: dict[str, Any] = {}

    def ask(self, requests: Sequence[Request], at_once: int, answer_tokens: int) -> dict[str, Any]:
        before = self._counts()
        began = time.perf_counter()
        answers: list[ScoredAnswer] = []
        for first in range(0, len(requests), at_once):
            answers += self._generate(requests[first : first + at_once], answer_tokens)
        seconds = time.perf_counter() - began
        self.settle(COUNT_SECONDS)
        counts = {key: value - before.get(key, 0) for key, value in self._counts().items()}
        return {"answers": answers, "seconds": seconds, "counts": counts}

    def settle(self, quiet_seconds: float) -> None:
        """Wait until counters stand still; an idle engine counts the work of its I/O workers in its next step."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last: list[float] = []
        since = time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < quiet_seconds:
            self._llm.llm_engine.engine_core.engine_core.step_fn()
            counts = self._counts()
            moved = [
                counts.get(f"vllm:kvtier_disk_{name}", 0) for name in ("written_blocks", "read_blocks", "queued_jobs")
            ]
            if moved != last:
                last, since = moved, time.monotonic()
            time.sleep(0.05)

    def forget(self) -> None:
        self.settle(QUIET_SECONDS)
        for _ in range(20):
            # Blocks that are being stored are free after a step or two.
            self._generate([Request(tokens=(5,) * 8)], 2)
            if self._llm.reset_prefix_cache():
                return
            time.sleep(0.2)
        raise RuntimeError("the prefix cache cannot be emptied: blocks are still in use")

    def sleep(self) -> None:
        self._llm.sleep(level=2)
        self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights")
        self._llm.wake_up(tags=["kv_cache"])

    def shut_down(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(self, requests: Sequence[Request], answer_tokens: int) -> list[ScoredAnswer]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=answer_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                logprobs=LOGPROBS,
                extra_args={"kv_transfer_params": dict(request.transfer)} if request.transfer else None,
            )
            for request in requests
        ]
        outputs = self._llm.generate(
            [_prompt(request) for request in requests],
            parameters,
            use_tqdm=False,
            lora_request=[self._adapter(request.lora) for request in requests] if self._loras else None,
        )
        return [
            ScoredAnswer(
                tokens=list(output.outputs[0].token_ids)[:ANSWER_TOKENS],
                logprobs=[
                    {token: entry.logprob for token, entry in step.items()}
                    for step in output.outputs[0].logprobs[:ANSWER_TOKENS]
                ],
                cached_tokens=output.num_cached_tokens or 0,
                prompt_tokens=len(output.prompt_token_ids or ()),
                transfer=output.kv_transfer_params,
            )
            for output in outputs
        ]

    def _adapter(self, name: str) -> Any:
        """Return an adapter as vLLM's API server names it to the engine."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, 1 + list(self._loras).index(name), self._loras[name]) if name else None

    def _counts(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if not metric.name.startswith(_COUNTED):
                continue
            value = getattr(metric, "value", None)
            value = getattr(metric, "sum", None) if value is None else value
            if value is not None:
                found[metric.name] = found.get(metric.name, 0) + value
                if "cause" in metric.labels:
                    found[f"{metric.name}:{metric.labels['cause']}"] = value
        return found


def _server_arguments() -> Any:
    """Return vLLM's module for the arguments of its API server."""
    try:
        return importlib.import_module("vllm.entrypoints.common.cli_args")
    except ImportError:
        # Before 0.33.
        return importlib.import_module("vllm.entrypoints.launchers.cli_args")


def _prompt(request: Request) -> dict[str, Any]:
    salted = {"cache_salt": request.salt} if request.salt else {}
    if request.embedding is not None:
        return {"prompt_embeds": _embed(request.tokens, request.embedding), **salted}
    pictured = {} if request.image is None else {"multi_modal_data": {"image": _picture(request.image)}}
    return {"prompt_token_ids": list(request.tokens), **pictured, **salted}


def _embed(tokens: Sequence[int], seed: int) -> Any:
    """Return a vector for each token, the same in every process."""
    import torch

    table = torch.randn((VOCABULARY, SHAPES["llama"]["hidden_size"]), generator=torch.Generator().manual_seed(seed))
    return table.to(torch.bfloat16)[list(tokens)]


def _picture(seed: int) -> Any:
    """Return a picture of noise, the same in every process."""
    import numpy as np
    from PIL import Image

    shape = (PICTURE_SIDE, PICTURE_SIDE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
