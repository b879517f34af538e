# SPDX-License-Identifier: Apache-2.0
"""The wheel by itself: what `pip install kvtier` brings runs every verb that needs no engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from locked_image import blocked_modules

ROOT = Path(__file__).resolve().parents[2]
RUN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["RUN"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # From a copy: setuptools writes build/ and *.egg-info beside what it builds.
    listed = subprocess.check_output(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in listed.splitlines():
        if name.startswith(("operator/", "connector/", "charts/", "crds/", "docs/operator.yaml")) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists():
                target.write_bytes((ROOT / name).read_bytes())
    build = "from setuptools.build_meta import build_wheel as b; import sys; print(b(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def run(wheel: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    script = RUN.format(wheel=str(wheel), root=str(ROOT / "operator"))
    return subprocess.run(
        [sys.executable, "-c", script, *words], input=given, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(300)
def test_it_carries_definition_chart_samples_and_the_operator(wheel: Path, tmp_path: Path) -> None:
    done = run(wheel, "install", "generate", "--namespace", "elsewhere", "--image", "example.org/operator:1")
    documents = list(yaml.safe_load_all(done.stdout))
    assert [each["kind"] for each in documents][:2] == ["CustomResourceDefinition", "Namespace"]
    assert {each["metadata"].get("namespace", "elsewhere") for each in documents} == {"elsewhere"}
    (operator,) = (each for each in documents if each["kind"] == "Deployment")
    assert operator["spec"]["template"]["spec"]["containers"][0]["image"] == "example.org/operator:1"
    (policy,) = (each for each in documents if each["kind"] == "ValidatingAdmissionPolicy")
    assert "'system:serviceaccount:elsewhere:kvtier-operator'" in policy["spec"]["matchConditions"][0]["expression"]
    assert "kvtier-system" not in done.stdout
    assert run(wheel, "install", "chart", str(tmp_path / "chart")).returncode == 0
    assert (tmp_path / "chart" / "Chart.yaml").exists()
    refused = run(wheel, "install", "chart", str(tmp_path / "chart"))
    assert (refused.returncode, "is there already" in refused.stderr) == (2, True)


def test_its_samples_are_valid_and_can_be_planned_and_rendered(wheel: Path) -> None:
    names = re.findall(r"^([a-z][\w-]*) *", run(wheel, "install", "samples").stdout, re.MULTILINE)
    assert "minimal" in names
    for verb in (["validate", "-"], ["plan", "-"], ["render", "-"]):
        done = run(wheel, *verb, given=run(wheel, "install", "samples", "minimal").stdout)
        assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(run(wheel, "install", "samples", "-o", "json").stdout)
    assert list(listed) == names
    assert listed["shared"].endswith("the other one reads")
    (printed,) = json.loads(run(wheel, "install", "samples", "minimal", "-o", "json").stdout)
    assert printed == yaml.safe_load(run(wheel, "install", "samples", "minimal").stdout)
    unknown = run(wheel, "install", "samples", "none")
    assert (unknown.returncode, "there are " in unknown.stderr) == (2, True)


def test_it_looks_after_a_volume(wheel: Path, tmp_path: Path) -> None:
    done = run(wheel, "inspect", str(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "nothing yet: no engine has stored a block")


def test_what_it_asks_for_is_what_the_images_are_made_of_and_no_engine(wheel: Path) -> None:
    metadata = next(wheel.glob("*.dist-info/METADATA")).read_text()
    required = re.findall(r"^Requires-Dist: kvtier\[([a-z,]+)\]$", metadata, re.MULTILINE)
    assert sorted(required[0].split(",")) == ["connector", "janitor", "operator"]
    assert {"vllm", "torch"} <= blocked_modules("operator")
