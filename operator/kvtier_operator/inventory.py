# SPDX-License-Identifier: Apache-2.0
"""Read the nodes of the cluster, and what runs on them, for all tiers at once.

Nodes change seldom and pods of a large cluster are many, so what was read serves every tier for a while. Pods are
listed only when a tier has a share of a node to decide. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from kvtier_operator import names, quantity
from kvtier_operator.errors import ClusterError, ClusterForbidden
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest
from kvtier_operator.snapshot import Node, Nodes, PodUsage

Read = TypeVar("Read")

FRESH_SECONDS: Final = 60.0
"""How long what was read is good for."""

FORBIDDEN_SECONDS: Final = 600.0
"""After how long a right that is missing is asked for again."""

_NO_DEVICES: Final = frozenset({"cpu", "memory", "ephemeral-storage", "pods"})


class Inventory:
    """The nodes as last seen; `None` from every method where the operator may not look.

    Threads: any; one of them reads, the others wait for it.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        is_allowed: bool,
        clock: Callable[[], float],
        node_stamp: Callable[[], int] = lambda: 0,
    ) -> None:
        """Remember what to read; nothing is ever asked for unless that is allowed.

        Another `node_stamp` tells that nodes have changed, which is then not waited for.
        """
        self._is_allowed = is_allowed
        self._matched = Nodes(nodes=())
        self._nodes = _Cached(
            lambda: tuple(map(node, cluster.list("v1", "Node", namespace="", selector=""))), clock, node_stamp
        )
        self._usage = _Cached(
            lambda: tuple(each for page in cluster.pages("v1", "Pod", namespace="") for each in _usage(page)), clock
        )

    def look(self, *, with_pods: bool) -> Nodes | None:
        """Return the nodes, and what runs on them if that is asked for."""
        nodes = self._nodes.get() if self._is_allowed else None
        if nodes is None:
            return None
        if nodes is not self._matched.nodes:
            self._matched = Nodes(nodes=nodes)
        return replace(self._matched, usage=self._usage.get() if with_pods else None)


class _Cached(Generic[Read]):
    """One answer of the API server and when to ask again; a failure counts as an answer."""

    def __init__(
        self, read: Callable[[], Read], clock: Callable[[], float], stamp: Callable[[], int] = lambda: 0
    ) -> None:
        self._read = read
        self._clock = clock
        self._stamp = stamp
        self._read_at_stamp = 0
        self._lock = threading.Lock()
        self._value: Read | None = None
        self._good_until = float("-inf")

    def get(self) -> Read | None:
        with self._lock:
            stamp = self._stamp()
            if stamp != self._read_at_stamp or self._clock() >= self._good_until:
                seconds, self._read_at_stamp = FRESH_SECONDS, stamp
                try:
                    self._value = self._read()
                except ClusterForbidden:
                    self._value, seconds = None, FORBIDDEN_SECONDS
                except ClusterError:
                    # Whatever stood there a minute ago is a better answer than none.
                    seconds = FRESH_SECONDS / 4
                self._good_until = self._clock() + seconds
            return self._value


def from_objects(objects: Iterable[Manifest]) -> Nodes:
    """Read nodes and pods from objects as kubectl prints them; without pods, nothing is said about usage."""
    items = [item for each in objects for item in each.get("items") or (each,)]
    pods = [item for item in items if item.get("kind") == "Pod"]
    return Nodes(
        nodes=tuple(node(item) for item in items if item.get("kind") == "Node"),
        usage=tuple(_usage(pods)) if pods else (),
    )


def node(found: Manifest) -> Node:
    """Read one node."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    allocatable = status.get("allocatable") or {}
    ready = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}.get("Ready", "True")
    return Node(
        name=metadata["name"],
        labels=dict(metadata.get("labels") or {}),
        taints=tuple(dict(taint) for taint in spec.get("taints") or ()),
        is_open=ready == "True" and not spec.get("unschedulable"),
        memory_bytes=_bytes(allocatable.get("memory")),
        cpu_millis=quantity.parse_millis(str(allocatable.get("cpu", "0"))),
        devices={name: _bytes(amount) for name, amount in allocatable.items() if name not in _NO_DEVICES},
    )


def _usage(pods: Iterable[Manifest]) -> Iterable[PodUsage]:
    for pod in pods:
        spec, metadata = pod.get("spec") or {}, pod["metadata"]
        if not spec.get("nodeName") or (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}:
            continue
        namespace, tier = metadata.get("namespace", ""), (metadata.get("labels") or {}).get(names.LABEL_TIER, "")
        is_engine = names.is_pod_of(pod, names.engine(names.TierName(namespace=namespace, name=tier)))
        requests = _requests(spec)
        yield PodUsage(
            node=spec["nodeName"],
            namespace=namespace,
            tier=tier if is_engine else "",
            memory_bytes=requests.get("memory", 0),
            devices={name: amount for name, amount in requests.items() if name not in _NO_DEVICES},
        )


def _requests(spec: Mapping[str, Any]) -> Counter[str]:
    """Return what the scheduler counts for a pod: its containers together, or an init container that needs more."""
    sidecars, peak = Counter[str](), Counter[str]()
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            sidecars += _of(container)
        else:
            peak |= sidecars + _of(container)
    total = sum(map(_of, spec.get("containers") or ()), sidecars) | peak
    return total + Counter({name: _bytes(amount) for name, amount in (spec.get("overhead") or {}).items()})


def _of(container: Mapping[str, Any]) -> Counter[str]:
    requests = (container.get("resources") or {}).get("requests") or {}
    return Counter({name: _bytes(amount) for name, amount in requests.items() if name != "cpu"})


def _bytes(amount: object) -> int:
    try:
        return 0 if amount is None else quantity.parse_bytes(str(amount))
    except ValueError:
        return 0
