# SPDX-License-Identifier: Apache-2.0
"""Writes what a release is installed from: ``python .ci/release.py VERSION OUT IMAGE=DIGEST …``.

The chart names its images by the digests that were pushed. ``install.yaml`` has the CRD and the same operator for who
does not use Helm. An archive has the bundle for OLM. The version must be the one in the code, so that a tag cannot
name another.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "kvtier"
REGISTRY = "ghcr.io/kvtier"
IMAGES = ("operator", "connector", "janitor", "router")
IN_CHART = IMAGES[:3]
"""The router's is named by the tiers that want one."""
POLICIES = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
"""Without a cluster, helm takes it that none has admission policies."""


def version_of_code() -> str:
    """Return the version that the operator reports."""
    text = (ROOT / "operator/kvtier_operator/__init__.py").read_text()
    return re.findall(r'^__version__ = "([^"]+)"', text, re.MULTILINE)[0]


def values_with(digests: Mapping[str, str], text: str) -> str:
    """Return the chart's values with each image named by its digest; comments stay."""
    changed = re.sub(r'(?m)^  digest: ""$', f"  digest: {digests['operator']}", text, count=1)
    for name in ("connector", "janitor"):
        image = f"{REGISTRY}/{name}@{digests[name]}"
        changed = re.sub(rf'(?m)^{name}Image: ""$', f"{name}Image: {image}", changed, count=1)
    if [changed.count(digests[name]) for name in IN_CHART] != [1, 1, 1]:
        sys.exit("charts/kvtier/values.yaml has not the fields that a release fills in")
    return changed


def helm(*arguments: str) -> str:
    """Run the locked helm and return what it prints."""
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci/helm.py"), *arguments], check=True, capture_output=True, text=True
    ).stdout


def bundle(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the archive of OLM's bundle."""
    spec = importlib.util.spec_from_file_location("bundle", ROOT / ".ci/bundle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as scratch:
        module.write_into(Path(scratch) / "bundle", digests)
        with tarfile.open(folder / f"kvtier-bundle-{version_of_code()}.tar.gz", "w:gz") as archive:
            archive.add(Path(scratch) / "bundle", "bundle")


def main(version: str, out: str, *pushed: str) -> None:
    """Write chart and install.yaml."""
    digests = dict(each.split("=", 1) for each in pushed)
    if version.removeprefix("v") != version_of_code():
        sys.exit(f"the tag {version} is not the version of the code, {version_of_code()}")
    if set(digests) != set(IMAGES) or not all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in digests.values()):
        sys.exit(f"name the digest of each image: {' '.join(f'{name}=sha256:…' for name in IMAGES)}")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / "kvtier"
        shutil.copytree(CHART, chart)
        filled = values_with(digests, (chart / "values.yaml").read_text())
        (chart / "values.yaml").write_text(filled)
        (chart / "files/defaults.yaml").write_text(yaml.safe_dump(yaml.safe_load(filled), sort_keys=False))
        helm("lint", "--strict", str(chart))
        helm("package", str(chart), f"--destination={folder}", f"--version={version_of_code()}")
        rendered = helm("template", "kvtier", str(chart), "--namespace=kvtier-system", POLICIES)
    bundle(folder, digests)
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "kvtier-system", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    text = f"# kvtier {version_of_code()}: kubectl apply --server-side -f install.yaml\n"
    # Without Helm, its label would let a later helm take these objects for its own.
    rendered = rendered.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
    rendered = re.sub(r"(?m)^ *helm\.sh/chart: .*\n", "", rendered)
    (folder / "install.yaml").write_text(text + yaml.safe_dump(namespace, sort_keys=False) + rendered)


if __name__ == "__main__":
    main(*sys.argv[1:])
