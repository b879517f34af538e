# SPDX-License-Identifier: Apache-2.0
"""Which files of tests one worker runs one after the other, and which of these groups begin first."""

from __future__ import annotations

import contextlib
from pathlib import PurePosixPath

ENGINES, DEMO = "engines", "demo"
FOLDERS = ("tests/conformance", "tests/e2e", "tests/kind")
"""Of each, all files share a cluster."""

FIRST = (
    ENGINES,
    DEMO,
    "tests/connector/tier/test_upgrade.py",
    "tests/bench/test_cells.py",
    "tests/e2e",
    "tests/kind",
    "tests/operator/test_faults_run.py",
    "tests/operator/test_backends.py",
    "tests/operator/test_lifecycle.py",
    "tests/connector/tier/test_faults.py",
    "tests/connector/tier/test_attaching.py",
    "tests/operator/test_chart.py",
    "tests/cli/test_wheel.py",
    "tests/conformance",
)
"""Those that take longest, the longest first: one that is begun last keeps everybody waiting."""


def group_of(nodeid: str) -> str:
    """Return the name of a test's group: its file, unless files share what takes long to start."""
    file = PurePosixPath(nodeid.partition("::")[0])
    if file.is_relative_to("tests/connector") and file.name.startswith("test_engine"):
        return ENGINES
    # The demo is one test, behind which a worker would line up another file.
    if file.is_relative_to("tests/demo") or file.name == "test_shared_cache.py":
        return DEMO
    return next((folder for folder in FOLDERS if file.is_relative_to(folder)), str(file))


# A machine with a GPU may have pytest and nothing else.
with contextlib.suppress(ModuleNotFoundError):
    from xdist.scheduler import LoadFileScheduling

    class GroupScheduling(LoadFileScheduling):
        """Hands out groups instead of files."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)
