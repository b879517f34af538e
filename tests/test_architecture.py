# SPDX-License-Identifier: Apache-2.0
"""Rules of the repository that no linter knows."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier_connector
import kvtier_operator
from kvtier_connector.contract.engine import ConnectorConfig, decode, encode
from kvtier_connector.contract.errors import ConfigInvalid

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ConnectorConfig(
    tier="default/llama", root="/var/lib/kvtier/default.llama/0a1b", digest="0a1b", identity={"version": 1}
)


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


def test_a_document_reads_back_as_it_was_written() -> None:
    assert decode(encode(CONFIG)) == CONFIG
    assert encode(decode(encode(CONFIG))) == encode(CONFIG)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "run the connector image of the same release"),
        ({"colour": "blue"}, "unknown field 'colour'"),
        ({"min_tokens": -1}, "min_tokens=-1 must be 0"),
        ({"root": "relative/0a1b"}, "root='relative/0a1b' must be an absolute path"),
        ({"io_processes": 0}, "io_processes=0 must be between"),
    ],
)
def test_a_document_that_cannot_be_used_is_refused_by_field(change: dict[str, object], complaint: str) -> None:
    document = {**json.loads(encode(CONFIG)), **change}
    with pytest.raises(ConfigInvalid, match=complaint):
        decode(json.dumps(document))


def test_a_document_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="not JSON"):
        decode("root: /var")


def test_a_config_whose_root_is_of_another_digest_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="digest='0a1c' must end root"):
        replace(CONFIG, digest="0a1c")
