# SPDX-License-Identifier: Apache-2.0
"""Says why nothing is loaded from the volume, or stored on it, at present: the cause that the metrics give.

Only memory is read, so the scheduler may ask in each of its steps.
"""

from __future__ import annotations

from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.breaker import Breaker, Direction
from kvtier_connector.tier import metrics
from kvtier_connector.tier.volume import Volume


def why_not_loading(volume: Volume, breaker: Breaker, *, is_stuck: bool) -> str | None:
    """Return the cause, None if blocks are loaded; `is_stuck` says that a load would not start."""
    if not volume.mode.may_load:
        return metrics.BYPASSED
    if not volume.is_readable:
        return metrics.INERT
    if is_stuck:
        return metrics.STUCK
    return None if breaker.has_room(Direction.LOAD) else metrics.BREAKER


def why_not_storing(volume: Volume, breaker: Breaker, *, is_stuck: bool) -> str | None:
    """Return the cause, None if blocks are stored; `is_stuck` says that a store would not start."""
    if not volume.mode.may_store:
        return metrics.BYPASSED
    if not volume.is_readable:
        return metrics.INERT
    if not volume.is_writable:
        return metrics.UNCOUNTED
    if not volume.has_key:
        return StoreFault.NO_KEY.value
    if is_stuck:
        return metrics.STUCK
    return None if breaker.has_room(Direction.STORE) else metrics.BREAKER
