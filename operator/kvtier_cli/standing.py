# SPDX-License-Identifier: Apache-2.0
"""How a tier stands: what the operator says of it, and what its engines and its janitor answer when they are asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvtier_cli.targets import Where
from kvtier_connector.contract_janitor import JANITOR_PORT
from kvtier_connector.contract_usage import USAGE_PATH
from kvtier_operator import names
from kvtier_operator.errors import OperatorError

Document = dict[str, Any]
SOURCES: Final = {"device": "GPU", "host": "CPU", "disk": "disk", "p2p": "peers"}
"""Where vLLM says cached tokens came from, and what people call it."""
_MOST_ASKED: Final = 8
_LINE: Final = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$")
_SOURCE: Final = re.compile(r'source="(\w+)"')
_PROMPT: Final = "vllm:prompt_tokens_total"
_CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"
_SAVED: Final = "vllm:kvtier_disk_saved_seconds_total"
_COMPUTE_RATE: Final = "vllm:kvtier_disk_compute_tokens_per_second"
_LOAD_RATE: Final = "vllm:kvtier_disk_load_tokens_per_second"


def look(where: Where, namespace: str, tier: str, *, asks_pods: bool) -> Document:
    """Return how one tier stands.

    Args:
        where: the cluster.
        namespace: of the tier.
        tier: its name.
        asks_pods: whether engines and janitor are asked, too.

    Raises:
        ClusterError: there is none, or it cannot be read.
    """
    body = where.person.tier(namespace, tier)
    status = body.get("status") or {}
    pods = where.person.pods(namespace, tier, names.COMPONENT_ENGINE)
    document: Document = {
        "tier": f"{namespace}/{tier}",
        "model": (body["spec"].get("model") or {}).get("name", ""),
        "mode": (body["spec"].get("disk") or {}).get("mode", "ReadWrite"),
        "engines": [_engine(each) for each in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))],
        "wanted": body["spec"].get("replicas", 1),
        "conditions": [
            {name: each.get(name, "") for name in ("type", "status", "reason", "message")}
            for each in status.get("conditions", ())
        ],
        **{name: status.get(name) for name in ("sizing", "storage", "generation", "generations", "tiers")},
    }
    if asks_pods:
        document |= _ask(where, namespace, tier, pods)
    return document


def _engine(pod: names.Manifest) -> Document:
    status = pod.get("status", {})
    containers = status.get("containerStatuses") or ()
    return {
        "pod": pod["metadata"]["name"],
        "node": pod.get("spec", {}).get("nodeName", ""),
        "phase": "Terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Unknown"),
        "ready": is_ready(pod),
        "started": status.get("startTime", ""),
        "restarts": sum(int(each.get("restartCount", 0)) for each in containers),
    }


def is_ready(pod: names.Manifest) -> bool:
    """Tell whether a pod gets requests."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any((each.get("type"), each.get("status")) == ("Ready", "True") for each in conditions)


def _ask(where: Where, namespace: str, tier: str, pods: list[names.Manifest]) -> Document:
    """Ask the pods that serve; who does not answer is named, and counts for nothing."""
    asked = [pod for pod in pods if is_ready(pod)][:_MOST_ASKED]
    janitors = [pod for pod in where.person.pods(namespace, tier, names.COMPONENT_JANITOR) if is_ready(pod)][:1]
    pages = [(pod, names.HTTP_PORT, "/metrics") for pod in asked]
    pages += [(pod, JANITOR_PORT, USAGE_PATH) for pod in janitors]
    silent: list[str] = []

    def fetch(page: tuple[names.Manifest, int, str]) -> str:
        try:
            text: str = where.person.fetch(*page)
        except OperatorError as error:
            silent.append(str(error))
            return ""
        return text

    with ThreadPoolExecutor(max_workers=_MOST_ASKED + 1) as pool:
        texts = list(pool.map(fetch, pages))
    usage = json.loads(texts[-1]) if janitors and texts[-1] else None
    return {"hits": hits(texts[: len(asked)]), "usage": usage, "silent": silent}


def hits(expositions: list[str]) -> Document:
    """Add up what engines say of prompt tokens since they started; empty where none says anything."""
    totals: dict[str, float] = {}
    rates: dict[str, list[float]] = {_COMPUTE_RATE: [], _LOAD_RATE: []}
    prompt, seconds = 0.0, 0.0
    for text in expositions:
        cached, rate, counted = 0.0, 0.0, 0.0
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name, labels, value = match[1], match[2] or "", float(match[3])
            if name == _PROMPT:
                prompt += value
            elif name == _CACHED and (source := _SOURCE.search(labels)):
                totals[source[1]] = totals.get(source[1], 0.0) + value
                cached += value if source[1] == "disk" else 0.0
            elif name == _SAVED:
                counted += value
            elif name in rates and value > 0:
                rates[name].append(value)
                rate = max(rate, value) if name == _COMPUTE_RATE else rate
        # An engine with an earlier connector counts no seconds.
        seconds += counted or (cached / rate if rate else 0.0)
    if not expositions:
        return {}
    return {
        "promptTokens": round(prompt),
        "bySource": {source: round(count) for source, count in totals.items() if count},
        "computeTokensPerSecond": _mean(rates[_COMPUTE_RATE]),
        "loadTokensPerSecond": _mean(rates[_LOAD_RATE]),
        "prefillSecondsNotSpent": round(seconds, 1),
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 1) if values else 0.0


def ready(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the condition that sums the others up."""
    return next(
        (each for each in document["conditions"] if each["type"] == "Ready"),
        {"type": "Ready", "status": "Unknown", "reason": "NoOperator", "message": ""},
    )
