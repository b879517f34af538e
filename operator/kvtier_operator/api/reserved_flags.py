# SPDX-License-Identifier: Apache-2.0
"""Flags and environment variables of the engine that the operator sets, and the field to change instead. Pure.

vLLM keeps the last value it is given, so a second ``--revision`` in ``spec.engine.args`` would quietly serve one model
under the cache identity of another. Each of these is refused, in every spelling that vLLM's parser takes: ``--flag x``,
``--flag=x``, ``--flag.key x``, underscores for dashes, and any abbreviation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvtier_operator.api.rules import Rule

_TIERS: Final = "the operator renders it from spec.connector, spec.cpu and spec.volume"
_SERVED: Final = (
    "the Service and the probes expect the engine on port 8000 of the pod, on every address; leave it out, or write "
    "--port=8000 and --host=0.0.0.0, each as one word"
)
_PLAIN: Final = "the probes speak plain HTTP to the engine; put TLS in front of the Service"

FLAGS: Final[Mapping[str, str]] = {
    "--model": "set spec.model.name",
    "--revision": "set spec.model.revision",
    "--hf-token": "set spec.model.tokenSecretRef",
    "--tensor-parallel-size": "set spec.engine.tensorParallel",
    "-tp": "set spec.engine.tensorParallel",
    "--prefix-caching-hash-algo": "set spec.hash.algorithm",
    "--no-enable-prefix-caching": "the cache tiers need prefix caching, so it is always on",
    "--kv-transfer-config": _TIERS,
    "--kv-events-config": "set spec.kvEvents",
    "--kv-offloading-size": f"set spec.cpu.size: {_TIERS}",
    "--kv-offloading-backend": _TIERS,
    "--host": _SERVED,
    "--port": _SERVED,
    "--uds": _SERVED,
    "--ssl-certfile": _PLAIN,
    "--ssl-keyfile": _PLAIN,
    "--shutdown-timeout": "the operator fits it into the grace period of the pod",
    "--config": "write its flags in spec.engine.args, where they are checked and become part of the cache identity",
}
"""Flag to what its user does instead."""

HARMLESS: Final = ("--enable-prefix-caching", "--port=8000", "--host=0.0.0.0")
"""What people bring along from elsewhere and the operator sets just so: it may stand there, in these spellings, and
never reaches vLLM, for which the last word counts: on a cluster of IPv6, every address is another one."""

_TOKEN: Final = "set spec.model.tokenSecretRef"  # noqa: S105  the name of a field, not a token
ENV: Final[Mapping[str, str]] = {
    "PYTHONHASHSEED": "set spec.hash.seed, which every pod gets; engines with different seeds cannot share blocks",
    "PYTHONPATH": "the operator points it at the connector",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "set spec.kvEvents.blockHashes, which the volume's events follow, too",
    "HF_TOKEN": _TOKEN,
    "HUGGING_FACE_HUB_TOKEN": _TOKEN,
    "HF_HOME": "the operator points it at /tmp/hf; to keep downloads, mount a volume there with "
    "spec.engine.podTemplate.volumeMounts",
}
"""Variable to what its user does instead."""


def abbreviations(flag: str) -> str:
    """Return the regular expression of a flag, of what argparse takes for it, and of the value or key after it."""
    name = flag.lstrip("-")
    dashes = flag.removesuffix(name)
    rest = ""
    for letter in reversed(name[1:]):
        rest = f"({'[-_]' if letter == '-' else letter}{rest})?"
    return f"^{dashes}{name[0]}{rest}([=.]|$)"


def _flag_rule(flag: str, instead: str) -> Rule:
    expression = abbreviations(flag)
    pattern = re.compile(expression)

    def check(args: Sequence[str]) -> bool:
        return not any(pattern.match(word) for word in args if word not in HARMLESS)

    allowed = "".join(f" || word == '{each}'" for each in HARMLESS if pattern.match(each))
    return Rule(
        cel=f"self.all(word, !word.matches('{expression}'){allowed})",
        message=f"{flag} (or an abbreviation of it) is not yours to set here: {instead}",
        check=check,
    )


def _env_rule(name: str, instead: str) -> Rule:
    def check(env: Sequence[Mapping[str, Any]]) -> bool:
        return all(variable["name"] != name for variable in env)

    return Rule(
        cel=f"self.all(variable, variable.name != '{name}')",
        message=f"{name} is not yours to set here: {instead}",
        check=check,
    )


_SPLIT: Final = re.compile(r"^-[^=]*\s")

FLAG_RULES: Final = (
    *(_flag_rule(flag, instead) for flag, instead in FLAGS.items()),
    Rule(
        cel="self.size() == 0 || self[0].startsWith('-')",
        message="the first item must be a flag, such as --max-model-len; spec.model.name names the model",
        check=lambda args: not args or args[0].startswith("-"),
    ),
    Rule(
        cel=r"self.all(word, !word.matches(r'^-[^=]*\s'))",
        message="a flag and its value must be two items, or one item joined by '=': no shell splits them at spaces",
        check=lambda args: not any(_SPLIT.match(word) for word in args),
    ),
    Rule(
        cel="self.all(word, word != '--')",
        message="'--' would turn the flags after it into names; remove it",
        check=lambda args: "--" not in args,
    ),
)
"""What ``spec.engine.args`` must keep to."""

ENV_RULES: Final = tuple(_env_rule(name, instead) for name, instead in ENV.items())
"""What ``spec.engine.env`` must keep to."""
