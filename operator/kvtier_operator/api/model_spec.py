# SPDX-License-Identifier: Apache-2.0
"""``spec.model.loras`` of a KVCacheTier: adapters that the engines serve beside the model. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field, StrictInt, StrictStr, StringConstraints

from kvtier_operator.api.rules import ApiModel, Checked, Keyed, ObjectName, Pasted, Rule, Word

MOST_LORAS: Final = 64

_ADAPTER: Final = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9._/]*$")
_PATH: Final = re.compile(r"^[^/\s,=]+(/[^/\s,=]+)*$")
_NAMED: Final = re.compile(r"^[^@]*@[0-9a-f]{64}$")
_FLAGS: Final = re.compile(r"^--(enable[-_]lora|lora[-_]modules|max[-_]lora[-_]rank)([=.]|$)")

IS_ADAPTER: Final = Rule(
    cel=f"self.matches('{_ADAPTER.pattern}')",
    message="must be letters, digits, '-', '.', '_' and '/', starting with a letter or a digit: requests name it as "
    "their model",
    check=lambda name: _ADAPTER.fullmatch(name) is not None,
)

IS_PATH: Final = Rule(
    cel=rf"self.matches(r'{_PATH.pattern}') && !self.split('/').exists(part, part == '..')",
    message="must be a directory below the root of the claim, such as adapters/sql: no leading or double '/', no '..', "
    "no white space, ',' or '='",
    check=lambda path: _PATH.fullmatch(path) is not None and ".." not in path.split("/"),
)

IS_DIGEST: Final = Rule(
    cel=rf"!self.contains('@') || self.matches('{_NAMED.pattern}')",
    message="must end in '@' and 64 hexadecimal digits, if it has an '@': the SHA-256 of adapter_config.json and the "
    "weight file, one after the other",
    check=lambda path: "@" not in path or _NAMED.search(path) is not None,
)


class LoraSource(ApiModel):
    """Where the files of an adapter are."""

    claim: ObjectName | None = None
    """PersistentVolumeClaim in the same namespace that holds the adapter; engines mount it read-only."""
    path: (
        Annotated[StrictStr, StringConstraints(min_length=1, max_length=256), Checked((IS_PATH, IS_DIGEST))] | None
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
        Rule(
            cel="!has(self.path) || has(self.claim)",
            message="is a directory of a claim: name the claim, or remove it",
            check=lambda source: source.path is None or source.claim is not None,
            field=".path",
        ),
    )


class Lora(ApiModel):
    """One adapter."""

    name: Annotated[StrictStr, StringConstraints(min_length=1, max_length=128), Checked((IS_ADAPTER,))]
    """Name that requests give as their model to use it."""
    source: LoraSource
    """Where its files are."""


Loras = Annotated[tuple[Annotated[dict[str, Any], Pasted(Lora)], ...], Field(max_length=MOST_LORAS), Keyed("name")]
"""Adapters of a model, no two of one name."""

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)

IS_RANK: Final = Rule(
    cel=f"self in {list(_RANKS)}",
    message=f"must be one of {', '.join(map(str, _RANKS))}, the ranks that vLLM sets memory aside for: the next one "
    "above that of the adapters",
    check=lambda rank: rank in _RANKS,
)

LoraRank = Annotated[StrictInt, Field(ge=1, le=512, json_schema_extra={"format": "int32"}), Checked((IS_RANK,))]
"""What vLLM takes for the highest rank."""

MostAtOnce = Annotated[StrictInt, Field(ge=1, le=MOST_LORAS, json_schema_extra={"format": "int32"})]
"""Adapters in one batch."""


def are_flags_free(loras: Sequence[object], args: Sequence[str]) -> bool:
    """Tell whether the adapters are said in one place only."""
    return not loras or not any(_FLAGS.match(word) for word in args)


ONE_PLACE: Final = Rule(
    cel="!has(self.model.loras) || self.model.loras.size() == 0 || !has(self.engine.args) || "
    rf"self.engine.args.all(word, !word.matches('{_FLAGS.pattern}'))",
    message="--enable-lora, --lora-modules and --max-lora-rank follow from spec.model.loras and "
    "spec.model.maxLoraRank: remove them here, or the adapters there",
    check=lambda spec: are_flags_free(spec.model.loras, spec.engine.args),
    field=".engine.args",
)
"""Rule about the whole spec."""


def describe(source: Mapping[str, Any]) -> str:
    """Return where an adapter is, in one word."""
    if "hub" in source:
        return f"hub:{source['hub']}"
    return f"{source['claim']}/{source.get('path', '')}".rstrip("/")
