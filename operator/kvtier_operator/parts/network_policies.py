# SPDX-License-Identifier: Apache-2.0
"""The NetworkPolicies of a tier: the least traffic with which each component works. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtier_connector.contract.janitor import JANITOR_PORT
from kvtier_operator import names
from kvtier_operator.api.routing_spec import EVENTS_PORT, REPLAY_PORT
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts.connectors import stores
from kvtier_operator.parts.part import Part
from kvtier_operator.parts.routing import METRICS_PORT
from kvtier_operator.plan import TierPlan

API_VERSION: Final = "networking.k8s.io/v1"
KIND: Final = "NetworkPolicy"
_OPERATOR: Final = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "kvtier", names.LABEL_COMPONENT: "operator"}},
}
"""The operator's pods, whose namespace a tier does not know."""
_DNS_PORTS: Final = (53, 5353)
"""Of the Service, and of OpenShift's pods behind it: many network plugins look at the port of the pod."""
_EVERY_POD_OF_THE_NAMESPACE: Final[tuple[Manifest, ...]] = ({"podSelector": {}},)


def policies(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the policies; none where the tier asks for none."""
    spec, tier, settings = plan.spec, plan.tier, plan.spec.network_policy
    if settings is None:
        return ()
    clients = _EVERY_POD_OF_THE_NAMESPACE if settings.clients is None else settings.clients
    watchers = (_OPERATOR, *settings.scrapers)
    of_tier, http = _of_tier(plan), _ports(names.HTTP_PORT)
    # Data-parallel ranks publish on the ports after the first.
    every_rank = {**_ports(EVENTS_PORT)[0], "endPort": 2 * REPLAY_PORT - EVENTS_PORT - 1}
    events = [] if spec.kv_events is None else [every_rank]
    hub = ({"ports": _ports(443)},) if settings.egress is None else settings.egress
    ports = _ports(*settings.api_server_ports)
    api_server = _rules("to", settings.api_server, ports) or ({"ports": ports},)
    from_tier, to_tier = {"from": of_tier}, {"to": of_tier}
    made = []
    if spec.engine.external is None:
        served = (from_tier, *_rules("from", clients, http + events), *_rules("from", watchers, http))
        made.append(_policy(plan, names.engine(tier), names.COMPONENT_ENGINE, served, (to_tier, *hub)))
    if plan.janitor is not None:
        served = _rules("from", watchers, _ports(JANITOR_PORT)) + _rules("from", clients if events else (), events)
        made.append(_policy(plan, names.janitor(tier), names.COMPONENT_JANITOR, served, api_server))
    if spec.routing.router_settings is not None:
        served = _rules("from", clients, http) + _rules("from", settings.scrapers, _ports(METRICS_PORT))
        made.append(_policy(plan, names.router(tier), names.COMPONENT_ROUTER, served, (to_tier, *api_server)))
    for server in stores.servers(plan):
        if server["kind"] == "Deployment":
            name = server["metadata"]["name"]
            made.append(_policy(plan, name, names.COMPONENT_STORE, (from_tier,), (to_tier,)))
    if spec.connector.uses_volume and spec.proof.preflight == "Always":
        made.append(_policy(plan, names.preflight(tier), names.COMPONENT_PREFLIGHT, (), None))
    return tuple(made)


def _of_tier(plan: TierPlan) -> list[Manifest]:
    """Return the pods that engines talk to: those of the tier, and with NIXL the engines of its other role."""
    own = {names.LABEL_MANAGED_BY: names.FIELD_MANAGER, names.LABEL_TIER: plan.tier.name}
    others = {names.LABEL_MANAGED_BY: names.FIELD_MANAGER, names.LABEL_COMPONENT: names.COMPONENT_ENGINE}
    hybrid = plan.spec.connector.hybrid
    selected = [own] if hybrid is None or hybrid.nixl is None else [own, others]
    return [{"podSelector": {"matchLabels": labels}} for labels in selected]


def _policy(
    plan: TierPlan, name: str, component: str, ingress: Iterable[Any], egress: Iterable[Any] | None
) -> Manifest:
    """Return a policy; with an egress of None, the pods cannot even ask DNS."""
    dns = {"ports": [{"port": port, "protocol": protocol} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": names.metadata(plan.tier, name, component=component),
        "spec": {
            "podSelector": {"matchLabels": names.selector(plan.tier, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(ingress),
            "egress": [] if egress is None else [dns, *egress],
        },
    }


def _rules(side: str, peers: Sequence[Any], ports: list[Manifest]) -> tuple[Manifest, ...]:
    """Return a rule for these peers; none without peers, because a rule that names none is for every address."""
    return ({side: list(peers), "ports": ports},) if peers else ()


def _ports(*numbers: int) -> list[Manifest]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


_NAMES: Final = (names.engine, names.janitor, names.router, names.redis, names.mooncake_master, names.preflight)
"""Each policy is named as the pods that it selects."""

# Applied before the pods, which would talk to every address until then.
NETWORK_POLICIES: Final = Part(
    name="network policies",
    keys=lambda tier: tuple(ObjectKey(api_version=API_VERSION, kind=KIND, name=name(tier)) for name in _NAMES),
    wants=lambda work: policies(work.plan),
)
