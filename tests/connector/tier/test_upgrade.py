# SPDX-License-Identifier: Apache-2.0
"""Real engines of vLLM 0.33 meet what one of 0.32 stored: they use it if it is what they compute, and else never."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks import check
from engine_process import DIGEST, run_script, write_config

from kvtier_demo.model import make_model

SCRIPT = Path(__file__).with_name("upgrade_script.py")
CHUNKS, CHUNK_TOKENS = 7, 128
"""Of a prompt of 1000 tokens."""


class Upgrade:
    """Two releases of vLLM, a model, and a copy of the volume for each engine of the second one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_model(directory / "model", layers=4)
        tool = Path(__file__).parents[3] / ".ci" / "vllm_release.py"
        found = subprocess.run([sys.executable, str(tool), "0.33.0"], check=True, capture_output=True, text=True)
        self._newer = found.stdout.strip()

    def run(self, volume: Path, *words: str, is_newer: bool) -> dict[str, Any]:
        config = write_config(volume.parent, volume, across_releases="Verified")
        options = (f"--model={self.directory / 'model'}", f"--config={config}", f"--volume={volume}", *words)
        with pytest.MonkeyPatch.context() as patch:
            if is_newer:
                # See `make test-vllm`.
                patch.setenv("VLLM_CACHE_ROOT", f"{self._newer}/.cache")
                patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [self._newer, os.environ.get("PYTHONPATH")])))
            result = run_script(SCRIPT, *options, log=self.log(volume), host=None, timeout_seconds=800)
        sys.stdout.write(
            "".join(re.findall(r".*vllm.kvtier.releases.*\n|.*releases.py.*\n", self.log(volume).read_text()))
        )
        return result

    def log(self, volume: Path) -> Path:
        return volume.parent / "engine.log"

    def store(self, kv: str) -> tuple[Path, dict[str, Any]]:
        volume = self.directory / kv / "volume"
        volume.mkdir(parents=True)
        return volume, self.run(volume, f"--kv={kv}", "a", "b", "c", "d", "stored", is_newer=False)

    def upgrade(self, stored: Path, *words: str) -> tuple[Path, dict[str, Any]]:
        """Have the second release answer the same, and wait for its verdict before the last of them."""
        volume = self.directory / "-".join((*words, stored.parent.name)).strip("-") / "second" / "volume"
        shutil.copytree(stored, volume)
        return volume, self.run(
            volume, f"--kv={stored.parent.name}", *words, "a", "b", "c", "verdict", "d", is_newer=True
        )


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Upgrade:
    return Upgrade(tmp_path_factory.mktemp("upgrade"))


@pytest.fixture(scope="module")
def stored(releases: Upgrade) -> tuple[Path, dict[str, Any]]:
    return releases.store("auto")


def note_of(volume: Path) -> dict[str, Any]:
    (path,) = (volume / DIGEST / "releases").glob("r*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def blocks_of(volume: Path) -> set[Path]:
    return {path.relative_to(volume) for path in (volume / DIGEST).rglob("*.kvb")}


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_newer_vllm_uses_blocks_once_its_own_agree(releases: Upgrade, stored: tuple[Path, dict[str, Any]]) -> None:
    first, before = stored
    volume, after = releases.upgrade(first)
    assert (before["release"], after["release"]) == ("0.32.0", "0.33.0")
    assert note_of(volume)["verdict"] == "accepted"
    cached = {name: answer["cached_tokens"] for name, answer in after["answers"].items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": CHUNKS * CHUNK_TOKENS}
    for name, answer in after["answers"].items():
        assert answer["tokens"] == answer["computed"] == before["answers"][name]["tokens"]
    assert blocks_of(volume) == blocks_of(first)
    assert check(volume / DIGEST) == []


@pytest.mark.engine
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("kind", "kv"), [("rope", "auto"), ("norm", "auto"), ("scale", "fp8_e4m3")])
def test_another_vllm_believes_no_block(releases: Upgrade, request: pytest.FixtureRequest, kind: str, kv: str) -> None:
    first, _ = request.getfixturevalue("stored") if kv == "auto" else releases.store(kv)
    volume, after = releases.upgrade(first, f"--plant={kind}")
    assert "differs in" in note_of(volume)["why"]
    for answer in after["answers"].values():
        assert answer["cached_tokens"] == 0
        assert answer["tokens"] == answer["computed"]
    assert not after["metrics"].get("vllm:kvtier_disk_read_blocks")
    assert blocks_of(volume) == blocks_of(first)
