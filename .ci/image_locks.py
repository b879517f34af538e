# SPDX-License-Identifier: Apache-2.0
"""Writes or checks the locks of images: of the locked packages, those that they need, and what these need.

So an image has the versions that the tests ran with (``make generate`` and ``make fresh``).
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("janitor", "operator", "router")
"""Extras of pyproject.toml, each with an image and a lock of its name."""
BUILD = "build"
"""Build requirements of our package in an image."""
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}


def closure(wanted: list[str]) -> dict[str, str]:
    """Return the versions of these packages and of all that they require, as installed here."""
    found: dict[str, str] = {}
    pending = [Requirement(each) for each in wanted]
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop().name).lower()
        if name in found:
            continue
        found[name] = metadata.version(name)
        requirements = [Requirement(each) for each in metadata.requires(name) or ()]
        pending += [each for each in requirements if each.marker is None or each.marker.evaluate(IMAGE)]
    return found


def locked() -> dict[str, str]:
    """Return the entry of each locked package: its version and its hashes."""
    text = "\n".join((ROOT / f"requirements/{name}.lock").read_text() for name in ("engine-cpu", "dev"))
    entries = re.findall(r"^(\S+)(==.*(?:\n +--hash=.*)*)", text, re.MULTILINE)
    return {name: name + rest for name, rest in entries}


def render(title: str, wanted: list[str]) -> str:
    """Return what a lock of an image is to say; what is installed here in another version is stale."""
    known = locked()
    lines = [f"# {title}", "# Written by `make generate`; installed with --no-deps."]
    for name, version in sorted(closure(wanted).items()):
        entry = known.get(name, "")
        if not entry.startswith(f"{name}=={version} "):
            sys.exit(f"{name} {version} is installed and not locked: run make venv")
        lines.append(entry)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Do as told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = {
        image: render(f"The {image}'s image.", project["project"]["optional-dependencies"][image]) for image in IMAGES
    }
    texts[BUILD] = render("Build requirements of the operator's image.", project["build-system"]["requires"])
    stale = []
    for name, text in texts.items():
        lock = ROOT / f"requirements/{name}.lock"
        if sys.argv[1:] == ["--write"]:
            lock.write_text(text)
        elif not lock.exists() or lock.read_text() != text:
            stale.append(lock)
    for lock in stale:
        print(f"{lock.relative_to(ROOT)} is stale: run make generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
