# SPDX-License-Identifier: Apache-2.0
"""The key that engines ask for at their API: vLLM's ``--api-key`` or ``VLLM_API_KEY``, where it is and how it is read.

It is read right before engines are asked, and kept nowhere. The operator may read no Secret but those
that its installer names, by ``rbac.readSecrets`` of the chart.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator.api import TierSpec
from kvtier_operator.errors import ClusterError, ClusterForbidden
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import ObjectKey, TierName
from kvtier_operator.observe.engine_client import EngineLocked

VARIABLE: Final = "VLLM_API_KEY"
_FLAG: Final = re.compile(r"--api[-_]key(?:=(.*))?$", re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


@dataclass(frozen=True, kw_only=True)
class KeySource:
    """The key itself, where the spec has it, or the entry of a Secret that holds it."""

    literal: str = field(default="", repr=False)
    secret: str = ""
    entry: str = ""
    is_optional: bool = False
    """Engines start without a key where the Secret or the entry is missing."""


def find_key(spec: TierSpec) -> KeySource | None:
    """Return where the key is; None where there is none, or only the pod can read it."""
    given = {str(each["name"]): each for each in spec.engine.env}
    flag = _of_flag(spec.engine.args)
    if flag is None:
        return _of_variable(given.get(VARIABLE))
    named = _REFERENCE.fullmatch(flag)
    if named is not None:
        return _of_variable(given.get(named[1]))
    return None if _REFERENCE.search(flag) else KeySource(literal=flag)


def _of_flag(args: Sequence[str]) -> str | None:
    """Return the first value of the last such flag, as vLLM does."""
    found = None
    for number, word in enumerate(args):
        flag = _FLAG.match(word)
        if flag is None:
            continue
        following = args[number + 1] if number + 1 < len(args) and not args[number + 1].startswith("-") else None
        found = following if flag[1] is None else flag[1]
    return found or None


def _of_variable(variable: Mapping[str, Any] | None) -> KeySource | None:
    if variable is None:
        return None
    secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
    if secret is not None:
        return KeySource(secret=secret["name"], entry=secret["key"], is_optional=bool(secret.get("optional")))
    value = variable.get("value", "")
    return KeySource(literal=value) if value and not _REFERENCE.search(value) else None


def read_key(cluster: Cluster, tier: TierName, source: KeySource) -> str:
    """Return the key; empty where engines go without one.

    Raises:
        EngineLocked: it cannot be read; the message says why, and never what.
    """
    if not source.secret:
        return source.literal
    try:
        found = cluster.get(ObjectKey(api_version="v1", kind="Secret", name=source.secret), tier.namespace)
    except ClusterForbidden as error:
        raise EngineLocked(f"the operator may not read Secret {source.secret}") from error
    except ClusterError as error:
        raise EngineLocked(f"Secret {source.secret} could not be read") from error
    encoded = ((found or {}).get("data") or {}).get(source.entry)
    if encoded is None and source.is_optional:
        return ""
    if encoded is None:
        raise EngineLocked(f"Secret {source.secret} has no entry {source.entry}")
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        # Without its cause, which would show what was to be decoded.
        raise EngineLocked(f"entry {source.entry} of Secret {source.secret} is no text") from None
