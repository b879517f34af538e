# SPDX-License-Identifier: Apache-2.0
"""Lays what a user adds to the pods over what the operator renders, by the rules of server-side apply. Pure.

Objects are merged field by field. Lists that Kubernetes keeps as maps are merged item by item, told apart by their
keys; any other list is replaced as a whole. What must not be replaced was refused with the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator.names import Manifest

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "claims": ("name",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "protocol"),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists that are maps, and the fields that tell their items apart."""

_DEFAULTS: Final = {"protocol": "TCP"}
"""Of fields that tell items apart."""


def lay_over(base: Mapping[str, Any], added: Mapping[str, Any]) -> Manifest:
    """Return an object with what was added to it; neither is changed."""
    return {
        **base,
        **{field: _merged(field, base[field], value) if field in base else value for field, value in added.items()},
    }


def _merged(field: str, base: Any, added: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(added, Mapping):
        return lay_over(base, added)
    keys = _KEYS.get(field)
    if keys is None or not isinstance(base, (list, tuple)):
        return added
    items = {_key(item, keys): item for item in base}
    for item in added:
        key = _key(item, keys)
        items[key] = lay_over(items[key], item) if key in items else item
    return list(items.values())


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, _DEFAULTS.get(key)) for key in keys)
