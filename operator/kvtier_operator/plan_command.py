# SPDX-License-Identifier: Apache-2.0
"""``kvtier plan``: what a tier will take and hold, and what an edit of it would cost, before anything is applied."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from kvtier_operator import names, offline, quantity
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.manifests.edits import explain_edit
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.plan import TierPlan, diff, make_unchecked_plan, nodes, report, terms
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.settings import Settings
from kvtier_operator.snapshot import Engines, Nodes, Snapshot
from kvtier_operator.spec import TierSpec, parse
from kvtier_operator.status.checks import a_node_is_large_enough
from kvtier_operator.status.problems import Look


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command to argparse."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="YAML with KVCacheTier resources, - for standard input"
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="say what it costs to replace OLD by NEW; with one FILE, what stands in the cluster by FILE",
    )
    parser.add_argument("--config", metavar="JSON", help="the model's config.json, where its name does not tell")
    parser.add_argument(
        "--nodes", metavar="FILE", help="nodes and pods as `kubectl get nodes,pods -A -o yaml` prints them"
    )
    parser.add_argument("--json", action="store_true", help="print numbers instead of a page")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 also where no node holds what is planned.

    Raises:
        OperatorError: a file or the cluster does not allow it.
        OSError: a file cannot be read.
    """
    if options.diff:
        return _diff(settings, options)
    if len(options.files) != 1:
        raise SpecInvalid("kvtier plan", "takes one FILE; to compare two, add --diff")
    found_nodes = read_nodes(options.nodes)
    config = None if options.config is None else offline.read_config(options.config)
    documents: list[dict[str, Any]] = []
    pages, is_fitting = [], True
    for body in offline.read_tiers(options.files[0]):
        spec, tier = _parse(body, config), names.tier_ref(body)
        snapshot = make_snapshot(tier, found_nodes)
        plan = make_unchecked_plan(spec, tier, connector_image=settings.connector_image, snapshot=snapshot)
        capacity = make_capacity(spec, plan.decisions, snapshot)
        fits, fits_some = _fit(plan, snapshot)
        is_fitting = is_fitting and fits_some
        pages.append(report.describe(plan, capacity, fits=fits))
        documents.append(
            {
                "tier": str(tier),
                "model": spec.model.name,
                "generation": plan.generation.digest,
                "sizing": terms.terms(plan.sizing, capacity, node_bytes=plan.decisions.node_bytes),
                **({} if fits is None else {"nodes": {"fits": fits_some, "message": fits}}),
            }
        )
    _print(json.dumps(documents, indent=2) + "\n" if options.json else "\n".join(pages))
    return 0 if is_fitting else 1


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
    documents = offline.read_documents(file)
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
    matching = nodes.matching(plan.spec, snapshot.nodes.nodes)
    large = [node for node in matching if node.memory_bytes >= plan.sizing.memory_bytes]
    least = nodes.smallest(plan.spec, plan.tier, snapshot.nodes)
    assert least is not None
    return (
        f"{len(large)} of {len(snapshot.nodes.nodes)} could hold an engine pod of "
        f"{quantity.show_bytes(plan.sizing.memory_bytes)}; the smallest that matches, {least[0].name}, has "
        f"{quantity.show_bytes(least[1])} left"
    ), True


def _diff(settings: Settings, options: argparse.Namespace) -> int:
    if len(options.files) > 2:  # noqa: PLR2004  OLD and NEW
        raise SpecInvalid("kvtier plan --diff", "takes OLD and NEW, or one FILE to compare with the cluster")
    new = {str(names.tier_ref(body)): body for body in offline.read_tiers(options.files[-1])}
    is_live = len(options.files) == 1
    old = _live(new.values()) if is_live else {str(names.tier_ref(b)): b for b in offline.read_tiers(options.files[0])}
    found_nodes = read_nodes(options.nodes)
    documents: list[dict[str, Any]] = []
    pages = []
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            pages.append(f"{name}: {'is new' if name in new else 'is gone; its claim stays or goes as it says'}\n")
            documents.append({"tier": name, "only": "after" if name in new else "before"})
            continue
        tier = names.tier_ref(old[name])
        found = explain_edit(
            parse(old[name]),
            parse(new[name]),
            tier,
            connector_image=settings.connector_image,
            snapshot=_live_snapshot(old[name]) if is_live else make_snapshot(tier, found_nodes),
            warm_bytes=diff.warm_bytes(old[name].get("status") or {}),
        )
        pages.append(report.describe_diff(name, found))
        documents.append({"tier": name, **asdict(found), "warnings": diff.warnings(found)})
    _print(json.dumps(documents, indent=2) + "\n" if options.json else "\n".join(pages))
    return 0


def _live(bodies: Iterable[Manifest]) -> dict[str, Manifest]:
    """Return the tiers of the same names that stand in the cluster."""
    from kvtier_operator.cluster import connect  # noqa: PLC0415  takes a second

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
    from kvtier_operator.cluster import connect  # noqa: PLC0415  takes a second
    from kvtier_operator.gather import gather  # noqa: PLC0415  takes a second
    from kvtier_operator.inventory import Inventory  # noqa: PLC0415  takes a second

    cluster = connect()
    existing = parse(body).volume.existing_claim
    found = gather(cluster, names.tier_ref(body), existing_claim=existing, now=datetime.now(UTC))
    inventory = Inventory(cluster, is_allowed=True, clock=time.monotonic)
    return replace(found, nodes=inventory.look(with_pods=True))


def _print(text: str) -> None:
    sys.stdout.write(text)
