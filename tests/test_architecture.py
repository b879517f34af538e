# SPDX-License-Identifier: Apache-2.0
"""Rules of the repository that no linter knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import kvtier_connector
import kvtier_operator

ROOT = Path(__file__).resolve().parents[1]


def sources() -> list[Path]:
    # safe.directory: in CI the checkout often belongs to another user, and git would refuse to read it
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=ROOT)
    return [ROOT / name for name in listed.decode().splitlines() if (ROOT / name).exists()]


@pytest.mark.parametrize("folder", ["operator", "connector"])
def test_a_folder_named_like_a_module_of_the_standard_library_is_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_every_source_file_names_its_licence() -> None:
    assert [
        str(path) for path in sources() if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ] == []


def test_operator_and_connector_are_one_release() -> None:
    assert kvtier_operator.__version__ == kvtier_connector.__version__
