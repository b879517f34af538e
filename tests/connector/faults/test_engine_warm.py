# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server says which blocks a prompt has, and they are those that come to the volume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import _PATHS
from engine_server import CHUNK_TOKENS, PROMPT_TOKENS, START_SECONDS, Server, make_tokens
from waiting import until

PROMPTS = 5
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "volume").mkdir()
    made = Server(tmp_path, tmp_path / "volume")
    try:
        until(made.is_ready, "the engine answers", seconds=START_SECONDS)
        yield made
    finally:
        made.kill()


def warm(server: Server, file: Path, *words: str, code: int = 0) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kvtier_connector.janitor.warming",
        f"--prompts={file}",
        f"--config={server.config}",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS)}
    done = subprocess.run(
        [*command, f"--url=http://127.0.0.1:{server.port}", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["document"]
    return found


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_prompt_set_is_warm_when_each_of_its_blocks_is_on_the_volume(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": make_tokens(seed), "max_tokens": 300, "stream": True} for seed in range(PROMPTS)]
    lines.append({"prompt": make_tokens(99, CHUNK_TOKENS - 1)})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    found = warm(server, file)
    assert (found["prompts"], found["warm"], found["short"]) == (PROMPTS + 1, PROMPTS, 1)
    assert found["blocks"] == PROMPTS * CHUNKS == len(list((tmp_path / "volume").rglob("*.kvb")))
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "volume").rglob("*.kvb"))

    # Nobody's word is taken for it: a block that has gone is missed, for as long as the engine believes in it.
    next((tmp_path / "volume").rglob("*.kvb")).unlink()
    again = warm(server, file, "--patience=1", code=1)
    assert (again["warm"], again["missing"]) == (PROMPTS - 1, 1)

    # What an engine refuses is told of by its line, and by nothing that it says.
    refused = warm(server, _write(tmp_path, {"prompt": [5] * 5000}), code=1)
    assert refused["failed"] == 1
    assert refused["problem"].startswith("line 1: the engine answers /v1/completions with 400")


def _write(directory: Path, line: dict[str, Any]) -> Path:
    file = directory / "one.jsonl"
    file.write_text(json.dumps(line))
    return file
