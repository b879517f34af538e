# SPDX-License-Identifier: Apache-2.0
"""``spec.model`` of a KVCacheTier: the model, and the adapters (LoRA) that the engines serve beside it. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, StrictInt, StrictStr, StringConstraints

from kvtier_operator.api.pod_template import Anything
from kvtier_operator.api.rules import TEXT, ApiModel, Checked, Keyed, ObjectName, Pasted, Rule, Word, at

MOST_LORAS: Final = 64

_NAME: Final = Rule.that(
    TEXT.matches(r"[^/\s]\S*|(/+[^/\s]+)+/*"),
    "is no directory of a model: give its directory in the pod, such as /models/llama, or its name on the hub",
)

_IS_ADAPTER: Final = Rule.that(
    TEXT.matches("[A-Za-z0-9][-A-Za-z0-9._/]*"),
    "must be letters, digits, '-', '.', '_' and '/', starting with a letter or a digit: requests name it as their "
    "model",
)
_IS_PATH: Final = Rule.that(
    TEXT.matches(r"[^/\s,=]+(/[^/\s,=]+)*") & ~TEXT.matches("(.*/)?[.][.](/.*)?"),
    "must be a directory below the root of the claim, such as adapters/sql: no leading or double '/', no '..', "
    "no white space, ',' or '='",
)
_IS_DIGEST: Final = Rule.that(
    ~TEXT.matches(".*@.*") | TEXT.matches("[^@]*@[0-9a-f]{64}"),
    "must end in '@' and 64 hexadecimal digits, if it has an '@': the SHA-256 of adapter_config.json and the weight "
    "file, one after the other",
)


class LoraSource(ApiModel):
    """Where the files of an adapter are."""

    claim: ObjectName | None = None
    """PersistentVolumeClaim in the same namespace that holds the adapter; engines mount it read-only."""
    path: (
        Annotated[StrictStr, StringConstraints(min_length=1, max_length=256), Checked((_IS_PATH, _IS_DIGEST))] | None
    ) = None
    """Directory on the claim with `adapter_config.json` and the weights; the root of the claim if left out. A name that
    ends in `@` and the SHA-256 of both files names one state of the adapter: give changed weights another."""
    hub: Word | None = None
    """Name of the adapter on the Hugging Face hub, downloaded at each start with the token of `tokenSecretRef`. The
    newest revision is taken: replicas that start at different times may get different ones, and then share no block."""

    rules = (
        Rule.exactly_one(
            "claim",
            "hub",
            message="give exactly one of claim (a volume that holds the adapter) and hub (its name on the hub)",
        ),
        Rule.that(
            ~at("path").is_given | at("claim").is_given,
            "is a directory of a claim: name the claim, or remove it",
            field=".path",
        ),
    )


class LoraSpec(ApiModel):
    """One adapter."""

    name: Annotated[StrictStr, StringConstraints(min_length=1, max_length=128), Checked((_IS_ADAPTER,))]
    """Name that requests give as their model to use it."""
    source: LoraSource
    """Where its files are."""


_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_IS_RANK: Final = Rule(
    cel=f"self in {list(_RANKS)}",
    message=f"must be one of {', '.join(map(str, _RANKS))}, the ranks that vLLM sets memory aside for: the next one "
    "above that of the adapters",
    check=lambda rank: rank in _RANKS,
)


class SecretKey(ApiModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[StrictStr, Field(min_length=1, max_length=253)] = "token"
    """Key in it."""


_HAS_PREFIXES: Final = Rule(
    message="is that of an encoder-decoder model: vLLM has no prefix cache for one and starts none with a KV "
    "connector; serve it without a KVCacheTier",
    check=lambda config: not config.get("is_encoder_decoder"),
)


class ModelSpec(ApiModel):
    """The model that every replica serves."""

    name: Annotated[Word, Checked((_NAME,))]
    """Name on the Hugging Face hub, such as `meta-llama/Llama-3.1-8B-Instruct`, or an absolute directory in the pod.
    Another model starts a new cache generation."""
    revision: Word = "main"
    """Branch, tag or commit of the model on the hub. Name a commit to be sure that blocks and weights never part."""
    token_secret_ref: SecretKey | None = None
    """Secret with the Hugging Face token for a gated model."""
    loras: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(LoraSpec)], ...], Field(max_length=MOST_LORAS), Keyed("name")
    ] = ()
    """Adapters (LoRA) that the engines serve beside the model, each under its name. Their blocks lie beside those of
    the model. Changing the list restarts the engines and keeps the cache."""
    max_lora_rank: Annotated[
        StrictInt, Field(ge=1, le=512, json_schema_extra={"format": "int32"}), Checked((_IS_RANK,))
    ] = 16
    """Highest rank of the adapters. Memory on the devices is set aside for it; an adapter of a higher one keeps the
    engine from starting."""
    max_loras_at_once: (
        Annotated[StrictInt, Field(ge=1, le=MOST_LORAS, json_schema_extra={"format": "int32"})] | None
    ) = None
    """Adapters whose requests the engine computes together (vLLM's `--max-loras`). All of them, 8 at most, if left
    out."""
    config: Annotated[Anything, Checked((_HAS_PREFIXES,))] | None = None
    """The model's config.json, or its fields about the size of KV (layers, heads, head sizes, attention types), for a
    model that the operator does not know by its name. Only sizes follow from it; where the size of files on the volume
    changes, a new cache generation starts."""


_LORA_FLAGS: Final = "^--(enable[-_]lora|lora[-_]modules|max[-_]lora[-_]rank)([=.]|$)"

ONE_PLACE: Final = Rule.that(
    at("model.loras").test(lambda loras: f"{loras}.size() == 0", lambda loras: not loras)
    | at("engine.args").has_no_word(_LORA_FLAGS),
    "--enable-lora, --lora-modules and --max-lora-rank follow from spec.model.loras and spec.model.maxLoraRank: remove "
    "them here, or the adapters there",
    field=".engine.args",
)
"""Rule about the whole spec."""
