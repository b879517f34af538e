# SPDX-License-Identifier: Apache-2.0
"""Pods of other owners as a tier counts them, and the tiers that claim them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvtier_connector.contract import documents
from kvtier_connector.contract.janitor import FIXED_FIELDS, JANITOR_CONFIG_FILE
from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.disk_spec import Janitor
from kvtier_operator.api.parse import document, read_leniently
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.observe.targets import is_attached
from kvtier_operator.parts import engine_config
from kvtier_operator.parts.external.attach import step_into
from kvtier_operator.plan.janitor_config import make_janitor
from kvtier_operator.snapshot import Engines, Pod, Snapshot


def external_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return ``spec.engine.external`` of a KVCacheTier body, if its selector can be used, whatever else is wrong."""
    external: Mapping[str, Any] | None = step_into(body, ("spec", "engine", "external"))
    labels = step_into(external, ("selector", "matchLabels"))
    if not isinstance(labels, Mapping) or not labels:
        return None
    # Of the text of a selector, these two part labels and values.
    return None if any({",", "="} & set(f"{key}{value}") for key, value in labels.items()) else external


def live_settings(body: Mapping[str, Any]) -> TierSpec | None:
    """Return what of a refused spec engines of another owner follow while they run; None where that is refused."""
    stored = body.get("spec") or {}
    if external_of(body) is None or (found := read_leniently(stored, instead={})) is None:
        return None
    read = document(found)
    asked_disk, disk = stored.get("disk") or {}, read.get("disk", {})
    if any(asked_disk.get(field) != disk.get(field) for field in ("mode", "encryption")):
        return None
    asked = {field: stored[field] for field in ("generations", "janitor") if field in stored}
    asked_disk = {field: asked_disk[field] for field in ("budget", "tenants") if field in asked_disk}
    try:
        return TierSpec.model_validate({**read, **asked, "disk": {**disk, **asked_disk}})
    except ValueError:
        # One of the janitor's own settings is refused, and would be at its default: it keeps those that it has.
        return found.model_copy(update={"janitor": Janitor(enabled=False)})


def live_manifests(spec: TierSpec, snapshot: Snapshot) -> Iterator[Manifest]:
    """Return the ConfigMaps of the engines and of the janitor with what they follow of a spec while they run."""
    tier = snapshot.tier
    config = snapshot.live.get(engine_config.key_of(tier))
    if config is not None:
        yield engine_config.with_live_settings(config.content, spec, tier)
    key = ObjectKey(api_version="v1", kind="ConfigMap", name=names.janitor(tier))
    text = None if key not in snapshot.live else snapshot.live[key].content.get("data", {}).get(JANITOR_CONFIG_FILE)
    runs = None if text is None else json.loads(text)
    if runs and (made := make_janitor(spec, tier, root=f"{runs['tier_dir']}/{runs['current']}", image="")):
        fixed = {field: value for field, value in runs.items() if field in FIXED_FIELDS}
        data = {JANITOR_CONFIG_FILE: documents.encode_object({**json.loads(made.config_text), **fixed})}
        metadata = names.metadata(tier, names.janitor(tier), component=names.COMPONENT_JANITOR)
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def attached_pods(cluster: Cluster, namespace: str, external: Mapping[str, Any]) -> list[Manifest]:
    """Return the pods that a selector finds."""
    selector = ",".join(f"{key}={value}" for key, value in external["selector"]["matchLabels"].items())
    return made_by_others(cluster.list("v1", "Pod", namespace=namespace, selector=selector))


def made_by_others(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that are none of the operator's own, which a selector may find, too."""
    return [each for each in pods if each["metadata"]["labels"].get(names.LABEL_MANAGED_BY) != names.FIELD_MANAGER]


class PodClaims:
    """The pods that the selector of each tier found last, to tell those that two tiers claim. Thread-safe."""

    def __init__(self) -> None:
        """Know of no pod."""
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, frozenset[str]]] = {}
        """By namespace and name of the tier."""

    def note(self, tier: TierRef, uids: Iterable[str]) -> dict[str, str]:
        """Replace the pods of a tier, by uid; return those that another tier found, with its name."""
        mine = frozenset(uids)
        with self._lock:
            there = self._found.setdefault(tier.namespace, {})
            there.pop(tier.name, None)
            claimed = {uid: name for name, found in there.items() for uid in found & mine}
            if mine:
                there[tier.name] = mine
            elif not there:
                del self._found[tier.namespace]
        return claimed


def is_alive(pod: Pod) -> bool:
    """Tell whether a pod runs, or will."""
    return not pod.is_terminating and pod.phase not in {"Succeeded", "Failed"}


def count_engines(pods: Sequence[Pod], config: Manifest | None) -> Engines:
    """Count the attached engines; the ConfigMap of the tier carries what a Deployment of ours would."""
    alive = [pod for pod in pods if is_alive(pod)]
    attached = [pod for pod in alive if is_attached(pod)]
    return Engines(
        generation=int(bool(alive)),
        observed_generation=1,
        replicas=len(attached),
        updated=len(attached),
        ready=sum(pod.is_ready for pod in attached),
        decisions=step_into(config, ("metadata", "annotations", names.ANNOTATION_DECISIONS)) or "",
    )
