# SPDX-License-Identifier: Apache-2.0
"""A tier that is well, what it says once something is changed, and the reasons that the page of conditions lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tiers import tier

from kvtier_connector.contract.usage import Usage
from kvtier_operator import names, status
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import AppliedStage, Observation, Problem, Progress
from kvtier_operator.parts.engine import template_of
from kvtier_operator.plan import Decisions, decide, make_kept_plan, make_plan
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.plan.decisions import make_rendered
from kvtier_operator.snapshot import ContainerStatus, Engines, LiveClaim, LiveJanitor, Node, Pod, Snapshot

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
NODE = Node(
    name="gpu-1",
    labels={"nvidia.com/gpu.memory": "81559"},
    taints=(),
    is_open=True,
    memory_bytes=128 << 30,
    cpu_millis=32000,
    devices={"nvidia.com/gpu": 8},
)


def progress(  # noqa: PLR0913  each by its name
    *,
    spec: TierSpec = SPEC,
    snapshot: Snapshot = HEALTHY,
    decisions: Decisions | None = None,
    observation: Observation | None = None,
    problems: Mapping[str, Problem] | None = None,
    made_by: str = "",
    **stopped_by: Any,
) -> Progress:
    """Return the progress of a reconcile that has applied a tier.

    Args:
        spec: of the tier.
        snapshot: the cluster.
        decisions: for the spec; None makes them.
        observation: the findings of asking the engines.
        problems: of parts.
        made_by: image of the connector that an earlier operator made the engines with.
        stopped_by: fields of `Progress` beside its stage.
    """
    decided = decisions or decide(spec, REF, None)
    decided = decided if isinstance(decided, Decisions) else DECISIONS
    plan = make_plan(spec, snapshot, decided, connector_image="c:2")
    if made_by:
        before = make_plan(spec, snapshot, decided, connector_image=made_by)
        rendered = make_rendered(spec, restart="", config=before.config_text, template=template_of(before))
        plan = make_kept_plan(plan, rendered)
    stage = AppliedStage(
        generation=3,
        spec=spec,
        snapshot=snapshot,
        plan=plan,
        capacity=make_capacity(spec, decided, snapshot, plan.config_digest),
        observation=observation,
        problems=problems or {},
    )
    return Progress(tier=REF, generation=3, spec=spec, stage=stage, **stopped_by)


def varied(before: Progress, **changes: Any) -> Progress:
    """Return the progress of the same reconcile with another spec, snapshot and so on; see `progress`."""
    stage = before.stage
    assert isinstance(stage, AppliedStage)
    kept = {
        "spec": stage.spec,
        "snapshot": stage.snapshot,
        "observation": stage.observation,
        "invalid": before.invalid,
        "refusal": before.refusal,
        "failure": before.failure,
    }
    return progress(**{**kept, **changes})


VIEW = progress()


def conditions(view: Progress, previous: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the conditions by type; each has a reason that the page of conditions lists for it."""
    found = {each["type"]: each for each in status.report(view, previous or {}, now=NOON)["conditions"]}
    for kind in found.keys() - {"Ready", "Reconciling", "Stalled"}:
        assert found[kind]["reason"] in {*SECTIONS[kind], *COMMON}
    return found


def check_problem(view: Progress, condition: str, reason: Reason, words: str) -> None:
    """Check that a problem is told, with these words, in its condition and in Ready."""
    ready = check_verdict(view, condition, "False", reason.value, words)["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", reason.value)


def check_verdict(view: Progress, condition: str, verdict: str, reason: str, words: str) -> dict[str, dict[str, Any]]:
    """Check what a condition says, and return all."""
    found = conditions(view)
    assert (found[condition]["status"], found[condition]["reason"]) == (verdict, reason)
    assert words in found[condition]["message"]
    return found


def changed(**changes: Any) -> Progress:
    """Return the progress of the healthy tier in a cluster that differs in this."""
    return progress(snapshot=replace(HEALTHY, **changes))


def with_claim(**changes: Any) -> Progress:
    return changed(claim=replace(CLAIM, **changes))


def with_engines(engines: Engines = STARTING, **changes: Any) -> Progress:
    return changed(engines=replace(engines, **changes))


def with_pod(**changes: Any) -> Progress:
    """Return the view of a tier whose only pod does not serve yet."""
    return changed(engines=STARTING, pods=(replace(UNREADY_POD, **changes),))


def with_container(**changes: Any) -> Progress:
    return with_pod(containers=(replace(READY_POD.containers[0], **changes),))


PAGE: Final = (Path(__file__).parents[2] / "docs" / "conditions.md").read_text(encoding="utf-8")
COMMON: Final = ("NotChecked", "NotApplicable")
"""Reasons that any condition can have; the end of the page explains them."""


def rows(section: str) -> dict[str, tuple[str, str]]:
    """Return meaning and remedy of each reason in a section."""
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    return {reason: (meaning, remedy) for reason, meaning, remedy in found}


SECTIONS: Final = {each.partition("\n")[0]: rows(each) for each in PAGE.split("\n## ")[1:]}
"""Condition to its reasons, in the order of the page."""
