# SPDX-License-Identifier: Apache-2.0
"""The page of conditions, read: the reasons that it lists for each condition."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PAGE: Final = (Path(__file__).parents[2] / "docs" / "conditions.md").read_text(encoding="utf-8")
COMMON: Final = ("NotChecked", "NotApplicable")
"""Reasons that any condition can have; the end of the page explains them."""


def rows(section: str) -> dict[str, tuple[str, str]]:
    """Return meaning and remedy of each reason in a section."""
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    return {reason: (meaning, remedy) for reason, meaning, remedy in found}


SECTIONS: Final = {each.partition("\n")[0]: rows(each) for each in PAGE.split("\n## ")[1:]}
"""Condition to its reasons, in the order of the page."""
