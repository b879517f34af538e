# SPDX-License-Identifier: Apache-2.0
"""Configuration of Prometheus, made from the chart's PodMonitors as the Prometheus operator would make it.

A selector, port or label of the chart that does not fit the pods shows as a missing target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Manifest = Mapping[str, Any]

_POD = "__meta_kubernetes_pod_"


def _label(name: str) -> str:
    return f"{_POD}label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"


def _keep(source: str, wanted: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [source], "regex": re.escape(wanted)}


def scrape_config(monitor: Manifest, targets_file: str) -> dict[str, Any]:
    """Return the scrape configuration that a PodMonitor with one endpoint stands for."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    return {
        "job_name": f"podMonitor/{monitor['metadata']['name']}",
        "honor_labels": endpoint.get("honorLabels", False),
        "file_sd_configs": [{"files": [targets_file], "refresh_interval": "5s"}],
        "relabel_configs": [
            *(_keep(_label(name), value) for name, value in wanted.items()),
            _keep(f"{_POD}container_port_name", endpoint["port"]),
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{_POD}container_name"], "target_label": "container"},
            {"source_labels": [f"{_POD}name"], "target_label": "pod"},
            *(
                {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]}
                for each in endpoint.get("relabelings", ())
            ),
        ],
    }


def targets(pods: Iterable[Manifest]) -> list[dict[str, Any]]:
    """Return one target for each port of each container of these pods, with what Kubernetes discovery says of it."""
    found = []
    for pod in pods:
        metadata, address = pod["metadata"], pod.get("status", {}).get("podIP")
        about = {"__meta_kubernetes_namespace": metadata["namespace"], f"{_POD}name": metadata["name"]}
        about |= {_label(name): value for name, value in metadata.get("labels", {}).items()}
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()) if address else ():
                labels = {
                    **about,
                    f"{_POD}container_name": container["name"],
                    f"{_POD}container_port_name": port.get("name", ""),
                }
                found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels})
    return found
