# SPDX-License-Identifier: Apache-2.0
"""What a tier will take and hold, and what an edit of it would cost, before anything is applied."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic.alias_generators import to_camel

from kvtier_cli import input_files
from kvtier_operator import names, quantity
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.api.parse import read_annotations
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.parts import pod_security
from kvtier_operator.parts.edits import applicable_spec, explain_edit
from kvtier_operator.parts.engine_checks import a_node_is_large_enough
from kvtier_operator.plan import TierPlan, diff, make_unchecked_plan, nodes, report
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.problems import Look
from kvtier_operator.settings import Settings
from kvtier_operator.snapshot import Engines, Nodes, Snapshot


class Planned(NamedTuple):
    """What was worked out: as documents, as a page, and whether a node holds it."""

    documents: list[dict[str, Any]]
    page: str
    is_fitting: bool = True


def plan(settings: Settings, file: str, *, config_file: str | None, nodes_file: str | None) -> Planned:
    """Plan the tiers of a file.

    Raises:
        OperatorError: a file does not allow it.
        OSError: a file cannot be read.
    """
    found_nodes = read_nodes(nodes_file)
    config = None if config_file is None else input_files.read_config(config_file)
    documents: list[dict[str, Any]] = []
    pages, is_fitting = [], True
    for body in input_files.read_tiers(file):
        spec, tier = _parse(body, config), names.tier_ref(body)
        snapshot = make_snapshot(tier, found_nodes)
        made = make_unchecked_plan(spec, tier, connector_image=settings.connector_image, snapshot=snapshot)
        capacity = make_capacity(spec, made.decisions, snapshot)
        fits, fits_some = _fit(made, snapshot)
        is_fitting = is_fitting and fits_some
        warning = pod_security.warning(spec.engine.pod_template)
        pages.append(report.describe(made, capacity, fits=fits, warning=warning))
        documents.append(
            {
                "tier": str(tier),
                "model": spec.model.name,
                "generation": made.generation.digest,
                "sizing": report.terms(made.sizing, capacity, node_bytes=made.decisions.node_bytes),
                **({} if fits is None else {"nodes": {"fits": fits_some, "message": fits}}),
            }
        )
    return Planned(documents, "\n".join(pages), is_fitting)


def read_nodes(file: str | None) -> Nodes | None:
    """Return the nodes of a file, if one is given.

    Raises:
        SpecInvalid: it holds none.
        OSError: it cannot be read.
    """
    if file is None:
        return None
    # The client of the cluster takes a second to import, which the rest does not need.
    from kvtier_operator.inventory import from_objects  # noqa: PLC0415  takes a second

    remedy = "kubectl get nodes,pods -A -o yaml prints what belongs there"
    documents = input_files.read_documents(file)
    try:
        found = from_objects(item for item in documents if isinstance(item, dict))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SpecInvalid(file, f"holds a node or a pod that cannot be read ({error!r}): {remedy}") from error
    if not found.nodes:
        raise SpecInvalid(file, f"holds no nodes: {remedy}")
    return found


def _parse(body: Manifest, config: Mapping[str, Any] | None) -> TierSpec:
    spec = body.get("spec")
    if config is None or not isinstance(spec, Mapping) or not isinstance(spec.get("model"), Mapping):
        return parse(body)
    return parse({**body, "spec": {**spec, "model": {**spec["model"], "config": config}}})


def make_snapshot(tier: TierRef, found: Nodes | None) -> Snapshot | None:
    """Return the look at a cluster of which only the nodes are known."""
    if found is None:
        return None
    return Snapshot(tier=tier, claim=None, engines=Engines(), pods=(), live={}, nodes=found)


def _fit(plan: TierPlan, snapshot: Snapshot | None) -> tuple[str | None, bool]:
    """Say what the nodes mean for the pods."""
    if snapshot is None or snapshot.nodes is None:
        return None, True
    problem = a_node_is_large_enough(Look(spec=plan.spec, snapshot=snapshot, sizing=plan.sizing))
    if problem is not None:
        return problem.message, False
    matching = nodes.matching(plan.spec, snapshot.nodes)
    memory = plan.sizing.memory_bytes + nodes.beside(plan.spec)[0]
    large = [node for node in matching if node.memory_bytes >= memory]
    least = nodes.smallest(plan.spec, plan.tier, snapshot.nodes)
    assert least is not None
    return (
        f"{len(large)} of {len(snapshot.nodes.nodes)} could hold an engine pod of "
        f"{quantity.show_bytes(memory)}; the smallest that matches, {least[0].name}, has "
        f"{quantity.show_bytes(least[1])} left"
    ), True


def compare(settings: Settings, files: Sequence[str], *, nodes_file: str | None) -> Planned:
    """Say what it costs to replace the tiers of one file by those of another, or what stands in the cluster.

    Raises:
        OperatorError: a file or the cluster does not allow it.
        OSError: a file cannot be read.
    """
    new = {str(names.tier_ref(body)): body for body in input_files.read_tiers(files[-1])}
    is_live = len(files) == 1
    old = _live(new.values()) if is_live else {str(names.tier_ref(b)): b for b in input_files.read_tiers(files[0])}
    found_nodes = read_nodes(nodes_file)
    documents: list[dict[str, Any]] = []
    pages = []
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            pages.append(f"{name}: {'is new' if name in new else 'is gone; its claim stays or goes as it says'}\n")
            documents.append({"tier": name, "only": "after" if name in new else "before"})
            continue
        tier = names.tier_ref(old[name])
        snapshot = _live_snapshot(old[name]) if is_live else make_snapshot(tier, found_nodes)
        # An annotation that the file does not name stays as it is.
        restart = read_annotations(new[name]).restart or read_annotations(old[name]).restart
        found = explain_edit(
            _stored(old[name], snapshot, connector_image=settings.connector_image, restart=restart),
            parse(new[name]),
            tier,
            connector_image=settings.connector_image,
            snapshot=snapshot,
            restart=restart,
            warm_bytes=diff.warm_bytes(old[name].get("status") or {}),
        )
        pages.append(report.describe_diff(name, found))
        documents.append({"tier": name, **_document(found), "warnings": diff.warnings(found)})
    return Planned(documents, "\n".join(pages))


def _stored(body: Manifest, snapshot: Snapshot | None, *, connector_image: str, restart: str) -> TierSpec:
    """Return the spec that the operator carries out of a tier."""
    try:
        return parse(body)
    except SpecInvalid:
        runs = None
        if snapshot is not None:
            runs = applicable_spec(body.get("spec"), snapshot, connector_image=connector_image, restart=restart)
        if runs is None:
            raise
        return runs


def _document(found: diff.Diff) -> dict[str, Any]:
    """Write an edit as the API writes its fields; what stands in a field of the tier stays as it is."""
    document = {to_camel(name): value for name, value in asdict(found).items()}
    document["changes"] = [{to_camel(name): value for name, value in each.items()} for each in document["changes"]]
    return document


def _live(bodies: Iterable[Manifest]) -> dict[str, Manifest]:
    """Return the tiers of the same names that stand in the cluster."""
    from kvtier_operator.kube.client import connect  # noqa: PLC0415  takes a second

    cluster, found = connect(), {}
    for body in bodies:
        tier = names.tier_ref(body)
        key = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name)
        live = cluster.get(key, tier.namespace)
        if live is not None:
            found[str(tier)] = live
    return found


def _live_snapshot(body: Manifest) -> Snapshot:
    """Return what stands of a tier in the cluster, with nodes and pods where one may read them."""
    from kvtier_operator.gather import gather  # noqa: PLC0415  takes a second
    from kvtier_operator.inventory import Inventory  # noqa: PLC0415  takes a second
    from kvtier_operator.kube.client import connect  # noqa: PLC0415  takes a second

    cluster = connect()
    existing = names.existing_claim_of(body)
    found = gather(cluster, names.tier_ref(body), existing_claim=existing, now=datetime.now(UTC))
    inventory = Inventory(cluster, is_allowed=True, clock=time.monotonic)
    return replace(found, nodes=inventory.look(with_pods=True))
