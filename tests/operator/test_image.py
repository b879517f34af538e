# SPDX-License-Identifier: Apache-2.0
"""The operator as its image has it: with the packages of its lock and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from locked_image import ROOT, blocked_modules, prelude

import kvtier_connector
import kvtier_operator

PATHS = tuple(Path(next(iter(package.__path__))).parent for package in (kvtier_operator, kvtier_connector))
SAMPLE = ROOT / "crds" / "samples" / "minimal.yaml"

EVERY_MODULE = """
import importlib, pkgutil
import kvtier_operator
for module in pkgutil.walk_packages(kvtier_operator.__path__, "kvtier_operator."):
    importlib.import_module(module.name)
"""
COMMAND = """
from kvtier_cli.app import main
sys.exit(main({arguments!r}))
"""


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", prelude("operator", paths=PATHS) + script],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(directory)},
    )


def test_every_module_finds_what_it_imports(tmp_path: Path) -> None:
    blocked = blocked_modules("operator")
    assert {"vllm", "torch", "numpy"} <= blocked
    assert not {"kopf", "kubernetes", "yaml"} & blocked
    done = run(EVERY_MODULE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_tier_is_rendered(tmp_path: Path) -> None:
    done = run(COMMAND.format(arguments=["render", str(SAMPLE)]), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kind: Deployment" in done.stdout


def test_a_verb_for_which_a_package_is_missing_names_it_and_the_remedy(tmp_path: Path) -> None:
    done = run(COMMAND.format(arguments=["check", str(tmp_path)]), tmp_path)
    assert done.returncode == 1
    # Which of them is missed first depends on the order of the imports.
    assert done.stderr in {
        f"Error: check needs the package {package}, which the operator's image does without: pip install kvtier\n"
        for package in ("blake3", "numpy")
    }


def test_it_runs_as_far_as_the_cluster_that_is_not_there(tmp_path: Path) -> None:
    done = run(COMMAND.format(arguments=["run"]), tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("kvtier: no cluster to talk to: ")
    assert "KUBECONFIG" in done.stderr
