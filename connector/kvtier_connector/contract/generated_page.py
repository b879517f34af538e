# SPDX-License-Identifier: Apache-2.0
"""The command of a module that generates a page: write it, or say whether the one on disk is what would be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run(arguments: Sequence[str] | None, *, prog: str, file: Path, render: Callable[[], str]) -> int:
    """Do as told and return the exit status: 1 if the page on disk is stale."""
    parser = argparse.ArgumentParser(prog=prog, description=f"Generates {file.name}.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help=f"write {file.name}")
    action.add_argument("--check", action="store_true", help="exit with 1 if it would change")
    if parser.parse_args(arguments).write:
        file.write_text(render(), encoding="utf-8")
        return 0
    is_fresh = file.is_file() and file.read_text(encoding="utf-8") == render()
    if not is_fresh:
        sys.stderr.write(f"{file} is stale; run this with --write\n")
    return 0 if is_fresh else 1
