# SPDX-License-Identifier: Apache-2.0
"""Read the key that engines ask for, right before they are asked; it is kept nowhere and written nowhere.

The operator may read no Secret but those that its installer names, by ``rbac.readSecrets`` of the chart.
"""

from __future__ import annotations

import base64

from kvtier_operator.cluster import Cluster
from kvtier_operator.errors import ClusterError, ClusterForbidden
from kvtier_operator.names import ObjectKey, TierName
from kvtier_operator.proof.engine import EngineLocked
from kvtier_operator.proof.keys import KeySource


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
