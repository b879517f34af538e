# SPDX-License-Identifier: Apache-2.0
"""The chore ``gc``: do once, and now, what the janitor does all the time, within limits of a person's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from kvtier_connector.contract_janitor import JANITOR_CONFIG_FILE, JanitorConfig, decode
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor.by_hand import find_tier
from kvtier_connector.janitor.chores import Outcome
from kvtier_connector.janitor.keeper import Keeper
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.progress import Tell

_KEEP_ALL: Final = 1 << 30


def gc(
    directory: Path, tell: Tell, *, limits: Mapping[str, Any], config: str | None = None, yes: bool = False
) -> Outcome:
    """Sweep a tier once; without `yes` say only what would go.

    Args:
        directory: The tier.
        tell: Told how far it is.
        limits: Fields of the janitor's document that are to be others.
        config: The janitor's document; without it nothing is limited but by `limits`.
        yes: Whether to remove.
    """
    settings = _settings(find_tier(directory), config, limits)
    # Not lasting: a janitor that is at work keeps its own brake and its own ledger.
    keeper = Keeper(settings, is_lasting=False, may_act=lambda: yes)
    keeper.open()
    keeper.finish(tell)
    report = keeper.report
    if report is None:
        raise ConfigInvalid(f"{settings.tier_dir}: could not be looked at")
    evicted = {name: count for name, count in report.evicted_blocks.items() if count} if yes else _planned(keeper)
    document = {
        "dryRun": not yes,
        "evicted": evicted,
        "removedLeftovers": {name: count for name, count in report.removed_leftovers.items() if count},
        "blocks": report.usage.blocks,
        "bytes": report.usage.used_bytes,
        "problems": list(report.problems.values()),
    }
    return Outcome(1 if report.problems else 0, document)


def _planned(keeper: Keeper) -> dict[str, int]:
    choice = keeper.plan()
    planned: dict[str, int] = {}
    begin = 0
    for reason, end in zip(choice.reasons, choice.ends, strict=True):
        planned[reason.value] = planned.get(reason.value, 0) + end - begin
        begin = end
    return planned


def _settings(tier: Path, config_file: str | None, limits: Mapping[str, Any]) -> JanitorConfig:
    """Return the settings of the file, or of the limits alone."""
    unknown = set(limits) - {each.name for each in fields(JanitorConfig)}
    if unknown:
        raise ConfigInvalid(f"limits: {', '.join(sorted(unknown))} not known to this release of kvtier")
    roots = [root for root in find_generations(tier) if root.parent.resolve() == tier]
    current = limits.get("current")
    if current is not None and current not in {root.name for root in roots}:
        # Otherwise the one that is in use would be taken for an old one.
        raise ConfigInvalid(f"{tier}: holds no generation {current}; kvtier inspect shows which there are")
    if config_file is not None:
        settings = _read_config(Path(config_file))
    else:
        # The one that was made last is most likely the one in use.
        newest = max(roots, key=lambda root: (root.stat().st_mtime_ns, root.name)).name
        settings = JanitorConfig(tier=tier.name, tier_dir=str(tier), current=newest, keep_previous=_KEEP_ALL)
    return replace(settings, tier_dir=str(tier), lease_name="", **limits)


def _read_config(path: Path) -> JanitorConfig:
    try:
        return decode(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"{path}: not text: {error}; name the janitor's {JANITOR_CONFIG_FILE}") from error
