# SPDX-License-Identifier: Apache-2.0
"""The classes of models and of requests that the matrix runs: what the engine is, what it is asked, what must hold.

Pure data. A class that vLLM's CPU build cannot run names what it needs; the same script runs it on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from e2e.matrix import shapes
from e2e.matrix.shapes import Shape

CHUNK_TOKENS: Final = 128
GPU_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, kw_only=True)
class ModelClass:
    """One row of the matrix."""

    name: str
    title: str
    shape: Shape
    gpu_shape: Shape | None = None
    """Shape for a GPU, if another."""
    args: tuple[str, ...] = ()
    """Flags of both engines."""
    gpu_args: tuple[str, ...] = ()
    """Flags beside those, on a GPU."""
    reader_args: tuple[str, ...] = ()
    """Flags of the engine that reads, beside those."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the tier, beside those of all classes."""
    asks: str = "plain"
    """How prompts are asked: plain, salted, embedded, lora or image."""
    loras: tuple[str, ...] = ()
    """Names of adapters; the first one is written anew at the end."""
    pair_tokens: int = 1200
    """Of each of two prompts with two thirds in common."""
    at_once: int = 1
    """Requests that the reader has at a time."""
    reader_tokens: int = 0
    """Tokens of the reader's answers, where they are to be longer than those that are compared."""
    must_preempt: bool = False
    """Whether the reader is to run out of blocks while it answers."""
    ranks: tuple[int, int] = (1, 1)
    """Tensor parallelism of the engine that writes and of the one that reads."""
    of: str = ""
    """Class whose first engine wrote what this one reads; empty for one of its own."""
    is_plain: bool = False
    """Whether it is another class without what the operator sets, to compare with."""
    draft: Shape | None = None
    """Of a draft model."""
    draft_method: str = "draft_model"
    """As vLLM names it: draft_model or eagle."""
    cpu_verdict: str = ""
    """Verdict on the CPU build where that is not "works"."""
    needs: str = ""
    """Feature that the CPU build lacks; empty if the class runs there."""

    @property
    def is_drafting(self) -> bool:
        """Whether tokens of an answer are guessed, and checked several at a time."""
        return self.draft is not None or any(flag.startswith("--speculative-config") for flag in self.args)

    @property
    def is_eagle(self) -> bool:
        """Whether vLLM computes the last block of a hit again: what drafts looks at what the model computed there."""
        return self.draft_method == "eagle" or any('"method":"mtp"' in flag for flag in self.args)


def _chunks(tokens: int) -> Mapping[str, Any]:
    return {"disk": {"blockTokens": tokens, "admission": {"costAware": False}}}


_SMALL: Final = _chunks(CHUNK_TOKENS)
_CANONICAL: Final = {"disk": {**_SMALL["disk"], "canonicalLayout": True}}
_SMALL_STEPS: Final = ("--max-num-batched-tokens=160", "--max-num-seqs=16")
_NO_FLASHINFER: Final = ("--gdn-prefill-backend=triton",)
_STATES: Final[dict[str, Any]] = {"pair_tokens": 3600}
"""Longer than a step."""

CLASSES: Final[tuple[ModelClass, ...]] = (
    ModelClass(name="dense", title="Dense (Llama)", shape=shapes.LLAMA, spec=_SMALL),
    ModelClass(name="gqa", title="Grouped-query attention (Qwen3)", shape=shapes.GQA, spec=_SMALL),
    ModelClass(
        name="mla",
        title="MLA (DeepSeek-V2)",
        shape=shapes.MLA,
        gpu_shape=shapes.MLA_ON_GPU,
        spec=_SMALL,
        # vLLM computes MLA wrongly upon a cached prefix there, and switches prefix caching off.
        cpu_verdict="works without disk",
    ),
    ModelClass(name="moe", title="Mixture of experts (Qwen3-MoE)", shape=shapes.MOE, spec=_SMALL),
    ModelClass(name="gemma3", title="Sliding window (Gemma-3)", shape=shapes.GEMMA_3, spec=_SMALL),
    ModelClass(
        name="gemma4",
        title="Sliding window, and larger heads in the layers without one (Gemma-4)",
        shape=shapes.GEMMA_4,
        spec={"disk": {"admission": {"costAware": False}}},
    ),
    ModelClass(
        name="cohere2_moe",
        title="Sliding window of a block and one token (Cohere2-MoE)",
        shape=shapes.COHERE_2_MOE,
        spec=_SMALL,
    ),
    ModelClass(name="gpt_oss", title="Sliding window and attention sinks (gpt-oss)", shape=shapes.GPT_OSS, spec=_SMALL),
    ModelClass(
        name="qwen3_next",
        title="Gated delta net (Qwen3-Next)",
        shape=shapes.QWEN3_NEXT,
        gpu_args=_NO_FLASHINFER,
        **_STATES,
    ),
    ModelClass(
        name="qwen3_next_steps",
        title="Qwen3-Next, `--max-num-batched-tokens=2048` in `engine.args`",
        shape=shapes.QWEN3_NEXT,
        args=("--max-num-batched-tokens=2048",),
        gpu_args=_NO_FLASHINFER,
        **_STATES,
    ),
    *(
        ModelClass(
            name=f"{name}_plain",
            title=f"{title}, windows and states as vLLM keeps them by itself",
            shape=shape,
            args=("--prefix-cache-retention-interval=0",),
            gpu_args=_NO_FLASHINFER if shape is shapes.QWEN3_NEXT else (),
            is_plain=True,
            **more,
        )
        for name, title, shape, more in (
            ("gemma3", "Gemma-3", shapes.GEMMA_3, {"spec": _SMALL}),
            ("gpt_oss", "gpt-oss", shapes.GPT_OSS, {"spec": _SMALL}),
            ("qwen3_next", "Qwen3-Next", shapes.QWEN3_NEXT, _STATES),
        )
    ),
    ModelClass(name="bamba", title="Mamba-2 hybrid (Bamba)", shape=shapes.BAMBA, **_STATES),
    ModelClass(name="granite4", title="Mamba-2 hybrid with experts (Granite-4)", shape=shapes.GRANITE_4, **_STATES),
    ModelClass(name="falcon_h1", title="Attention beside Mamba-2 (Falcon-H1)", shape=shapes.FALCON_H1, **_STATES),
    ModelClass(name="jamba", title="Mamba-1 hybrid with experts (Jamba)", shape=shapes.JAMBA, **_STATES),
    ModelClass(name="whisper", title="Encoder-decoder (Whisper)", shape=shapes.WHISPER, spec=_SMALL),
    ModelClass(
        name="preempted",
        title="Dense, 16 requests at once in a KV cache of 40 blocks",
        shape=shapes.LLAMA,
        spec=_SMALL,
        of="dense",
        reader_args=("--num-gpu-blocks-override=40",),
        at_once=16,
        reader_tokens=140,
        must_preempt=True,
    ),
    ModelClass(
        name="small_prefill",
        title="Dense, prompts computed in pieces of 160 tokens",
        shape=shapes.LLAMA,
        spec=_SMALL,
        args=_SMALL_STEPS,
    ),
    ModelClass(
        name="more_ranks",
        title="Dense, written at tensorParallel 1 and read at 2 (`disk.canonicalLayout`)",
        shape=shapes.LLAMA,
        spec=_CANONICAL,
        ranks=(1, 2),
    ),
    ModelClass(
        name="fewer_ranks",
        title="Grouped-query attention, written at tensorParallel 2 and read at 1 (`disk.canonicalLayout`)",
        shape=shapes.GQA,
        spec=_CANONICAL,
        ranks=(2, 1),
    ),
    ModelClass(
        name="salted",
        title="Dense, cache salts: another salt misses",
        shape=shapes.LLAMA,
        spec=_SMALL,
        asks="salted",
    ),
    ModelClass(
        name="lora",
        title="Dense, two adapters (LoRA) and none: others miss, one that was rewritten too",
        shape=shapes.LLAMA,
        spec=_SMALL,
        asks="lora",
        loras=("x", "y"),
    ),
    ModelClass(
        name="image",
        title="Pictures in prompts (LLaVA): the same text with another picture misses",
        shape=shapes.LLAVA,
        spec=_SMALL,
        asks="image",
        needs="vLLM's LLaVA imports torchvision, which goes with the CUDA builds of PyTorch and is not installed here",
    ),
    ModelClass(
        name="picture_first",
        title="A picture before the prompt (BLIP-2): the same text with another picture misses",
        shape=shapes.BLIP_2,
        spec=_SMALL,
        asks="image",
    ),
    ModelClass(
        name="ngram",
        title="Speculation by n-grams",
        shape=shapes.LLAMA,
        spec=_SMALL,
        args=('--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}',),
    ),
    ModelClass(
        name="draft",
        title="Speculation by a draft model",
        shape=shapes.LLAMA,
        spec=_SMALL,
        draft={**shapes.LLAMA, "num_hidden_layers": 1},
    ),
    ModelClass(
        name="eagle",
        title="Speculation by EAGLE",
        shape=shapes.LLAMA,
        spec=_SMALL,
        draft=shapes.LLAMA,
        draft_method="eagle",
    ),
    ModelClass(
        name="mtp",
        title="Speculation by a layer of the model (MTP, GLM-4.5)",
        shape=shapes.GLM_4_MOE,
        spec=_SMALL,
        args=('--speculative-config={"method":"mtp","num_speculative_tokens":1}',),
    ),
    ModelClass(
        name="fp8_kv",
        title="fp8 KV cache",
        shape=shapes.LLAMA,
        spec=_SMALL,
        args=("--kv-cache-dtype=fp8",),
    ),
    ModelClass(
        name="embedded",
        title="Prompts given as embeddings: others of the same length miss",
        shape=shapes.LLAMA,
        spec=_SMALL,
        args=("--enable-prompt-embeds",),
        asks="embedded",
    ),
    ModelClass(
        name="async",
        title="Asynchronous scheduling, prompts computed in pieces of 160 tokens",
        shape=shapes.LLAMA,
        spec=_SMALL,
        args=("--async-scheduling", *_SMALL_STEPS),
        needs="vLLM's CPU platform turns asynchronous scheduling off (vllm/platforms/cpu.py)",
    ),
)
