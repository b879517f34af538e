# SPDX-License-Identifier: Apache-2.0
"""What a release is made of: named by digest, of the version in the code, and nothing installed without a hash."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import ci_tools
import jsonschema
import kubernetes_schemas
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
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
        values = chart.extractfile("kvtier/values.yaml")
        assert values.read().decode().count("sha256:0") == 3
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
def test_a_release_that_is_not_whole_is_refused(
    version: str, pushed: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
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


def test_every_action_is_pinned_by_a_digest_and_the_same_everywhere() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    used = [each for each in re.findall(r"uses: (.*)", text) if not each.startswith("./")]
    pinned = [re.fullmatch(r"([\w-]+/[\w-]+)(?:/[\w-]+)*@([0-9a-f]{40}) # (v[0-9.]+)", each) for each in used]
    assert [each for each, found in zip(used, pinned, strict=True) if found is None] == []
    digests = {(found[1], found[2], found[3]) for found in pinned if found is not None}
    assert len(digests) == len({name for name, _, _ in digests})


def test_dependabot_looks_at_what_is_there() -> None:
    found = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())
    assert {each["package-ecosystem"] for each in found["updates"]} == {"github-actions", "docker"}
    for each in found["updates"]:
        folders = each.get("directories", [])
        assert all(list((ROOT / folder.lstrip("/")).glob("*Dockerfile")) for folder in folders)


def test_workflows_scripts_and_dockerfiles_are_what_their_linters_take() -> None:
    assert set(linters.commands()) == {"actionlint", "shellcheck", "hadolint"}
    assert all(linters.commands().values())
    assert linters.main() == 0


def test_the_licence_names_its_holder() -> None:
    assert "[yyyy]" not in (ROOT / "LICENSE").read_text()
    assert "Copyright 2026 The kvtier authors" in (ROOT / "NOTICE").read_text()


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
        schema = yaml.safe_load((ROOT / "tests/schemas/csv.yaml").read_text())
        jsonschema.validate(yaml.safe_load(version.read()), schema)
