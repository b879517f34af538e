# SPDX-License-Identifier: Apache-2.0
"""Imports vLLM, and forks for each line on standard input: see kit/engine_host.py, which starts it.

A line is JSON: ``argv`` of a script or of a module, ``log`` for what it prints, and ``code_file`` for its exit code.
The answer is the pid. A process between the two waits for the engine, so that nobody else has to.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

# A fifth of what importing vLLM takes goes into looking for garbage among a million objects that stay.
gc.disable()

# Engines load these later; here they are loaded once.
import engine_under_test  # noqa: E402 - see above
import vllm.entrypoints.openai.api_server  # noqa: E402 - see above
import vllm.model_executor.models.llama  # noqa: E402 - see above
import vllm.v1.engine.async_llm  # noqa: E402 - see above
import vllm.v1.engine.utils  # noqa: E402 - see above
import vllm.v1.worker.cpu_worker  # noqa: E402 - see above
from vllm.model_executor.models import registry  # noqa: E402 - see above

LOADED = (engine_under_test, vllm)


def serve() -> list[str] | None:
    """Return, in each process that becomes an engine, what it is to run; None when nobody asks for more."""
    # Those who wait for engines are waited for by nobody.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (engine := os.fork()) == 0:
                return begin(asked)
            os.write(1, f"{engine}\n".encode())
            watch(engine, Path(asked["code_file"]))
    return None


def watch(engine: int, code_file: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    _, status = os.waitpid(engine, 0)
    aside = code_file.with_suffix(".aside")
    aside.write_text(str(os.waitstatus_to_exitcode(status)))
    aside.rename(code_file)
    os._exit(0)


def begin(asked: dict[str, Any]) -> list[str]:
    """Make this process look as if it had just been started; return what it is to run."""
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    gc.enable()
    return list(asked["argv"])


def run(argv: list[str]) -> None:
    sys.argv = argv
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # What it does in new processes, which would import all of it again: look at the model, and run the engine.
    registry._run_in_subprocess = lambda fn: fn()
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.freeze()
    if argv := serve():
        run(argv)
