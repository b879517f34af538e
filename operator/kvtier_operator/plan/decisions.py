# SPDX-License-Identifier: Apache-2.0
"""Notes that a Deployment carries: decisions that are made once for a tier and then kept, and what its pods are from.

Pure. A pod that starts elsewhere, a node that joins, or a newer operator with a longer table of models must not
restart engines or empty a cache. So each decision is written to the Deployment with a digest of the fields that it was
made for, and stands until one of them changes.

vLLM certifies layer by layer that a page can be laid out as without parallelism (its canonical layout). A model that it
would refuse at the start of every engine is refused here, with the reason.

Another version of the operator may render other pods from the same spec. A replaced engine costs its memory, its start
and its place on a node. `parts.edit_impact.keep_pods` decides whether the pods stay.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.api.parse import document
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.plan import chunks, digest, engine_args, models
from kvtier_operator.plan.chunks import Checkpoints, Chunking
from kvtier_operator.plan.model_families import make_family_layout
from kvtier_operator.plan.model_layout import EngineLayout, KvUnknown, ModelLayout, language_config

_VERSION: Final = 1

_KV_FLAGS: Final = (
    *("block-size", "decode-context-parallel-size", "disable-hybrid-kv-cache-manager", "dtype", "kv-cache-dtype"),
    "pipeline-parallel-size",
)


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Decisions, with digests of the fields that they were made for."""

    cpu_bytes: int
    """Of one engine."""
    node_bytes: int | None
    """Memory of the node that a fraction was taken of; None where a size was given."""
    cpu_for: str
    chunking: Chunking
    weight_bytes: int | None
    """None where the model is unknown."""
    model_for: str
    assumed: Refusal | None = None
    """Why the CPU tier is assumed for now; None where it is decided."""

    def encode(self) -> str:
        """Return what is written to the Deployment, always in the same bytes."""
        document = {
            "version": _VERSION,
            "cpu": {"for": self.cpu_for, "bytes": self.cpu_bytes, "nodeBytes": self.node_bytes},
            "model": {
                "for": self.model_for,
                "blockTokens": self.chunking.tokens,
                "blocks": self.chunking.blocks,
                "weightBytes": self.weight_bytes,
            },
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Earlier decisions as the Deployment carries them; empty where it carries none that can be read."""

    cpu: Mapping[str, Any]
    model: Mapping[str, Any]


def read(text: str) -> Kept:
    """Read the text of `Decisions.encode`; any other text counts as nothing."""
    try:
        document = json.loads(text) if text else {}
    except ValueError:
        document = {}
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        document = {}
    cpu, model = document.get("cpu"), document.get("model")
    return Kept(
        cpu=cpu if isinstance(cpu, dict) and _are_counts(cpu, "bytes", "nodeBytes") else {},
        model=model if isinstance(model, dict) and _are_counts(model, "blockTokens", "blocks", "weightBytes") else {},
    )


def kv_of(spec: TierSpec) -> ModelLayout | KvUnknown:
    """Return what a token of this tier takes, by its own config or the table of models."""
    engine, given = spec.engine, spec.model.config
    return _layout(
        spec.model.name,
        None if given is None else json.dumps(given),
        engine.args,
        tensor_parallel=engine.tensor_parallel,
        is_cpu_build=engine.accelerator.resource == NO_ACCELERATOR,
        is_canonical=spec.disk.canonical_layout,
    )


@functools.lru_cache(maxsize=256)
def _layout(name: str, config: str | None, args: tuple[str, ...], **engine: Any) -> ModelLayout | KvUnknown:
    """Return the layout of a model, once for all tiers that serve it alike."""
    model = models.known(name)
    if config is not None:
        found = json.loads(config)
    elif model is not None:
        found = model.config
    else:
        return KvUnknown(
            why=f"{name} is not in the table of known models: paste its config.json, or the fields about "
            "layers and heads, into spec.model.config"
        )
    return make_family_layout(found, EngineLayout(args=engine_args.read(args), **engine))


def checkpoints_of(spec: TierSpec, chunking: Chunking) -> Checkpoints:
    """Return where engines of this tier keep what a later prompt can go on from."""
    return chunks.choose_checkpoints(
        kv_of(spec), chunking, args=engine_args.read(spec.engine.args), config=config_of(spec)
    )


def config_of(spec: TierSpec) -> Mapping[str, Any] | None:
    """Return the model's config.json, or the part of it that is known."""
    if spec.model.config is not None:
        return spec.model.config
    model = models.known(spec.model.name)
    return None if model is None else model.config


def model_inputs(spec: TierSpec) -> str:
    """Return the digest of the fields that decide how large KV and weights are."""
    found = engine_args.read(spec.engine.args).words
    return digest.digest(
        {
            "model": spec.model.name,
            "config": spec.model.config,
            "blockTokens": spec.disk.block_tokens,
            "tensorParallel": spec.engine.tensor_parallel,
            "isCpuBuild": spec.engine.accelerator.resource == NO_ACCELERATOR,
            "flags": {flag: list(found[flag]) for flag in _KV_FLAGS if flag in found},
            # Only where it is set: what was decided before there was such a field stands.
            **({"isCanonical": True} if spec.disk.canonical_layout else {}),
        }
    )


def decide_model(spec: TierSpec, kept: Kept) -> tuple[Chunking, int | None, str]:
    """Return the chunk, the size of the weights, and the digest of what they were decided for."""
    inputs = model_inputs(spec)
    if kept.model.get("for") == inputs:
        chunking = Chunking(tokens=kept.model.get("blockTokens"), blocks=kept.model.get("blocks"))
        return chunking, kept.model.get("weightBytes"), inputs
    model = models.known(spec.model.name)
    weights = None if model is None else model.weight_bytes
    return chunks.choose_chunking(kv_of(spec), asked_tokens=spec.disk.block_tokens), weights, inputs


def _are_counts(document: Mapping[str, Any], *names: str) -> bool:
    values = [document.get(name) for name in names]
    return all(value is None or (isinstance(value, int) and value >= 1) for value in values)


_FIELD: Final = "spec.disk.canonicalLayout"
_PARALLEL: Final = ("pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size")
_DRAFTS: Final = ("speculative-config", "spec-method", "spec-model")


def refuse_canonical(spec: TierSpec) -> Refusal | None:
    """Return why the blocks of this tier cannot be free of ``tensorParallel``; None where they can, or need not."""
    why = _obstacle(spec) if spec.disk.canonical_layout else None
    if why is None:
        return None
    return Refusal(
        Reason.LAYOUT_NOT_CANONICAL,
        f"{_FIELD}: {why}; set it to false, and engines of each tensorParallel keep blocks of their own",
    )


def advise_ranks(spec: TierSpec) -> str:
    """Return what to know where another ``tensorParallel`` discards the cache."""
    why = _obstacle(spec)
    if why is None:
        return (
            f"with {_FIELD}, blocks serve any spec.engine.tensorParallel: it starts a generation itself, and is then "
            "the last one that another tensorParallel costs"
        )
    return f"blocks of one spec.engine.tensorParallel cannot serve another one here: {why}"


def _obstacle(spec: TierSpec) -> str | None:
    kv, config = kv_of(spec), language_config(config_of(spec) or {})
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


@dataclass(frozen=True, kw_only=True)
class RenderedPods:
    """The source of a Deployment's pods."""

    spec: Mapping[str, Any]
    restart: str
    config: str
    """The connector's document."""
    template: Mapping[str, Any]
    """Of the pods, as it was applied."""

    @property
    def generation(self) -> str:
        """Digest of the generation that the connector's document names; empty where it names none."""
        try:
            found = json.loads(self.config)
        except ValueError:
            return ""
        return str(found.get("digest", "")) if isinstance(found, dict) else ""

    def encode(self) -> str:
        """Return the text of the annotation."""
        document = {"spec": self.spec, "restart": self.restart, "config": self.config, "template": self.template}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def make_rendered(spec: TierSpec, *, restart: str, config: str, template: Mapping[str, Any]) -> RenderedPods:
    """Note what pods are made from."""
    return RenderedPods(spec=document(spec), restart=restart, config=config, template=template)


def decode_rendered(text: str) -> RenderedPods | None:
    """Read the annotation; None where there is none that can be used: then the pods are rendered anew."""
    try:
        document = json.loads(text)
        found = RenderedPods(**{name: document[name] for name in ("spec", "restart", "config", "template")})
    except (ValueError, TypeError, KeyError):
        return None
    is_whole = isinstance(found.spec, dict) and isinstance(found.template, dict) and isinstance(found.config, str)
    return found if is_whole and {"metadata", "spec"} <= found.template.keys() else None
