# SPDX-License-Identifier: Apache-2.0
"""The chart: valid for the oldest and the newest Kubernetes, refusing what cannot work, and installed for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from chart import CHART, NAMESPACE, ROOT, HelmFailed, helm, render, render_text, tools

from kvtier_localcluster.apiserver import ApiServerThread, structural_problems
from kvtier_operator import names
from kvtier_operator.parts.external.templates import PORT

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

GOLDEN = Path(__file__).parent / "golden_chart"
OLDEST, NEWEST = "1.29", "1.37"
SCHEMALESS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}

VALUES: dict[str, dict[str, Any]] = TABLES["values"]


@pytest.mark.parametrize("case", VALUES)
def test_what_is_rendered_is_valid_in_the_oldest_and_the_newest_kubernetes(case: str) -> None:
    values = VALUES[case] if case == "default" else {**VALUES[case], "crds": {"install": False}}
    for version in (OLDEST, NEWEST):
        for manifest in render(values, f"--kube-version={version}.0"):
            if manifest["kind"] not in SCHEMALESS:
                kubernetes_schemas.validate(manifest, version)


@pytest.mark.parametrize("case", ["default", "namespaced", "replicas", "monitors"])
def test_what_is_rendered_is_as_it_was_reviewed(case: str, request: pytest.FixtureRequest) -> None:
    text = render_text({**VALUES[case], "crds": {"install": False}})
    path = GOLDEN / f"{case}.yaml"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "make golden, and review the diff"


@pytest.mark.parametrize(("values", "complaint"), TABLES["refused"])
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(HelmFailed, match=complaint):
        render(values)


MONITORING = VALUES["monitoring"]


@pytest.mark.parametrize("component", ["engine", "janitor"])
def test_the_monitors_choose_the_pods_that_the_operator_makes_and_a_port_that_they_have(component: str) -> None:
    monitors = {found["metadata"]["name"]: found for found in render(MONITORING) if found["kind"] == "PodMonitor"}
    spec = monitors[f"kvtier-operator-{component}s"]["spec"]
    made = yaml.safe_load_all((Path(__file__).parent / "golden" / "minimal" / "expected.yaml").read_text())
    (template,) = (
        each["spec"]["template"]
        for each in made
        if each["kind"] == "Deployment" and each["metadata"]["name"] == f"llama-{component}"
    )
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for each in template["spec"]["containers"] for port in each["ports"]}
    (relabelled,) = endpoint["relabelings"]
    (source,) = relabelled["sourceLabels"]
    named = {
        "__meta_kubernetes_pod_label_" + re.sub("[^a-zA-Z0-9]", "_", label): value
        for label, value in template["metadata"]["labels"].items()
    }
    assert named[source] == "llama"


def test_tiers_are_scraped_where_they_are_served() -> None:
    assert {
        each["spec"]["namespaceSelector"]["any"] for each in render(MONITORING) if each["kind"] == "PodMonitor"
    } == {True}
    scoped = render({**MONITORING, **VALUES["namespaced"]})
    chosen = [each["spec"]["namespaceSelector"] for each in scoped if each["kind"] == "PodMonitor"]
    assert chosen == [{"matchNames": ["team-a", "team-b"]}] * 4


def relabel(labels: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, str] | None:
    """Return the labels of a target as Prometheus makes them; None if it is dropped."""
    for rule in rules:
        value = ";".join(labels.get(each, "") for each in rule.get("sourceLabels", ()))
        match = re.fullmatch(rule.get("regex", "(.*)"), value)
        if rule.get("action") == "keep" and match is None:
            return None
        if rule.get("action", "replace") == "replace" and match is not None:
            template = re.sub(r"\$(\d)", r"\\\1", rule.get("replacement", "$1"))
            labels = {**labels, rule["targetLabel"]: match.expand(template)}
    return {name: value for name, value in labels.items() if value}


@pytest.mark.parametrize(("address", "target"), [("10.0.0.7", "10.0.0.7:8080"), ("fd00::7", "[fd00::7]:8080")])
def test_an_attached_pod_is_scraped_once_at_the_port_of_its_annotation(address: str, target: str) -> None:
    monitors = {found["metadata"]["name"]: found for found in render(MONITORING) if found["kind"] == "PodMonitor"}
    spec = monitors["kvtier-operator-attached"]["spec"]
    has_tier, not_ours = spec["selector"]["matchExpressions"]
    assert (has_tier["key"], has_tier["operator"]) == (names.LABEL_TIER, "Exists")
    assert (not_ours["key"], not_ours["values"]) == (names.LABEL_MANAGED_BY, [names.FIELD_MANAGER])
    (endpoint,) = spec["podMetricsEndpoints"]
    annotation = "__meta_kubernetes_pod_annotation_" + re.sub("[^a-zA-Z0-9]", "_", PORT)
    found = [
        relabel(
            {
                "__address__": f"{address}:{port}",
                "__meta_kubernetes_pod_ip": address,
                "__meta_kubernetes_pod_label_kvtier_dev_tier": "llama",
                "container": container,
                **({annotation: "8080"} if is_attached else {}),
            },
            endpoint["relabelings"],
        )
        for port, container, is_attached in ((8080, "main", True), (15020, "proxy", True), (8080, "main", False))
    ]
    one, again, stranger = found
    assert stranger is None
    assert one == again
    assert one is not None
    assert (one["__address__"], one["tier"]) == (target, "llama")
    assert "container" not in one


def test_the_rules_of_the_chart_are_those_that_are_tested_and_each_alert_leads_to_its_section() -> None:
    (rule,) = (found for found in render(MONITORING) if found["kind"] == "PrometheusRule")
    groups = [
        group
        for name in ("recording", "alerts")
        for group in yaml.safe_load((CHART / "rules" / f"{name}.yaml").read_text())["groups"]
    ]
    links = [
        each["annotations"].pop("runbook_url")
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if "alert" in each
    ]
    assert rule["spec"]["groups"] == groups
    sections = {
        "#" + title.lower()
        for title in re.findall(r"^### (KVTier\w+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    }
    assert {
        link.removeprefix("https://github.com/kvtier/kvtier/blob/main/docs/troubleshooting.md") for link in links
    } == sections


def test_a_limit_that_was_taken_out_stays_out_and_each_dashboard_comes_as_the_sidecar_wants() -> None:
    maps = [found for found in render(MONITORING) if found["kind"] == "ConfigMap"]
    assert {name for each in maps for name in each["data"]} == {
        f"kvtier-{each}.json" for each in ("fleet", "tier", "janitor")
    }
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "kvtier"}
        (text,) = each["data"].values()
        assert json.loads(text)["uid"].startswith("kvtier-")
    deployment = next(each for each in render({"resources": {"limits": None}}) if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"].keys() == {"requests"}


def test_helm_complains_of_nothing_and_a_longest_release_name_still_makes_valid_names() -> None:
    helm("lint", "--strict", str(CHART))
    for manifest in render({"replicas": 2}, release="r" * 53):
        assert len(manifest["metadata"]["name"]) <= 63


def test_every_value_is_known_to_the_schema_and_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def same(schema: dict[str, Any], values: Any, path: str) -> None:
        if schema.get("additionalProperties") is not False or not isinstance(values, dict):
            return
        if values:  # a free form such as issuerRef
            assert set(schema["properties"]) == set(values), path
        for name, value in values.items():
            same(schema["properties"][name], value, f"{path}.{name}")

    same(schema, values, "")


def test_the_crd_is_the_generated_one_is_structural_and_is_kept() -> None:
    crd = next(found for found in render() if found["kind"] == "CustomResourceDefinition")
    assert crd["spec"] == yaml.safe_load((ROOT / "crds" / "kvcachetier.yaml").read_text())["spec"]
    assert structural_problems(crd) == []
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    free = next(found for found in render({"crds": {"keep": False}}) if found["kind"] == "CustomResourceDefinition")
    assert "annotations" not in free["metadata"]


@pytest.fixture
def api() -> Iterator[ApiServerThread]:
    with ApiServerThread() as server:
        yield server


@pytest.fixture
def environment(api: ApiServerThread, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "KUBECONFIG": str(api.write_kubeconfig(tmp_path / "k")), "HELM_CACHE_HOME": str(tmp_path)}


def test_a_crd_applied_by_hand_is_taken_over_as_documented(api: ApiServerThread, environment: dict[str, str]) -> None:
    kubectl = tools.binary("kubectl")
    crd = ROOT / "crds" / "kvcachetier.yaml"
    subprocess.run([kubectl, "apply", "--server-side", f"--filename={crd}"], check=True, env=environment)
    where = ["kvtier", f"--namespace={NAMESPACE}", str(CHART), "--create-namespace"]
    with pytest.raises(HelmFailed, match="invalid ownership metadata"):
        helm("install", *where, environment=environment)
    words = "--take-ownership --force-conflicts"
    assert words in (ROOT / "docs" / "install.md").read_text()
    helm("install", *where, *words.split(), environment=environment)
    assert api.get("deployments.apps", NAMESPACE, "kvtier-operator") is not None


def older(folder: Path, values: dict[str, Any]) -> Path:
    """Return the chart as of a release that had only these values."""
    chart = folder / "kvtier"
    shutil.copytree(CHART, chart)
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    (chart / "values.schema.json").unlink()
    return chart


def test_what_an_older_release_stored_lacks_no_value_that_came_since(tmp_path: Path) -> None:
    # With --reuse-values, what the older release had stands in for the values of this chart.
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    emptied = {name: {} for name, value in defaults.items() if isinstance(value, dict) and name not in WHOLE}
    halves = [
        {name: dict(list(value.items())[start::2]) for name, value in defaults.items() if name in emptied}
        for start in (0, 1)
    ]
    expected = render_text()
    for number, stored in enumerate([{}, emptied, *halves]):
        chart = older(tmp_path / str(number), stored)
        assert helm("template", "kvtier", str(chart), f"--namespace={NAMESPACE}") == expected, stored


WHOLE = ("resources", "podSecurityContext")
"""What people write as a whole: what they took out of it stays out."""


def test_values_win_over_neither_the_selector_nor_the_restricted_standard() -> None:
    values = {
        "podLabels": {"app.kubernetes.io/name": "other", "team": "a"},
        "podSecurityContext": {"runAsUser": 7, "runAsNonRoot": False},
        "nameOverride": "9",
    }
    deployment = next(each for each in render(values) if each["kind"] == "Deployment")
    template, selector = deployment["spec"]["template"], deployment["spec"]["selector"]["matchLabels"]
    assert template["metadata"]["labels"] == {**selector, "app.kubernetes.io/part-of": "kvtier", "team": "a"}
    assert selector["app.kubernetes.io/name"] == "9"
    assert template["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 7,
        "runAsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
