# SPDX-License-Identifier: Apache-2.0
"""The commands on a volume: inspect, check, purge and gc. `kvtier` calls them here, or inside the janitor's pod.

``python3 -m kvtier_connector.janitor.commands REQUEST`` runs one in a pod. REQUEST is a JSON object: ``verb``,
``config`` (the janitor's document, which names the directory) and ``options``. Each line of the answer is an object:
``{"progress": [share, blocks, bytes]}`` now and then, and one ``{"status": 0 or 1, "document": …}`` or
``{"status": 1, "error": …}`` at the end.

Nothing is removed unless the option ``yes`` is set. Engines and the janitor may run at the same time.
"""

from __future__ import annotations

import inspect as signatures
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from kvtier_connector.contract_janitor import BLOCKS_LAYOUT, JANITOR_CONFIG_FILE, JanitorConfig, decode
from kvtier_connector.errors import ConfigInvalid, ConnectorError
from kvtier_connector.janitor.purge import Criteria
from kvtier_connector.janitor.purge import purge as purge_blocks
from kvtier_connector.store import check as checks
from kvtier_connector.store import inspect as inspection
from kvtier_connector.store.generations import find_generations, is_new_tier
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import TIER_FILE, is_tenant
from kvtier_connector.store.progress import Progress, Tell
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS

MOST_PROBLEMS: Final = 1000
"""Problems listed in the document of a check; all are counted."""
_TELL_SECONDS: Final = 0.2
_KEEP_ALL: Final = 1 << 30
_TENANT_FORM: Final = "1 to 32 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"


class Outcome(NamedTuple):
    """Result of a command."""

    status: int
    """0: all is well; 1: something was found, or part of it could not be done."""
    document: dict[str, Any]


def inspect(directory: Path, tell: Tell, *, threads: int = 4) -> Outcome:
    """Count what lies below the directory."""
    roots = _generations(directory)
    progress, now_ns = Progress(tell), time.time_ns()
    progress.begin(len(roots))
    generations = [
        inspection.look_at(directory, root, now_ns=now_ns, threads=threads, progress=progress) for root in roots
    ]
    document: dict[str, Any] = {
        "blocks": sum(each.blocks.files for each in generations),
        "bytes": sum(each.blocks.bytes for each in generations),
        "volume": _volume(directory),
        "generations": [],
    }
    for each in generations:
        row = asdict(each)
        row["oldestSeconds"], row["newestSeconds"] = row.pop("oldest_seconds"), row.pop("newest_seconds")
        document["generations"].append(row)
    return Outcome(1 if any(each.problem for each in generations) else 0, document)


def _volume(directory: Path) -> dict[str, int]:
    """Return size and free bytes of the volume; of a directory that is not there yet, those of the one above it."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    volume = os.statvfs(directory)
    return {"bytes": volume.f_blocks * volume.f_frsize, "free": volume.f_bavail * volume.f_frsize}


def check(
    directory: Path,
    tell: Tell,
    *,
    keys_dir: str = "",
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    threads: int = 4,
) -> Outcome:
    """Verify every byte below the directory."""
    _generations(directory)
    report = checks.inspect_all(
        directory,
        keyring=Keyring(keys_dir) if keys_dir else None,
        partial_age_seconds=partial_age_seconds,
        threads=threads,
        progress=Progress(tell),
    )
    document = {
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unverified": report.unverified,
        "compressed": report.compressed,
        "savedBytes": report.saved_bytes,
        "problemsByKind": dict(Counter(problem.kind for problem in report.problems)),
        "problems": [problem._asdict() for problem in report.problems[:MOST_PROBLEMS]],
    }
    return Outcome(1 if report.problems else 0, document)


def purge(  # noqa: PLR0913 - keywords with defaults
    directory: Path,
    tell: Tell,
    *,
    generation: str | None = None,
    tenant: str | None = None,
    lora: str | None = None,
    yes: bool = False,
    threads: int = 8,
) -> Outcome:
    """Remove the blocks that match every option given, all of them if there is none; without `yes` only count them."""
    if tenant and not is_tenant(tenant):
        raise ConfigInvalid(f"{tenant!r} cannot be a tenant: must be {_TENANT_FORM}")
    criteria = Criteria(generation=generation, tenant=tenant, lora=lora)
    results = []
    if _generations(directory) or generation is not None:
        # Nothing is removed through a link, but the directory itself may be named by one.
        results = purge_blocks(directory.resolve(), criteria, is_dry=not yes, threads=threads, progress=Progress(tell))
    document = {
        "dryRun": not yes,
        "blocks": sum(each.blocks for each in results),
        "bytes": sum(each.bytes for each in results),
        "generations": [asdict(each) for each in results],
    }
    return Outcome(1 if any(each.problem for each in results) else 0, document)


def gc(
    directory: Path, tell: Tell, *, limits: Mapping[str, Any], config: str | None = None, yes: bool = False
) -> Outcome:
    """Sweep a tier once; without `yes` only report what would go.

    Args:
        directory: The tier.
        tell: Receives the progress.
        limits: Fields of the janitor's document to replace.
        config: The janitor's document; without it only `limits` apply.
        yes: Whether to remove.
    """
    from kvtier_connector.janitor.keeper import Keeper  # noqa: PLC0415 - a check or a purge needs no numpy

    document: dict[str, Any] = {"dryRun": not yes, "evicted": {}, "removedLeftovers": {}}
    if not _generations(directory):
        return Outcome(0, {**document, "blocks": 0, "bytes": 0, "problems": []})
    settings = _settings(find_tier(directory), config, limits)
    # Not lasting: a running janitor keeps its own brake and ledger.
    keeper = Keeper(settings, is_lasting=False, may_act=lambda: yes)
    keeper.open()
    keeper.finish(tell)
    report = keeper.report
    if report is None:
        raise ConfigInvalid(f"{settings.tier_dir}: could not be looked at")
    if yes:
        evicted = dict(report.evicted_blocks)
    else:
        choice = keeper.plan()
        evicted = Counter()
        for reason, begin, end in zip(choice.reasons, [0, *choice.ends], choice.ends, strict=False):
            evicted[reason.value] += end - begin
    document |= {
        "evicted": {name: count for name, count in evicted.items() if count},
        "removedLeftovers": {name: count for name, count in report.removed_leftovers.items() if count},
        "blocks": report.usage.blocks,
        "bytes": report.usage.used_bytes,
        "problems": list(report.problems.values()),
    }
    return Outcome(1 if report.problems else 0, document)


COMMANDS: Final[Mapping[str, Callable[..., Outcome]]] = {
    "inspect": inspect,
    "check": check,
    "purge": purge,
    "gc": gc,
}


def do(verb: str, directory: Path, options: Mapping[str, Any], tell: Tell) -> Outcome:
    """Run one command.

    Raises:
        ConnectorError: it cannot be done, or this release knows no such command or option.
        OSError: the volume refuses.
    """
    command = COMMANDS.get(verb)
    unknown = [verb] if command is None else sorted(set(options) - set(signatures.signature(command).parameters))
    if command is None or unknown:
        what = ", ".join(unknown)
        raise ConfigInvalid(f"{verb}: this release does not know {what}; use a kvtier of the same release")
    return command(directory, tell, **options)


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


def _generations(directory: Path) -> list[Path]:
    """Return the generations at or below the directory; none for a tier without blocks.

    Raises:
        ConfigInvalid: the directory is no tier.
    """
    roots = find_generations(directory)
    if not roots and not is_new_tier(directory):
        raise ConfigInvalid(f"{directory}: holds no tier: no directory at or below it has a {TIER_FILE}")
    return roots


def _settings(tier: Path, config_file: str | None, limits: Mapping[str, Any]) -> JanitorConfig:
    """Return the settings of the file with the limits in it, or of the limits alone."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the one argument asks for."""
    words = sys.argv[1:] if arguments is None else arguments
    lines = Lines()
    try:
        request = json.loads(words[0])
        directory = _tier_directory(Path(request["config"]))
        outcome = do(request["verb"], directory, request.get("options", {}), lines.tell)
    except (ConnectorError, OSError) as error:
        lines.write({"status": 1, "error": str(error)})
        return 1
    except (LookupError, ValueError, TypeError) as error:
        lines.write({"status": 2, "error": f"not a request: {error!r}"})
        return 2
    lines.write({"status": outcome.status, "document": outcome.document})
    return outcome.status


def _tier_directory(config_file: Path) -> Path:
    """Return the directory of the janitor's tier; raise ConfigInvalid if the connector's files are not kvtier's."""
    config = _read_config(config_file)
    directory = Path(config.tier_dir)
    # The tier may have used kvtier's own connector before: its generations are still there.
    if config.layout != BLOCKS_LAYOUT and not find_generations(directory):
        raise ConfigInvalid(
            f"tier {config.tier}: there are no blocks of kvtier's own connector on the volume, and of vLLM's files "
            "this command knows nothing; kvtier status shows what they take, and the janitor keeps them within "
            "spec.disk.budget"
        )
    return directory


class Lines:
    """Writes JSON objects, one a line; of progress, at most a few a second."""

    def __init__(self, to: TextIO | None = None) -> None:
        """Write to standard output by default."""
        self._to = to or sys.stdout
        self._next = 0.0

    def tell(self, share: float, blocks: int, size: int) -> None:
        """Write the progress, if a line is due."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _TELL_SECONDS
            self.write({"progress": [share, blocks, size]})

    def write(self, document: Mapping[str, Any]) -> None:
        """Write a line at once."""
        self._to.write(json.dumps(document) + "\n")
        self._to.flush()


if __name__ == "__main__":
    sys.exit(main())
