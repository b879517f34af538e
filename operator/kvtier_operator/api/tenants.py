# SPDX-License-Identifier: Apache-2.0
"""``spec.disk.tenants`` of a KVCacheTier: whose blocks lie apart on the volume, and how many of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictStr, StringConstraints

from kvtier_connector import contract
from kvtier_operator import quantity
from kvtier_operator.api.rules import ApiModel, Checked, Keyed, Pasted, Rule
from kvtier_operator.api.scalars import ByteQuantity

_TENANT: Final = re.compile(f"^{contract.TENANT_PATTERN}$")

IS_TENANT: Final = Rule(
    cel=f"self.matches('{_TENANT.pattern}')",
    message="must be 1 to 32 lower-case letters, digits, '.', '_' and '-', starting with a letter or a digit: it is "
    "the name of a directory",
    check=lambda text: _TENANT.fullmatch(text) is not None,
)


class Quota(ApiModel):
    """What the blocks of one tenant may take."""

    tenant: Annotated[StrictStr, StringConstraints(min_length=1, max_length=64), Checked((IS_TENANT,))]
    """Name of the tenant: what requests say, or the first 16 digits of the SHA-256 of its `cache_salt`."""
    max_size: Annotated[ByteQuantity, Field(alias="maxBytes")]
    """Storage that its blocks may take, of all generations together."""


class Tenants(ApiModel):
    """Who the requests come from, so that each has a directory and a quota of its own on the volume."""

    source: Annotated[Literal["None", "CacheSalt", "Parameter"], Field(alias="from")] = "None"
    """How a request names its tenant: `CacheSalt` by its `cache_salt`, `Parameter` by `kvtier_tenant` in its
    `kv_transfer_params`; with `None` all blocks are common. Only a salt keeps tenants apart in the memory of an engine,
    too."""
    quotas: Annotated[tuple[Annotated[dict[str, Any], Pasted(Quota)], ...], Field(max_length=256), Keyed("tenant")] = ()
    """What the blocks of tenants may take. Changing it restarts the engines."""
    default_max_size: Annotated[ByteQuantity | None, Field(alias="defaultMaxBytes")] = None
    """What the blocks of every other tenant may take; no limit if left out. Changing it restarts the engines."""

    rules = (
        Rule(
            cel="(has(self.from) && self.from != 'None') "
            "|| ((!has(self.quotas) || self.quotas.size() == 0) && !has(self.defaultMaxBytes))",
            message="must be CacheSalt or Parameter where quotas or defaultMaxBytes are given: without it all blocks "
            "are of nobody in particular",
            check=lambda tenants: tenants.source != "None" or (not tenants.quotas and tenants.default_max_size is None),
            field=".from",
        ),
    )

    @property
    def quota_bytes(self) -> Mapping[str, int]:
        """Return `quotas` in bytes, by tenant."""
        return {entry["tenant"]: quantity.parse_bytes(entry["maxBytes"]) for entry in self.quotas}

    @property
    def default_bytes(self) -> int:
        """Return `default_max_size` in bytes; 0 is no limit."""
        return 0 if self.default_max_size is None else quantity.parse_bytes(self.default_max_size)
