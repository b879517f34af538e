# SPDX-License-Identifier: Apache-2.0
"""The bundle for OLM and the plugin for krew, held against what those take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ci_tools
import jsonschema
import kubernetes_schemas
import pytest
import yaml

from kvtier_operator.api import parse

ROOT = Path(__file__).resolve().parents[1]
bundle, plugin, release = ci_tools.load("bundle"), ci_tools.load("plugin"), ci_tools.load("release")
DIGESTS = {name: f"sha256:{number:064d}" for number, name in enumerate(release.IMAGES, 1)}
TAKEN = {"ClusterRole", "ClusterServiceVersion", "CustomResourceDefinition", "Service"}
"""Kinds that we put into a bundle; OLM takes some more."""


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f"tests/schemas/{name}.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bundle") / "bundle"
    bundle.write_into(folder, DIGESTS)
    return folder


@pytest.fixture(scope="module")
def manifests(written: Path) -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted((written / "manifests").iterdir())]


@pytest.fixture(scope="module")
def version(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (each for each in manifests if each["kind"] == "ClusterServiceVersion")
    return found


def test_the_service_version_is_what_olm_takes(version: dict[str, Any]) -> None:
    jsonschema.validate(version, schema("csv"), format_checker=jsonschema.FormatChecker())
    modes = {each["type"] for each in version["spec"]["installModes"] if each["supported"]}
    assert modes == {"AllNamespaces"}  # the only one that OLM 1 installs


def test_a_bundle_holds_the_definition_that_it_owns_and_kinds_that_olm_takes(
    manifests: list[dict[str, Any]], version: dict[str, Any]
) -> None:
    assert {each["kind"] for each in manifests} == TAKEN
    assert all("namespace" not in each["metadata"] for each in manifests)
    (definition,) = (each for each in manifests if each["kind"] == "CustomResourceDefinition")
    (owned,) = version["spec"]["customresourcedefinitions"]["owned"]
    assert owned["name"] == definition["metadata"]["name"]
    assert owned["version"] in {each["name"] for each in definition["spec"]["versions"]}
    for body in json.loads(version["metadata"]["annotations"]["alm-examples"]):
        assert body["kind"] == owned["kind"]
        parse({**body, "metadata": {"namespace": "default", **body["metadata"]}})
    for each in manifests:
        if each["kind"] not in {"ClusterServiceVersion", "CustomResourceDefinition"}:
            kubernetes_schemas.validate(each, "1.37")


def test_its_deployment_and_rights_are_those_of_the_chart(version: dict[str, Any]) -> None:
    install = version["spec"]["install"]["spec"]
    (deployed,) = install["deployments"]
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": deployed["name"]}}
    kubernetes_schemas.validate({**deployment, "spec": deployed["spec"]}, "1.37")
    installed = [each for each in yaml.safe_load_all((ROOT / "docs/operator.yaml").read_text()) if "rules" in each]
    rules = {each["metadata"]["name"]: each["rules"] for each in installed}
    assert [each["rules"] for each in install["clusterPermissions"]] == [rules["kvtier-operator"]]
    assert [each["rules"] for each in install["permissions"]] == [rules["kvtier-operator-lease"]]
    account = deployed["spec"]["template"]["spec"]["serviceAccountName"]
    for kind in ("clusterPermissions", "permissions"):
        assert {each["serviceAccountName"] for each in install[kind]} == {account}


def test_a_released_bundle_names_our_images_by_digest(version: dict[str, Any]) -> None:
    text = yaml.safe_dump(version)
    for name, digest in DIGESTS.items():
        assert f"ghcr.io/kvtier/{name}@{digest}" in text
        assert f"ghcr.io/kvtier/{name}:" not in text
    listed = (ROOT / "charts/kvtier/images.txt").read_text().split()
    assert len(version["spec"]["relatedImages"]) == len(listed)


def test_the_labels_of_its_image_are_its_annotations(written: Path) -> None:
    annotations = yaml.safe_load((written / "metadata/annotations.yaml").read_text())["annotations"]
    dockerfile = (ROOT / "bundle/Dockerfile").read_text()
    assert all(f"LABEL {name}={value}\n" in dockerfile for name, value in annotations.items())
    for kind in ("manifests", "metadata"):
        assert (written / annotations[f"operators.operatorframework.io.bundle.{kind}.v1"]).is_dir()
    assert (written / annotations["operators.operatorframework.io.test.config.v1"] / "config.yaml").exists()


def test_the_manifest_of_the_plugin_is_what_krew_takes(tmp_path: Path) -> None:
    archives = {platform: tmp_path / f"{platform}.tar.gz" for platform in plugin.PLATFORMS}
    for path in archives.values():
        path.write_bytes(path.name.encode())
    found = plugin.manifest(archives)
    jsonschema.validate(found, schema("krew"))
    platforms = found["spec"]["platforms"]
    assert len({each["sha256"] for each in platforms}) == len(archives)
    assert len({tuple(sorted(each["selector"]["matchLabels"].items())) for each in platforms}) == len(archives)
    # The validator of krew's index takes the name of the plugin from that of the file, and warns of long lines.
    assert f"{found['metadata']['name']}.yaml" == plugin.MANIFEST
    lines = (found["spec"]["description"] + found["spec"]["caveats"]).splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_the_plugin_runs_with_the_pythons_that_the_package_supports() -> None:
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert [each for each in plugin.PYTHONS if f"Python :: {each}" not in classifiers] == []
    assert classifiers.count("Python :: 3.") == len(plugin.PYTHONS)
