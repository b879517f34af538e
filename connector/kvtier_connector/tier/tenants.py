# SPDX-License-Identifier: Apache-2.0
"""Whose blocks a request reads and writes. What cannot be told is kept off the volume: it is computed, and not stored.

A tenant is a directory on the volume, with a quota. It is not what keeps one tenant's prompts from another's: in the
GPU and the CPU tier vLLM finds blocks by their hash alone, which covers the cache salt and no parameter.
"""

from __future__ import annotations

import hashlib

from vllm.v1.kv_offload.base import ReqContext

from kvtier_connector.contract import TENANT_PARAMETER
from kvtier_connector.store.layout import is_tenant
from kvtier_connector.tier.hooks import Salt

SALT_DIGITS = 16
"""Of the SHA-256 of a salt: the salt itself, which is a secret, is neither a directory's name nor in a header."""


def tenant_of_salt(salt: str) -> str:
    """Return the tenant of a cache salt."""
    return hashlib.sha256(salt.encode()).hexdigest()[:SALT_DIGITS]


def find_tenant(context: ReqContext, source: str) -> str | None:
    """Return the request's tenant, empty if it has none, None if it cannot be told.

    Args:
        context: The request.
        source: One of `contract.TENANT_SOURCES`.
    """
    if source == "CacheSalt":
        salt: Salt | None = context.get_state(Salt)
        if salt is None:
            return None
        return tenant_of_salt(salt.value) if salt.value else ""
    if source == "Parameter":
        named = (context.kv_transfer_params or {}).get(TENANT_PARAMETER)
        if named is None:
            return ""
        return named if isinstance(named, str) and is_tenant(named) else None
    return ""
