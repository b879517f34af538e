# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM engines as forks of one process that has imported vLLM, which takes longer than all else that they do.

Each engine is a new process all the same: its host never makes one, so that nothing but the volume carries blocks from
one engine to the next, and a hung engine ends with its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from waiting import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/connector/tier/forking_host.py"
PATHS = tuple(str(each) for each in (ROOT / "connector", SCRIPT.parent, Path(__file__).parent))
"""Of the connector, and of what the scripts of engines share."""
END_SECONDS = 120.0


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*PATHS, os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One process to start instead of two; the demo runs engines as vLLM serves them.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Threads that wait for each other are slow where something else takes a processor.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@dataclass(frozen=True)
class Forked:
    """A process that the host started; it leads a group and a session of its own."""

    pid: int
    log: Path
    """What it prints."""
    code_file: Path
    """Holds its exit code once it has ended."""

    def poll(self) -> int | None:
        return int(self.code_file.read_text()) if self.code_file.exists() else None

    def wait(self, seconds: float) -> int:
        until(lambda: self.poll() is not None, self.last_words, seconds=seconds)
        return int(self.code_file.read_text())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(END_SECONDS)

    def last_words(self) -> str:
        return self.log.read_text()[-6000:]


class EngineHost:
    """The process that engines are forks of. It imports vLLM when the first is asked for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def start(self, log: Path, program: str, *arguments: str) -> Forked:
        """Run a script, or a module whose name is given, as `python` does."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        code_file = log.with_name(f"{log.name}.code")
        code_file.unlink(missing_ok=True)
        asked = {"argv": [program, *arguments], "log": str(log), "code_file": str(code_file)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the host of engines has ended with {self._process.wait()}"
        return Forked(int(answer), log, code_file)
