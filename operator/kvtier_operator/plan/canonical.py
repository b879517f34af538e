# SPDX-License-Identifier: Apache-2.0
"""Whether engines of any number of ranks can read the same blocks: vLLM's canonical layout.

Pure. vLLM certifies layer by layer that a page can be laid out as without parallelism. A model that it would refuse at
the start of every engine is refused here, with the reason.
"""

from __future__ import annotations

from typing import Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.plan import decisions, engine_args
from kvtier_operator.plan.model_layout import KvUnknown, language_config

_FIELD: Final = "spec.disk.canonicalLayout"
_PARALLEL: Final = ("pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size")
_DRAFTS: Final = ("speculative-config", "spec-method", "spec-model")


def refuse(spec: TierSpec) -> Refusal | None:
    """Return why the blocks of this tier cannot be free of ``tensorParallel``; None where they can, or need not."""
    why = _obstacle(spec) if spec.disk.canonical_layout else None
    if why is None:
        return None
    return Refusal(
        Reason.LAYOUT_NOT_CANONICAL,
        f"{_FIELD}: {why}; set it to false, and engines of each tensorParallel keep blocks of their own",
    )


def advise(spec: TierSpec) -> str:
    """Return what to know where another ``tensorParallel`` discards the cache."""
    why = _obstacle(spec)
    if why is None:
        return (
            f"with {_FIELD}, blocks serve any spec.engine.tensorParallel: it starts a generation itself, and is then "
            "the last one that another tensorParallel costs"
        )
    return f"blocks of one spec.engine.tensorParallel cannot serve another one here: {why}"


def _obstacle(spec: TierSpec) -> str | None:
    kv, config = decisions.kv_of(spec), language_config(decisions.config_of(spec) or {})
    args, ranks = engine_args.read(spec.engine.args), spec.engine.tensor_parallel
    split = [flag for flag in _PARALLEL if args.count(flag) > 1]
    if split:
        return f"--{split[0]} in spec.engine.args splits blocks in ways that depend on the number of ranks"
    drafts = [flag for flag in _DRAFTS if args.has(flag)]
    if drafts:
        return f"--{drafts[0]} in spec.engine.args may add layers of a draft model, whose heads are others"
    if isinstance(kv, KvUnknown):
        return f"vLLM certifies it by the layers of the model, and {kv.why}"
    if kv.has_states:
        return "some layers of the model keep a state, which vLLM certifies for one number of ranks only"
    if config.get("attention_chunk_size"):
        return "the model attends to pieces (attention_chunk_size), which vLLM does not certify"
    if not config.get("kv_lora_rank") and kv.heads % ranks:
        return f"the {kv.heads} KV heads of the model cannot be dealt out evenly to tensorParallel {ranks}"
    return None
