# SPDX-License-Identifier: Apache-2.0
"""A tier that is well, and what it says of itself once something about it is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiers import tier

from kvtier_connector.contract.usage import Usage
from kvtier_operator import names, status
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import REASONS
from kvtier_operator.plan import Decisions, decide, make_generation, sizing_of
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.snapshot import ContainerStatus, Engines, LiveClaim, LiveJanitor, Node, Pod, Snapshot
from kvtier_operator.status import Reason

NOON, LATER = "2026-01-01T12:00:00Z", "2026-01-01T13:00:00Z"
REF = names.TierRef(namespace="serving", name="llama", uid="u1")
SPEC = parse(tier())
CLAIM = LiveClaim(
    name="llama-blocks",
    access_modes=("ReadWriteMany",),
    storage_class_name="cephfs",
    requested_bytes=2 << 40,
    phase="Bound",
)
DECISIONS = decide(SPEC, REF, None)
assert isinstance(DECISIONS, Decisions)
READY_POD = Pod(
    name="llama-engine-0",
    phase="Running",
    is_ready=True,
    is_terminating=False,
    is_scheduled=True,
    scheduling_message="",
    config_digest="d",
    hash_seed="0",
    hash_algorithm="sha256_cbor",
    containers=(ContainerStatus(name="engine", image="vllm"),),
)
UNREADY_POD = replace(READY_POD, is_ready=False, phase="Pending")
STARTING = Engines(generation=1, observed_generation=1, replicas=2, updated=2, ready=0)
READY = replace(STARTING, ready=2)
USAGE = Usage(tier="serving/llama", is_active=True, is_counted=True, used_bytes=1 << 40, blocks=1 << 20)
HEALTHY = Snapshot(tier=REF, claim=CLAIM, engines=READY, pods=(READY_POD,), live={}, janitor=LiveJanitor(usage=USAGE))
VIEW = status.View(
    generation=3,
    tier=REF,
    spec=SPEC,
    snapshot=HEALTHY,
    sizing=sizing_of(SPEC, DECISIONS),
    capacity=make_capacity(SPEC, DECISIONS, HEALTHY),
    current=make_generation(SPEC, REF, DECISIONS),
)
NODE = Node(
    name="gpu-1",
    labels={"nvidia.com/gpu.memory": "81559"},
    taints=(),
    is_open=True,
    memory_bytes=128 << 30,
    cpu_millis=32000,
    devices={"nvidia.com/gpu": 8},
)


def conditions(view: status.View, previous: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the conditions by type; each has a reason that the page of conditions lists for it."""
    found = {each["type"]: each for each in status.report(view, previous or {}, now=NOON)["conditions"]}
    summaries = {"Ready", "Reconciling", "Stalled"}
    for kind in found.keys() - summaries:
        assert Reason(found[kind]["reason"]) in {*REASONS[kind], Reason.NOT_CHECKED}
    return found


def check_problem(view: status.View, condition: str, reason: Reason, words: str) -> None:
    """Check that a problem is told, with these words, in its condition and in Ready."""
    found = conditions(view)
    assert (found[condition]["status"], found[condition]["reason"]) == ("False", reason.value)
    assert words in found[condition]["message"]
    assert (found["Ready"]["status"], found["Ready"]["reason"]) == ("False", reason.value)


def changed(**changes: Any) -> status.View:
    """Return the view of the healthy tier in a cluster that differs in this."""
    return replace(VIEW, snapshot=replace(HEALTHY, **changes))


def with_claim(**changes: Any) -> status.View:
    return changed(claim=replace(CLAIM, **changes))


def with_engines(engines: Engines = STARTING, **changes: Any) -> status.View:
    return changed(engines=replace(engines, **changes))


def with_pod(**changes: Any) -> status.View:
    """Return the view of a tier whose only pod does not serve yet."""
    return changed(engines=STARTING, pods=(replace(UNREADY_POD, **changes),))


def with_container(**changes: Any) -> status.View:
    return with_pod(containers=(replace(READY_POD.containers[0], **changes),))
