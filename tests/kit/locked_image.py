# SPDX-License-Identifier: Apache-2.0
"""An interpreter that finds what an image's lock names, and no other package that happens to be installed here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]

_PRELUDE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["PRELUDE"]


def blocked_modules(image: str) -> set[str]:
    """Return the top-level modules of all packages installed here that the lock does not name."""
    locked = {
        line.partition("==")[0]
        for line in (ROOT / f"requirements/{image}.lock").read_text().splitlines()
        if "==" in line
    }
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {_normal(owner) for owner in owners} & {*locked, "kvtier"}
    }


def prelude(image: str, *, paths: Sequence[Path], absent: tuple[str, ...] = ()) -> str:
    """Return what a script begins with, to run as in the image: our code in ``paths``, without what is ``absent``."""
    return _PRELUDE.format(blocked=blocked_modules(image), paths=[str(each) for each in paths], absent=absent)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
