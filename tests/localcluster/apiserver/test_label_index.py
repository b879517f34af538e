# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any

from kvtier_localcluster.apiserver import ApiServerThread


def test_a_selector_finds_what_carries_the_label_now_and_nothing_else() -> None:
    with ApiServerThread() as api:
        path = f"{api.url}/api/v1/namespaces/default/configmaps"

        def send(method: str, url: str, body: object = None, kind: str = "application/json") -> dict[str, Any]:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url, method=method, data=data, headers={"Content-Type": kind})
            with urllib.request.urlopen(request, timeout=60) as response:
                found: dict[str, Any] = json.load(response)
                return found

        def selected(selector: str) -> list[str]:
            items = send("GET", f"{path}?labelSelector={urllib.parse.quote(selector)}")["items"]
            return [item["metadata"]["name"] for item in items]

        def relabel(name: str, labels: dict[str, str | None]) -> None:
            send("PATCH", f"{path}/{name}", {"metadata": {"labels": labels}}, "application/merge-patch+json")

        for name, labels in {"c": {"a": "1"}, "b": {"a": "1", "x": "y"}, "d": {}}.items():
            api.create(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": name, "namespace": "default", "labels": labels},
                }
            )
        assert selected("a=1") == ["b", "c"]
        assert selected("a == 1,x in (y,z)") == ["b"]
        assert "d" in selected("a!=1")
        assert not {"b", "c"} & set(selected("!a"))
        relabel("d", {"a": "1"})
        relabel("b", {"a": "2"})
        assert selected("a=1") == ["c", "d"]
        relabel("c", {"a": None})
        send("DELETE", f"{path}/d")
        assert selected("a=1") == []
        assert selected("a=2") == ["b"]
        assert selected("nobody=has") == []
