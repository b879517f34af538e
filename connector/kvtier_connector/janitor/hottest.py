# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a generation stay where room is short: those that the janitor would evict last."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtier_connector.contract_janitor import JanitorConfig
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor.keeper import Keeper
from kvtier_connector.store.layout import BlockKey

_KEEP_ALL: Final = 1 << 30
_JUST_BELOW: Final = 1 - 1e-12
"""Watermarks must differ."""


def left_out(root: Path, most_bytes: int) -> frozenset[BlockKey]:
    """Return the blocks of a generation that do not fit so many bytes; beginnings of prompts stay before their ends.

    Raises:
        ConfigInvalid: the volume cannot be walked.
    """
    settings = JanitorConfig(
        tier=root.parent.name,
        tier_dir=str(root.parent),
        current=root.name,
        keep_previous=_KEEP_ALL,
        # One more is above it, and down to it is one less than that.
        max_bytes=most_bytes + 1,
        high_watermark=1.0,
        low_watermark=_JUST_BELOW,
    )
    # Not lasting, and without the right to act: it looks, and whoever clears the tier is not disturbed.
    keeper = Keeper(settings, is_lasting=False, may_act=lambda: False)
    keeper.open(is_walked_anew=True)
    keeper.finish()
    if keeper.report is None:
        raise ConfigInvalid(f"{root.parent}: could not be looked at")
    ledger = keeper.ledger
    ours = ledger.generation(root.name)
    rows = keeper.plan().rows
    return frozenset(ledger.key(int(row)) for row in rows if int(ledger.rows["generation"][row]) == ours)
