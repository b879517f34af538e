# SPDX-License-Identifier: Apache-2.0
"""Writes or checks requirements/janitor.lock: of the locked packages, those that the janitor needs, and theirs.

So its image has the versions that the tests ran with (``make generate`` and ``make fresh``).
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements/janitor.lock"
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


def main() -> int:
    """Do as told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = ["# The janitor's image.", "# Written by `make generate`; installed with --no-deps."]
    lines += [f"{name}=={version}" for name, version in sorted(closure(project["janitor"]).items())]
    text = "\n".join(lines) + "\n"
    if sys.argv[1:] == ["--write"]:
        LOCK.write_text(text)
        return 0
    if LOCK.exists() and LOCK.read_text() == text:
        return 0
    print(f"{LOCK.relative_to(ROOT)} is stale: run make generate", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
