# SPDX-License-Identifier: Apache-2.0
"""The exit codes that every verb keeps to."""

from __future__ import annotations

from typing import Final

FINE: Final = 0
"""All is well, or done."""
FOUND: Final = 1
"""Something was found, or could not be done."""
MISUSED: Final = 2
"""The command line is wrong; nothing was done."""
INTERRUPTED: Final = 130
