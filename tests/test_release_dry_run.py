# SPDX-License-Identifier: Apache-2.0
"""A release that is made here installs, and serves a tier."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


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
