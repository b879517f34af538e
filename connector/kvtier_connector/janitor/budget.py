# SPDX-License-Identifier: Apache-2.0
"""What the tier may take now, from its settings and from what the file system says; and when to brake the engines.

Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier_connector.contract_janitor import JanitorConfig
from kvtier_connector.janitor.policy import Limits

_MOST_BYTES = 1 << 59
"""A file system that claims more than half an exbibyte hides its quota, as Amazon EFS does."""
_FREE_MORE = 1.25
"""Once too little is free, so much more than what is wanted is made free, so that it does not begin again at once."""
_CRITICAL = 0.5
"""Share of what shall stay free below which engines are to stop storing: eviction alone does not keep up."""


_MOST_QUOTAS = 256
"""Tenants that are brought down to their quotas in one decision: each takes a look at all blocks. The next ones follow
in the next."""


class Space(NamedTuple):
    """What the file system says of itself."""

    total_bytes: int = 0
    """0 where it does not say, or says what cannot be."""
    free_bytes: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there is anything to go by."""
        return self.total_bytes > 0


def make_space(total_bytes: int, free_bytes: int) -> Space:
    """Return what is to be believed of a file system's answer."""
    return Space(total_bytes, max(0, free_bytes)) if 0 < total_bytes < _MOST_BYTES else Space()


def min_free_bytes(config: JanitorConfig, space: Space) -> int:
    """Return what shall stay free of the file system; 0 where it does not say how large it is."""
    if not space.is_known:
        return 0
    wanted = max(config.min_free_bytes, int(config.min_free_fraction * space.total_bytes))
    return min(wanted, space.total_bytes)


def make_limits(  # noqa: PLR0913 - keywords
    config: JanitorConfig,
    space: Space,
    *,
    tenants: Sequence[str],
    used: Mapping[int, int],
    other_bytes: int,
    now_ns: int,
) -> Limits:
    """Return the limits of one decision.

    Args:
        config: The settings.
        space: Of the file system.
        tenants: Names by number.
        used: Bytes by tenant.
        other_bytes: Of files that are no blocks but count against the budget.
        now_ns: Nanoseconds since 1970.
    """
    over: dict[int, tuple[int, int]] = {}
    for number, have in used.items():
        quota = config.quotas.get(tenants[number], config.default_quota_bytes if tenants[number] else 0)
        if quota and have > int(quota * config.high_watermark):
            over[number] = (int(quota * config.high_watermark), int(quota * config.low_watermark))
    quotas = {number: over[number] for number in heapq.nlargest(_MOST_QUOTAS, over, key=used.__getitem__)}
    wanted = min_free_bytes(config, space)
    lacks = wanted > space.free_bytes
    return Limits(
        high_bytes=int(config.max_bytes * config.high_watermark),
        low_bytes=int(config.max_bytes * config.low_watermark),
        other_bytes=other_bytes,
        quotas=quotas,
        wanted_free_bytes=int(wanted * _FREE_MORE) - space.free_bytes if lacks else 0,
        floor_bytes=config.min_bytes,
        expire_before=None if config.ttl_seconds is None else now_ns - int(config.ttl_seconds * 1e9),
    )


def is_due(limits: Limits, *, used: Mapping[int, int], oldest_ns: int | None) -> bool:
    """Say whether anything has to go, from sums alone; the policy says what."""
    total = sum(used.values())
    if limits.high_bytes and total + limits.other_bytes > limits.high_bytes:
        return True
    if any(used.get(tenant, 0) > high for tenant, (high, _) in limits.quotas.items()):
        return True
    if limits.wanted_free_bytes > 0 and total > limits.floor_bytes:
        return True
    return limits.expire_before is not None and oldest_ns is not None and oldest_ns < limits.expire_before


def brake_reason(config: JanitorConfig, space: Space, *, used_bytes: int, is_braking: bool, is_full: bool) -> str:
    """Return why engines should stop storing, empty if they need not.

    Args:
        config: The settings.
        space: Of the file system.
        used_bytes: All that counts against the budget.
        is_braking: Whether they were asked already: then it takes more room for them to be let go again.
        is_full: Whether the volume refused a write of the janitor for want of room.
    """
    if is_full:
        return "the volume has no room left"
    share = config.high_watermark if is_braking else 1.0
    if config.max_bytes and used_bytes > config.max_bytes * share:
        return f"blocks take {used_bytes} bytes, which is more than {share:.0%} of max_bytes={config.max_bytes}"
    wanted = int(min_free_bytes(config, space) * (1.0 if is_braking else _CRITICAL))
    if space.is_known and space.free_bytes < wanted:
        return f"the volume has {space.free_bytes} bytes free, which is less than {wanted}"
    return ""
