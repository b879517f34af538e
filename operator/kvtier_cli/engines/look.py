# SPDX-License-Identifier: Apache-2.0
"""A look into one engine for ``kvtier status --engine``: its metrics and the warnings of its log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kvtier_cli.client import Where
from kvtier_cli.output import columns
from kvtier_operator import names
from kvtier_operator.observe import engine_view
from kvtier_operator.parts.external.attach import find_engine
from kvtier_operator.parts.external.templates import PORT

Document = dict[str, Any]
_LOG_LINES: Final = 2000
_MOST_WARNINGS: Final = 4


def look_at(where: Where, namespace: str, name: str) -> Document:
    """Return what an engine's pod is doing, with the last warnings of its log about the cache.

    Raises:
        ClusterError: there is no such pod, or it does not answer.
    """
    pod = where.client.ask(f"/api/v1/namespaces/{namespace}/pods/{name}", f"read pod {namespace}/{name}")
    *_, container = page = metrics_page(pod)
    lines = where.client.log(pod, container, lines=_LOG_LINES).splitlines()
    warnings = [each for each in lines if "kvtier" in each and ("WARNING" in each or "ERROR" in each)]
    spec = next(each for each in pod["spec"]["containers"] if each["name"] == container)
    generation = re.search(r'"generation": ?"([^"]+)', json.dumps(spec).replace('\\"', '"'))
    return {
        "pod": f"{namespace}/{name}",
        "tier": (pod["metadata"].get("labels") or {}).get(names.LABEL_TIER, ""),
        "generation": generation[1] if generation else "",
        **engine_view.look(where.client.fetch(pod, *page)),
        "warnings": warnings[-_MOST_WARNINGS:],
    }


def metrics_page(pod: names.Manifest) -> tuple[int, str, str]:
    """Return port, path and container of an engine's metrics: the container of the pod that runs vLLM."""
    port = str((pod["metadata"].get("annotations") or {}).get(PORT, ""))
    engine = find_engine(pod["spec"]) or pod["spec"]["containers"][0]
    return int(port) if port.isdecimal() else names.HTTP_PORT, "/metrics", str(engine["name"])


def engine_page(document: Mapping[str, Any]) -> str:
    """Return a screen about one engine."""
    rows = [("generation", document["generation"])] if document["generation"] else []
    text = f"{document['pod']}  tier {document['tier'] or 'unknown'}\n\n"
    text += columns([*rows, *engine_view.describe(document)], indent=2)
    if document["warnings"]:
        text += "\nLAST WARNINGS\n" + "".join(f"  {line}\n" for line in document["warnings"])
    return text
