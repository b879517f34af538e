# SPDX-License-Identifier: Apache-2.0
"""What the pods of a tier have in common: who they run as, and what they may not do. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator.names import Manifest
from kvtier_operator.spec.pods import PodTemplate

USER_ID: Final = 10001
"""Any non-root number will do; the volume's files belong to the group of the same number."""


def security_context(template: PodTemplate) -> Manifest:
    """Return the security context of every pod that mounts the volume: all are of one user and group."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Changing the owner of millions of block files at each start would take longer than the start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **(template.security_context or {}),
    }


def hardened() -> Manifest:
    """Return the security context of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
