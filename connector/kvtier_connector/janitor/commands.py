# SPDX-License-Identifier: Apache-2.0
"""What a person does by hand on a volume: ``kvtier purge``, ``pin``, ``unpin`` and ``gc``.

Exit code 0 means done, also where there was nothing to do; 1 that it could not be done, or not all of it; 2 that the
command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvtier_connector.contract_janitor import JANITOR_CONFIG_FILE, JanitorConfig, decode
from kvtier_connector.errors import ConfigInvalid, ConnectorError
from kvtier_connector.janitor import units
from kvtier_connector.janitor.keeper import Keeper
from kvtier_connector.janitor.pins import check_name, parse_hash, read_pins, write_pins
from kvtier_connector.janitor.purge import Criteria, purge
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.layout import TIER_FILE, is_tenant
from kvtier_connector.store.progress import readable_size

_KEEP_ALL = 1 << 30
_MOST_THREADS = 64
_TENANT_FORM = "1 to 32 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"
_GC_OPTIONS = {
    "max_bytes": "--max-bytes",
    "high_watermark": "--high",
    "low_watermark": "--low",
    "ttl_seconds": "--ttl",
    "keep_previous": "--keep-previous",
    "current": "--current",
}
"""Fields of the janitor's document, and the options that replace them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(parser, options)
    except (ConnectorError, OSError) as error:
        sys.stderr.write(f"kvtier {options.command}: {error}\n")
        return 1
    return status


def find_tier(directory: Path) -> Path:
    """Return the directory of the one tier that is meant: this one, that of this generation, or the only one below.

    Raises:
        ConfigInvalid: there is none, or several.
    """
    if (directory / TIER_FILE).is_file():
        return directory.resolve().parent
    tiers = sorted({root.parent for root in find_generations(directory)})
    if len(tiers) > 1:
        raise ConfigInvalid(f"{directory}: holds several tiers; name one of {', '.join(map(str, tiers))}")
    if not tiers:
        raise ConfigInvalid(f"{directory}: holds no tier: no directory at or below it has a {TIER_FILE}")
    return tiers[0].resolve()


def _purge(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    criteria = Criteria(
        older_than_seconds=options.older_than,
        generation=options.generation,
        tenant=options.tenant,
        prefix=None if options.prefix is None else parse_hash(options.prefix),
    )
    if (criteria == Criteria()) is not options.all:
        parser.error("purge: say what is to go: --older-than, --generation, --tenant, --prefix, or else --all")
    # Nothing is removed through a link, but the one that a person names is meant.
    results = purge(options.directory.resolve(), criteria, is_dry=not options.yes, threads=options.threads)
    blocks, size = sum(each.blocks for each in results), sum(each.bytes for each in results)
    problems = [each for each in results if each.problem]
    if options.json:
        document = {
            "dryRun": not options.yes,
            "blocks": blocks,
            "bytes": size,
            "generations": [asdict(each) for each in results],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        verb = "removed" if options.yes else "would remove"
        for each in results:
            rest = f", and {each.leftovers} quarantined or partial files" if each.leftovers else ""
            sys.stdout.write(f"{each.path}: {verb} {each.blocks} blocks, {readable_size(each.bytes)}{rest}\n")
        sys.stdout.write(f"{verb} {blocks} blocks, {readable_size(size)}\n")
        if not options.yes:
            sys.stdout.write("nothing was removed; add --yes to do it\n")
    for each in problems:
        sys.stderr.write(f"kvtier purge: {each.path}: {each.problem}\n")
    return 1 if problems else 0


def _pin(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    tier = find_tier(options.directory)
    pins = read_pins(tier)
    if options.hash is None:
        if options.name is not None:
            parser.error("pin: HASH is missing: say which block --name is to pin")
        return _list_pins(pins, is_json=options.json)
    if options.name is None:
        parser.error("pin: --name is required, so that it can be unpinned")
    name, pinned = check_name(options.name), parse_hash(options.hash)
    if pins.get(name, pinned) != pinned:
        raise ConfigInvalid(f"name {name!r}: pins {pins[name].hex()} already; unpin it, or take another name")
    write_pins(tier, {**pins, name: pinned})
    copies = _copies(tier, pinned)
    if options.json:
        document = {"name": name, "hash": pinned.hex(), "blocks": copies}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        there = f"{copies} blocks have this hash" if copies else "no block has this hash now; it holds once one has"
        sys.stdout.write(f"pinned {pinned.hex()} as {name}: {there}\n")
    return 0


def _unpin(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    tier = find_tier(options.directory)
    pins = read_pins(tier)
    if options.name not in pins:
        known = ", ".join(sorted(pins)) or "there are none"
        raise ConfigInvalid(f"name {options.name!r}: no such pin; {known}")
    rest = {name: pinned for name, pinned in pins.items() if name != options.name}
    write_pins(tier, rest)
    if options.json:
        return _list_pins(rest, is_json=True)
    sys.stdout.write(f"unpinned {options.name}\n")
    return 0


def _list_pins(pins: dict[str, bytes], *, is_json: bool) -> int:
    if is_json:
        sys.stdout.write(json.dumps({name: pins[name].hex() for name in sorted(pins)}, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{name} {pins[name].hex()}\n" for name in sorted(pins))
    return 0


def _copies(tier: Path, pinned: bytes) -> int:
    """Count the blocks with the hash, over all generations, groups and tenants."""
    text = pinned.hex()
    pattern = f"blocks/{text[:3]}/{text[3:5]}/{text}_g*.kvb"
    return sum(
        1 for root in find_generations(tier) for trees in (pattern, f"tenants/*/{pattern}") for _ in root.glob(trees)
    )


def _gc(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    config = _gc_config(options)
    # Not lasting: a janitor that is at work keeps its own brake and its own ledger.
    keeper = Keeper(config, is_lasting=False, may_act=lambda: not options.dry_run)
    keeper.open()
    keeper.finish()
    report = keeper.report
    if report is None:
        raise ConfigInvalid(f"{config.tier_dir}: could not be looked at")
    planned: dict[str, int] = {}
    if options.dry_run:
        choice = keeper.plan()
        begin = 0
        for reason, end in zip(choice.reasons, choice.ends, strict=True):
            planned[reason.value] = planned.get(reason.value, 0) + end - begin
            begin = end
    evicted = planned if options.dry_run else {name: count for name, count in report.evicted_blocks.items() if count}
    _show_gc(evicted, report.usage.blocks, report.usage.used_bytes, report.removed_leftovers, options)
    for problem in report.problems.values():
        sys.stderr.write(f"kvtier gc: {problem}\n")
    return 1 if report.problems else 0


def _show_gc(
    evicted: dict[str, int], blocks: int, used_bytes: int, leftovers: Any, options: argparse.Namespace
) -> None:
    if options.json:
        document = {
            "dryRun": options.dry_run,
            "evicted": evicted,
            "removedLeftovers": {name: count for name, count in leftovers.items() if count},
            "blocks": blocks,
            "bytes": used_bytes,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    verb = "would remove" if options.dry_run else "removed"
    sys.stdout.writelines(f"{verb} {count} blocks: {reason}\n" for reason, count in evicted.items())
    sys.stdout.writelines(f"removed {count} leftovers: {kind}\n" for kind, count in leftovers.items() if count)
    sys.stdout.write(f"{blocks} blocks, {readable_size(used_bytes)} on the volume\n")


def _gc_config(options: argparse.Namespace) -> JanitorConfig:
    """Return the settings of the file, or of the command line alone."""
    tier = find_tier(options.directory)
    roots = [root for root in find_generations(tier) if root.parent.resolve() == tier]
    if options.current is not None and options.current not in {root.name for root in roots}:
        # Otherwise the one that is in use would be taken for an old one.
        raise ConfigInvalid(f"{tier}: holds no generation {options.current}; kvtier inspect shows which there are")
    if options.config is not None:
        config = _read_config(options.config)
    else:
        # The one that was made last is most likely the one in use.
        newest = max(roots, key=lambda root: (root.stat().st_mtime_ns, root.name)).name
        config = JanitorConfig(tier=tier.name, tier_dir=str(tier), current=newest, keep_previous=_KEEP_ALL)
    given = {name: getattr(options, name) for name in _GC_OPTIONS if getattr(options, name) is not None}
    try:
        return replace(config, tier_dir=str(tier), lease_name="", **given)
    except ConfigInvalid as error:
        message = str(error).removeprefix(f"{JANITOR_CONFIG_FILE}: ")
        for name, option in _GC_OPTIONS.items():
            message = message.replace(f"{name}=", f"{option} ")
        raise ConfigInvalid(message) from error


def _read_config(path: Path) -> JanitorConfig:
    try:
        return decode(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"--config {path}: not text: {error}; name the janitor's {JANITOR_CONFIG_FILE}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description=(__doc__ or "").partition(":")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_purge(_command(commands, "purge", _purge, "remove blocks by age, generation, tenant or prefix, or all"))
    pin = _command(commands, "pin", _pin, "keep a block and all before it; without HASH, list what is pinned")
    pin.add_argument("hash", nargs="?", metavar="HASH", help="hex digits before _g in the name of the block's file")
    pin.add_argument("--name", help="by which it can be unpinned")
    unpin = _command(commands, "unpin", _unpin, "let a pinned block go again")
    unpin.add_argument("name", help="as it was pinned")
    _add_gc(_command(commands, "gc", _gc, "do now, and once, what the janitor does all the time"))
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.ArgumentParser, argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("directory", type=Path, metavar="DIR", help="of a tier, a generation, or any above")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run)
    return command


def _parse_tenant(text: str) -> str:
    """Return the tenant; argparse turns the error into a message."""
    if text and not is_tenant(text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a tenant: must be {_TENANT_FORM}")
    return text


def _parse_threads(text: str) -> int:
    """Return a number of threads; argparse turns the error into a message."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST_THREADS}")
    return int(text)


def _add_purge(command: argparse.ArgumentParser) -> None:
    command.add_argument("--older-than", type=units.parse_seconds, metavar="TIME", help="written before, as 7d or 12h")
    command.add_argument("--generation", metavar="DIGEST", help="of this generation alone")
    command.add_argument(
        "--tenant", type=_parse_tenant, help="of this tenant alone; '' for the blocks of nobody in particular"
    )
    command.add_argument("--prefix", metavar="HASH", help="this block and all that continue it")
    command.add_argument("--all", action="store_true", help="everything")
    command.add_argument("--yes", action="store_true", help="do it; otherwise it only says what would go")
    command.add_argument(
        "--threads", type=_parse_threads, default=8, metavar="N", help="directories read at once (default: 8)"
    )


def _add_gc(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="the janitor's document; options here go first")
    command.add_argument("--max-bytes", type=units.parse_size, metavar="SIZE", help="budget of the tier, as 100Gi")
    share: dict[str, Any] = {"type": units.parse_share, "metavar": "SHARE"}
    command.add_argument("--high", dest="high_watermark", help="evict above it (default: 90%%)", **share)
    command.add_argument("--low", dest="low_watermark", help="evict down to it (default: 75%%)", **share)
    command.add_argument(
        "--ttl", dest="ttl_seconds", type=units.parse_seconds, metavar="TIME", help="remove what is older, as 7d"
    )
    command.add_argument("--keep-previous", type=int, metavar="N", help="previous generations that stay (default: all)")
    command.add_argument("--current", metavar="DIGEST", help="the generation in use (default: the newest)")
    command.add_argument("--dry-run", action="store_true", help="say what would go and remove nothing")


if __name__ == "__main__":
    sys.exit(main())
