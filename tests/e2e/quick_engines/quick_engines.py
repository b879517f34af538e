# SPDX-License-Identifier: Apache-2.0
"""Has engines do in the process at hand what vLLM's CPU build does in new ones, which import all of vLLM again.

That is to look at the model, and to be the process that computes: it is a fork of the server. Python imports this file
as it starts, in the environment that `make_environment` makes; nothing else of vLLM's start is another one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def _looks_itself(registry: ModuleType) -> None:
    registry._run_in_subprocess = lambda fn: fn()  # type: ignore[attr-defined]  # vLLM's


def _forks(utils: ModuleType) -> None:
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]  # vLLM's


CHANGES = {"vllm.model_executor.models.registry": _looks_itself, "vllm.v1.engine.utils": _forks}


class _Changing(importlib.abc.MetaPathFinder):
    """Changes modules once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            CHANGES[fullname](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]  # of this one loader
        return spec


def make_environment(directory: Path) -> Path:
    """Make a virtual environment with all that this process can import, and this; return its interpreter."""
    venv.create(directory, symlinks=True)
    base = {"base": str(directory), "platbase": str(directory)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=base))
    (packages / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (packages / "quick.pth").write_text(f"{Path(__file__).parent}\nimport quick_engines; quick_engines.begin()\n")
    return directory / "bin" / Path(sys.executable).name


def begin() -> None:
    """Change what is imported from now on."""
    sys.meta_path.insert(0, _Changing())
