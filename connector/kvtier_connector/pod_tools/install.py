# SPDX-License-Identifier: Apache-2.0
"""Put this package where an engine's Python finds it: ``python3 -m kvtier_connector.pod_tools.install --target DIR``.

Runs in the init container of an engine pod, so it needs the standard library only. Running it again changes nothing;
another version is replaced. A reader of the target sees one whole version or, for a moment, none.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvtier_connector import __version__
from kvtier_connector.pod_tools.shm import clear_stale_regions

PACKAGE = "kvtier_connector"
CACHES = ("vllm", "triton", "torchinductor")
"""Directories of compiled code, as `VLLM_CACHE_ROOT` and its kind name them below the scratch directory."""
_ABANDONED_SECONDS = 3600.0


def install(target: Path, *, source: Path | None = None) -> str:
    """Copy the package to ``target/kvtier_connector``; return what was done, as a sentence."""
    source = source or Path(__file__).resolve().parents[1]
    final = target / PACKAGE
    label = f"{PACKAGE} {__version__}"
    target.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    if final.is_dir() and _contents(final) == _contents(source):
        return f"{label} is in {final} already"
    token = uuid.uuid4().hex
    fresh, old = target / f".{PACKAGE}.{token}.partial", target / f".{PACKAGE}.{token}.old"
    try:
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
        # Any user can read the files: the engine's user need not be the init container's.
        for path in [fresh, *fresh.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        count = sum(path.is_file() for path in fresh.rglob("*"))
        if final.exists():
            final.rename(old)
        fresh.rename(final)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return f"{label}: {count} files installed in {final}"


def _contents(directory: Path) -> dict[Path, bytes]:
    """Return the package's files, without what Python makes of them by itself."""
    names = {path: path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for path, name in names.items() if "__pycache__" not in name.parts}


def _remove_abandoned(target: Path) -> None:
    """Remove what an installer that was killed left; a young one may still be at work."""
    for path in target.glob(f".{PACKAGE}.*"):
        if path.suffix in {".partial", ".old"} and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def link_caches(shared: Path, scratch: Path) -> str:
    """Link the directories in which vLLM keeps compiled code, below `scratch`; return the outcome as a sentence.

    `shared` is for engines of one image and model. Where it cannot be written nothing is linked, and engines compile.
    """
    try:
        for name in CACHES:
            (shared / name).mkdir(parents=True, exist_ok=True)
            probe = shared / name / f".{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        for name in CACHES:
            if not (scratch / name).exists():
                (scratch / name).symlink_to(shared / name)
    except OSError as error:
        return f"{shared} cannot be used ({error}): the engine compiles for itself"
    return f"{shared}: compile caches are linked"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {PACKAGE}.pod_tools.install", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--target", type=Path, required=True, help="directory that will be on the engine's PYTHONPATH")
    parser.add_argument("--clear-shm", metavar="DIR", help="also remove shared-memory files of dead engines from here")
    parser.add_argument("--caches", type=Path, metavar="DIR", help="shared directory for compiled code")
    parser.add_argument("--link-caches", type=Path, metavar="DIR", help="link the engine's caches below DIR to it")
    options = parser.parse_args(arguments)
    if options.clear_shm is not None:
        removed = clear_stale_regions(options.clear_shm)
        sys.stdout.write(f"{options.clear_shm}: {len(removed)} stale regions removed\n")
        sys.stdout.writelines(f"  {path}\n" for path in removed)
    sys.stdout.write(install(options.target) + "\n")
    if options.link_caches is not None:
        sys.stdout.write(link_caches(options.caches, options.link_caches) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
