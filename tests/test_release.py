# SPDX-License-Identifier: Apache-2.0
"""What a release is made of, its bundle and plugin included, and what its chart says of itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ci_tools
import jsonschema
import kubernetes_schemas
import pytest
import yaml

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.parts import render
from kvtier_operator.plan import make_unchecked_plan

ROOT, TABLES = Path(__file__).resolve().parents[1], yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
release, linters = ci_tools.load("release"), ci_tools.load("linters")
VERSION = release.version_of_code()
DIGESTS = {name: f"sha256:{number:064d}" for number, name in enumerate(release.IMAGES, 1)}
PUSHED = tuple(f"{name}={digest}" for name, digest in DIGESTS.items())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def test_chart_and_manifests_of_a_release_name_its_images_by_digest(tmp_path: Path) -> None:
    release.main(f"v{VERSION}", str(tmp_path), *PUSHED)
    found = [each for each in yaml.safe_load_all((tmp_path / "install.yaml").read_text()) if each]
    for manifest in found:
        kubernetes_schemas.validate(manifest, "1.37")
    (operator,) = (each for each in found if each["kind"] == "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"ghcr.io/kvtier/operator@{DIGESTS['operator']}"
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert given["KVTIER_CONNECTOR_IMAGE"] == f"ghcr.io/kvtier/connector@{DIGESTS['connector']}"
    assert given["KVTIER_JANITOR_IMAGE"] == f"ghcr.io/kvtier/janitor@{DIGESTS['janitor']}"
    assert {each["kind"] for each in found} >= {"Namespace", "CustomResourceDefinition", "ClusterRole"}
    with tarfile.open(tmp_path / f"kvtier-{VERSION}.tgz") as chart:
        names = chart.getnames()
        assert chart.extractfile("kvtier/values.yaml").read().decode().count("sha256:0") == 3
    assert {"kvtier/dashboards/tier.json", "kvtier/rules/alerts.yaml", "kvtier/files/kvcachetier.yaml"} <= set(names)


def test_each_way_to_install_makes_the_same_objects_so_that_one_can_follow_another(tmp_path: Path) -> None:
    release.main(f"v{VERSION}", str(tmp_path), *PUSHED)
    with_helm = release.helm("template", "kvtier", str(release.CHART), "--namespace=kvtier-system", release.POLICIES)

    def objects(text: str) -> dict[tuple[str, str], object]:
        found = [each for each in yaml.safe_load_all(text) if each and each["kind"] != "Namespace"]
        return {
            (each["kind"], each["metadata"]["name"]): each["spec"].get("selector") if "spec" in each else None
            for each in found
            if each["kind"] != "CustomResourceDefinition"
        }

    released = (tmp_path / "install.yaml").read_text()
    assert objects(with_helm) == objects(released) == objects((ROOT / "docs/operator.yaml").read_text())
    assert "Helm" not in released[released.index("kind: Deployment") :]
    assert "helm.sh/chart" not in released


@pytest.mark.parametrize(
    ("version", "pushed", "complaint"),
    [
        ("v99.0.0", PUSHED, "is not the version of the code"),
        (f"v{VERSION}", PUSHED[:2], "name the digest of each image"),
        (f"v{VERSION}", (*PUSHED[:2], "janitor=latest"), "name the digest of each image"),
    ],
)
def test_a_release_with_a_gap_is_refused(version: str, pushed: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=complaint):
        release.main(version, str(tmp_path / "out"), *pushed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.lock")), ids=lambda lock: lock.stem)
def test_every_locked_package_has_hashes_but_the_one_of_another_index(lock: Path) -> None:
    text = lock.read_text()
    bare = re.findall(r"^([a-z0-9.-]+)==[^\\\n]*$", text, re.MULTILINE)
    assert bare == (["torch"] if lock.stem == "engine-cpu" else [])
    assert text.count("--hash=sha256:") >= len(re.findall(r"^[a-z0-9.-]+==", text, re.MULTILINE)) - 1


@pytest.mark.parametrize("file", ["operator/Dockerfile", "connector/janitor.Dockerfile", "operator/router.Dockerfile"])
def test_an_image_installs_nothing_without_a_hash(file: str) -> None:
    text = (ROOT / file).read_text()
    installs = re.findall(r"pip install (.*?)(?:&&|$)", text, re.MULTILINE)
    assert installs
    assert all(
        "--require-hashes" in each or each.strip().endswith("--no-deps /tmp/wheel/kvtier-*.whl") for each in installs
    )
    # With what a package is built is not looked for anew.
    assert all("--no-build-isolation" in each for each in re.findall(r"pip wheel .*", text))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_says(workflow: Path) -> None:
    found = yaml.safe_load(workflow.read_text())
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job
        for step in job.get("steps", ()):
            assert (
                not step.get("uses", "").startswith("actions/checkout") or step["with"]["persist-credentials"] is False
            )


def test_every_action_is_pinned_by_a_digest_and_dependabot_looks_at_what_is_there() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    used = [each for each in re.findall(r"uses: (.*)", text) if not each.startswith("./")]
    pinned = [re.fullmatch(r"([\w-]+/[\w-]+)(?:/[\w-]+)*@([0-9a-f]{40}) # (v[0-9.]+)", each) for each in used]
    assert [each for each, found in zip(used, pinned, strict=True) if found is None] == []
    digests = {(found[1], found[2], found[3]) for found in pinned if found is not None}
    assert len(digests) == len({name for name, _, _ in digests})
    found = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())
    assert {each["package-ecosystem"] for each in found["updates"]} == {"github-actions", "docker"}
    for each in found["updates"]:
        assert all(list((ROOT / folder.lstrip("/")).glob("*Dockerfile")) for folder in each.get("directories", []))


def test_the_licence_names_its_holder_and_the_plugin_runs_with_the_supported_pythons() -> None:
    assert set(linters.commands()) == {"actionlint", "shellcheck", "hadolint"}
    assert all(linters.commands().values())
    assert linters.main() == 0
    assert "[yyyy]" not in (ROOT / "LICENSE").read_text()
    assert "Copyright 2026 The kvtier authors" in (ROOT / "NOTICE").read_text()
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert [each for each in plugin.PYTHONS if f"Python :: {each}" not in classifiers] == []
    assert classifiers.count("Python :: 3.") == len(plugin.PYTHONS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_release_of_this_machine_makes_a_tier_in_an_embedded_cluster(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / ".ci/release_dry_run.py"), str(tmp_path / "out")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(steps) == ["wheel", "plugin", "packages", "images", "install"]
    assert "built by" in steps["images"] or "skipped: no builder" in steps["images"]
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"install.yaml", "kvtier-0.1.0.tgz", "kvtier-bundle-0.1.0.tar.gz"} <= made
    with tarfile.open(tmp_path / "out/kvtier-bundle-0.1.0.tar.gz") as bundle:
        version = bundle.extractfile("bundle/manifests/kvtier.clusterserviceversion.yaml")
        assert version is not None
        jsonschema.validate(yaml.safe_load(version.read()), schema("csv"))


bundle, plugin = ci_tools.load("bundle"), ci_tools.load("plugin")
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
    assert len(version["spec"]["relatedImages"]) == len((ROOT / "charts/kvtier/images.txt").read_text().split())


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


CHART = ROOT / "charts" / "kvtier"
pages, helm = ci_tools.load("chart_pages"), ci_tools.load("release").helm
LISTED = (CHART / "images.txt").read_text().split()
TIERS = sorted((ROOT / "tests/operator/golden").glob("*/tier.yaml")) + sorted((ROOT / "crds/samples").glob("*.yaml"))
HUB = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]


def leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, dict) and value and name not in {"labels", "resources", "podSecurityContext"}:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name


def test_the_readme_names_every_value_with_its_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = {path: default for path, _, default in pages.rows()}
    assert [path for path in leaves(values) if not any(f"{each}.".startswith(f"{path}.") for each in found)] == []
    labels = {"grafana_dashboard": "1"}
    assert (found["leaderElection.leaseSeconds"], found["metrics.dashboards.labels"]) == (12, labels)


def images_of(node: Any) -> Iterator[str]:
    """Yield what the containers of any object run, and the images that its environment names."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "image" and isinstance(value, str):
                yield value
            elif name == "value" and str(node.get("name", "")).endswith("_IMAGE"):
                yield str(value)
            else:
                yield from images_of(value)
    elif isinstance(node, list):
        for each in node:
            yield from images_of(each)


@pytest.mark.parametrize("path", TIERS, ids=lambda path: path.parent.name if path.name == "tier.yaml" else path.stem)
def test_the_list_of_images_has_each_that_a_tier_does_not_name_itself(path: Path) -> None:
    text = path.read_text()
    for body in yaml.safe_load_all(text):
        if body["kind"] == names.KIND:
            connector = next(each for each in LISTED if "/connector:" in each)
            made = render(make_unchecked_plan(parse(body), names.tier_ref(body), connector_image=connector))
            used = set(images_of(list(made)))
            assert used
            assert {each for each in used if each not in text} <= set(LISTED)


def test_the_list_of_images_has_those_of_the_chart() -> None:
    text = helm("template", "kvtier", str(CHART), "--set=crds.install=false")
    assert set(images_of([each for each in yaml.safe_load_all(text) if each])) <= set(LISTED)


@pytest.mark.parametrize(("more", "expected"), TABLES["mirrored"].values(), ids=TABLES["mirrored"])
def test_one_value_moves_what_the_chart_names_to_a_mirror(more: list[str], expected: list[str]) -> None:
    mirror = "--set=global.imageRegistry=registry.local:5000/mirror"
    text = helm("template", "kvtier", str(CHART), "--set=crds.install=false", mirror, *more)
    assert set(images_of([each for each in yaml.safe_load_all(text) if each])) == set(expected)


def test_artifact_hub_is_told_of_images_definitions_examples_and_changes() -> None:
    listed = {
        name: yaml.safe_load(HUB[f"artifacthub.io/{name}"])
        for name in ("images", "crds", "crdsExamples", "changes", "links")
    }
    assert [each["image"] for each in listed["images"]] == LISTED
    assert len({each["name"] for each in listed["images"]}) == len(LISTED)
    (definition,) = listed["crds"]
    assert (definition["kind"], definition["version"]) == (names.KIND, names.VERSION)
    for body in listed["crdsExamples"]:
        parse({**body, "metadata": {"namespace": "default", **body["metadata"]}})
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert {each["kind"] for each in listed["changes"]} <= kinds
    assert len(listed["changes"]) == (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].count("\n- ")
    assert all(each["url"].startswith("https://") for each in listed["links"])
    assert HUB["artifacthub.io/operatorCapabilities"] in (ROOT / "docs/support.md").read_text()


def test_the_chart_has_an_icon_and_a_licence_that_exist() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (ROOT / chart["icon"].partition("/main/")[2]).read_text().startswith("<svg")
    assert f'license = "{HUB["artifacthub.io/license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert all(isinstance(value, str) for value in HUB.values())
