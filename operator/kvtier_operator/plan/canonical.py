# SPDX-License-Identifier: Apache-2.0
"""Whether engines of any number of ranks can read the same blocks: vLLM's canonical layout.

Pure. vLLM certifies layer by layer that a page can be laid out as without parallelism. What it would refuse at the
start of every engine is refused here, with the reason; an engine that finds more at its start refuses it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.plan import flags
from kvtier_operator.plan.kv import KvCache, KvUnknown
from kvtier_operator.plan.layers import language_config

_FIELD: Final = "spec.disk.canonicalLayout"
_PARALLEL: Final = ("pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size")
_DRAFTS: Final = ("speculative-config", "spec-method", "spec-model")


def refuse(spec: TierSpec, kv: KvCache | KvUnknown, config: Mapping[str, Any] | None) -> Refusal | None:
    """Return why the blocks of this tier cannot be free of ``tensorParallel``; None where they can, or need not.

    Args:
        spec: what the user wants.
        kv: what a token takes.
        config: the model's config.json, where that is known.
    """
    if not spec.disk.canonical_layout:
        return None
    why = _obstacle(spec, kv, language_config(config or {}))
    if why is None:
        return None
    return Refusal(
        reason=Reason.LAYOUT_NOT_CANONICAL,
        message=f"{_FIELD}: {why}; set it to false, and engines of each tensorParallel keep blocks of their own",
    )


def _obstacle(spec: TierSpec, kv: KvCache | KvUnknown, config: Mapping[str, Any]) -> str | None:
    found, ranks = flags.parse(spec.engine.args), spec.engine.tensor_parallel
    split = [flag for flag in _PARALLEL if flags.count(found, flag) > 1]
    if split:
        return f"--{split[0]} in spec.engine.args splits blocks in ways of which they cannot be freed"
    drafts = [flag for flag in _DRAFTS if flag in found]
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
