# SPDX-License-Identifier: Apache-2.0
"""What the volume may be used for."""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    """The values are those of the resource's field."""

    READ_WRITE = "ReadWrite"
    READ_ONLY = "ReadOnly"
    """Blocks are loaded; nothing at all is written to the volume."""
    BYPASS = "Bypass"
    """The volume is not touched."""

    @property
    def may_load(self) -> bool:
        """Say whether blocks may be read."""
        return self is not Mode.BYPASS

    @property
    def may_store(self) -> bool:
        """Say whether anything may be written, journals included."""
        return self is Mode.READ_WRITE


def stricter(one: Mode, other: Mode) -> Mode:
    """Return the one that allows less."""
    return max(one, other, key=list(Mode).index)
