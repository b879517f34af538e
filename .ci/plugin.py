# SPDX-License-Identifier: Apache-2.0
"""Packs `kubectl kvtier` for krew: ``python .ci/plugin.py WHEEL OUT [PLATFORM …]``.

An archive of a platform has the command and the operator's locked packages for every supported Python. Compiled modules
bear the name of theirs; all others are the same. It needs a `python3` of the machine, and nothing else. The manifest
names each archive by its hash.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator import __version__

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/kvtier/kvtier"
PLATFORMS = {
    "linux-amd64": "x86_64-manylinux_2_28",
    "linux-arm64": "aarch64-manylinux_2_28",
    "darwin-arm64": "aarch64-apple-darwin",
}
"""Each as uv calls it."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COMMAND = "kubectl-kvtier"
MANIFEST = "kvtier.yaml"
"""File of the manifest. krew's index and its validator take the plugin's name from it."""
LOCK = "requirements/operator.lock"

_LAUNCHER = f"""\
#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit("kubectl kvtier needs Python 3.11 to 3.14 as python3, and this is " + sys.version.split()[0])
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from kvtier_cli.app import main

sys.argv[0] = "{COMMAND}"
sys.exit(main())
"""


def archive(wheel: Path, out: Path, platform: str, pythons: Iterable[str] = PYTHONS) -> Path:
    """Write the archive of a platform, the same bytes each time, and return its path."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        for version in pythons:
            part = Path(scratch) / version
            command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(part)]
            of = ["--python-platform", PLATFORMS[platform], "--python-version", version, "--only-binary", ":all:"]
            subprocess.run([*command, *of, "--require-hashes", "--requirement", str(ROOT / LOCK)], check=True)
            subprocess.run([*command, *of, str(wheel)], check=True)
            shutil.copytree(part, root / "lib", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "bin"))
        shutil.copyfile(ROOT / "LICENSE", root / "LICENSE")
        (root / COMMAND).write_text(_LAUNCHER, encoding="utf-8")
        (root / COMMAND).chmod(0o755)
        path = out / f"{COMMAND}_{platform}.tar.gz"
        path.write_bytes(_packed(root))
    return path


def _packed(root: Path) -> bytes:
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted(each for each in root.rglob("*") if each.is_file() and each.name not in _CHANGING):
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            entry.size, entry.mode = path.stat().st_size, 0o755 if path.name == COMMAND else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return data.getvalue()


_CHANGING = frozenset({".lock", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
"""Notes that an installer keeps for itself."""


def manifest(archives: Mapping[str, Path]) -> dict[str, Any]:
    """Return the manifest for krew's index."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "kvtier"},
        "spec": {
            "version": f"v{__version__}",
            "homepage": REPOSITORY,
            "shortDescription": "Plan and look after KV caches of vLLM",
            "description": (
                "Sizes a KVCacheTier before it is applied, shows why one is not ready,\n"
                "counts, verifies and purges blocks on its volume, and packs a support\n"
                "bundle without secrets or prompts.\n"
            ),
            "caveats": "Needs Python 3.11 to 3.14 as python3.\n",
            "platforms": [
                {
                    "selector": {"matchLabels": dict(zip(("os", "arch"), platform.split("-"), strict=True))},
                    "uri": f"{REPOSITORY}/releases/download/v{__version__}/{path.name}",
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    "bin": COMMAND,
                }
                for platform, path in archives.items()
            ],
        },
    }


def main(wheel: str, out: str, *platforms: str) -> None:
    """Write archives and manifest."""
    folder = Path(out)
    made = {each: archive(Path(wheel), folder, each) for each in platforms or PLATFORMS}
    (folder / MANIFEST).write_text(yaml.safe_dump(manifest(made), sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
