# SPDX-License-Identifier: Apache-2.0
"""Asserts what is on a volume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier_connector.store.fsck import FsckProblem, FsckReport, check_generation


def check(root: Path, **options: Any) -> list[FsckProblem]:
    """Return every problem under the root of one generation, in the order of their paths."""
    report = FsckReport()
    check_generation(root, report, **options)
    return report.problems
