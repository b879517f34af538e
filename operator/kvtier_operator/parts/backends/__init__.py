# SPDX-License-Identifier: Apache-2.0
"""What each ``spec.connector`` gives the engine's pods: the JSON on the command line, and what stands by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvtier_operator.api import connector_spec as kinds
from kvtier_operator.parts.backends import lmcache, native, outside
from kvtier_operator.parts.backends.rendered import Rendered
from kvtier_operator.plan import TierPlan

__all__ = ["Rendered", "render"]

_RENDERERS: Final[Mapping[str, Callable[[TierPlan], Rendered]]] = {
    kinds.BUNDLED: native.bundled,
    kinds.VLLM_OFFLOADING: native.offloading,
    kinds.VLLM_TIERING: native.tiering,
    kinds.SIMPLE_CPU: native.simple_cpu,
    kinds.LMCACHE: lmcache.alone,
    kinds.HYBRID: lmcache.hybrid,
    kinds.FLEX_KV: outside.flexkv,
    kinds.MOONCAKE: outside.mooncake,
}


def render(plan: TierPlan) -> Rendered:
    """Return what the engine of this plan is started with for its connector."""
    return _RENDERERS[plan.spec.connector.type](plan)
