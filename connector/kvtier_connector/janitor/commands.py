# SPDX-License-Identifier: Apache-2.0
"""The commands on a volume: inspect, check, purge and gc. `kvtier` calls them here, or inside the janitor's pod.

``python3 -m kvtier_connector.janitor.commands REQUEST`` runs one in a pod. REQUEST is a JSON object: ``verb``,
``config`` (the janitor's document, which names the directory) and ``options``. Each line of the answer is an object:
``{"progress": [share, blocks, bytes]}`` now and then, and one ``{"status": 0 or 1, "document": …}`` or
``{"status": 1, "error": …}`` at the end.

Nothing is removed unless the option ``yes`` is set. Engines and the janitor may run at the same time.
"""

from __future__ import annotations

import contextlib
import inspect as signatures
import json
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier_connector.contract.errors import ConfigInvalid, ConnectorError, StoreUnavailable
from kvtier_connector.contract.janitor import BLOCKS_LAYOUT, JANITOR_CONFIG_FILE, JanitorConfig, decode
from kvtier_connector.store import fsck, scan
from kvtier_connector.store.crypto import Keyring
from kvtier_connector.store.fs import LOCAL, FileSystem, read_file
from kvtier_connector.store.header import HEADER_BYTES, Fault, Header, decode_header
from kvtier_connector.store.identity import find_generations, is_new_tier
from kvtier_connector.store.journal import JournalWriter, Op, Purge, record_purge
from kvtier_connector.store.layout import BLOCKS, TENANTS, TIER_FILE, adapter_name_label, is_tenant, tenant_of

MOST_PROBLEMS: Final = 1000
"""Problems listed in the document of a check; all are counted."""
_TELL_SECONDS: Final = 0.2
_KEEP_ALL: Final = 1 << 30
_TENANT_FORM: Final = "1 to 32 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"
_FLUSH_EVERY = 4096
_READ_AT_ONCE = 4096
_MOST_PASSES = 10
_NO_AGE_SECONDS = -1e9
"""A partial file matches also if its time is ahead of this clock."""

_OTHER_RELEASES = frozenset({Fault.VERSION, Fault.ALGORITHM})
"""Intact headers that this release cannot read."""


@dataclass(slots=True)
class Purged:
    """Files found, or removed, in one generation."""

    path: str
    blocks: int = 0
    bytes: int = 0
    """Of all files counted here."""
    partials: int = 0
    """Unfinished files of writers; each may hold a whole block."""
    quarantined: int = 0
    failed: int = 0
    problem: str = ""


_Entry = scan.BlockEntry | scan.Leftover


def purge_blocks(  # noqa: PLR0913 - keywords
    directory: Path,
    selection: Purge,
    *,
    is_dry: bool,
    generation: str | None = None,
    fs: FileSystem = LOCAL,
    threads: int = 8,
    progress: scan.WalkProgress | None = None,
) -> list[Purged]:
    """Remove the files that match, at or below the directory; with `is_dry` only count them.

    An empty tenant stands for the common blocks. Without a `generation` all of them are purged.

    Raises:
        StoreUnavailable: the directory cannot be walked.
        ConfigInvalid: there is no generation of that name, or no such tenant.
    """
    roots = [root for root in find_generations(directory, fs=fs) if generation in {None, root.name}]
    if not roots:
        name = "" if generation is None else f" {generation}"
        raise ConfigInvalid(f"{directory}: holds no generation{name}; kvtier inspect shows which there are")
    if selection.tenant:
        _check_tenant(directory, roots, selection.tenant, fs=fs)
    progress = progress or scan.WalkProgress()
    progress.begin(len(roots) * (1 if is_dry else 2))
    results = []
    for root in roots:
        results.append(result := Purged(str(root.relative_to(directory))))
        rooted = fs.rooted(str(root))
        one = _Purging(
            root=root,
            fs=rooted,
            threads=threads,
            selection=selection,
            progress=progress,
            journal=JournalWriter(root, fs=rooted),
            result=result,
        )
        try:
            one.run(is_dry=is_dry)
        except (StoreUnavailable, OSError) as error:
            result.problem = str(error)
    return results


def _check_tenant(directory: Path, roots: Iterable[Path], tenant: str, *, fs: FileSystem) -> None:
    for root in roots:
        try:
            if stat.S_ISDIR(fs.stat(f"{root}/{TENANTS}/{tenant}").st_mode):
                return
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StoreUnavailable(f"{root}: cannot be walked: {error}") from error
    raise ConfigInvalid(f"{directory}: holds no tenant {tenant}; kvtier inspect shows the largest there are")


@dataclass(kw_only=True)
class _Purging:
    """The purge of one generation. One thread, except for reading headers.

    Engines may store meanwhile: the purge log (see `store.journal`) keeps blocks that they queued before from landing.
    """

    root: Path
    fs: FileSystem
    threads: int
    selection: Purge
    progress: scan.WalkProgress
    journal: JournalWriter
    result: Purged

    def run(self, *, is_dry: bool) -> None:
        if is_dry:
            for entry in self._choose([]):
                self._count(entry)
            self.progress.finish()
            return
        record_purge(self.fs, str(self.root), self.selection)
        # A pass may miss a file that is renamed while its directory is listed, so another follows until none is found.
        # Partial files do not count: their writers look at the purge log before the rename, and remove them.
        for _ in range(_MOST_PASSES):
            is_clean = self._pass()
            self.progress.finish()
            if is_clean or self.result.failed:
                break
        else:
            self.result.problem = self.result.problem or (
                "engines go on storing these blocks: they may run an earlier release; set the mode to Bypass, and "
                "purge again"
            )

    def _pass(self) -> bool:
        """Remove all matching files; return whether only partial files were found."""
        unread: list[OSError] = []
        is_clean = True
        for entry in self._choose(unread):
            is_clean &= isinstance(entry, scan.Leftover) and entry.kind is scan.LeftoverKind.PARTIAL
            try:
                self.fs.unlink(f"{self.root}/{entry.path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                self.result.failed, self.result.problem = self.result.failed + 1, str(error)
                continue
            self._count(entry)
            if isinstance(entry, scan.BlockEntry):
                self.journal.append(Op.GONE, entry.key, max(0, entry.size - HEADER_BYTES))
                if self.journal.pending == _FLUSH_EVERY:
                    self._flush()
        self._flush()
        if unread:
            self.result.failed += len(unread)
            self.result.problem = self.result.problem or str(unread[0])
        return is_clean

    def _count(self, entry: _Entry) -> None:
        self.result.bytes += entry.size
        if isinstance(entry, scan.BlockEntry):
            self.result.blocks += 1
            self.progress.add(entry.size)
        elif entry.kind is scan.LeftoverKind.PARTIAL:
            self.result.partials += 1
        else:
            self.result.quarantined += 1

    def _flush(self) -> None:
        # The janitor counts again by walking, so a record that cannot be written costs nothing.
        with contextlib.suppress(StoreUnavailable):
            if self.journal.pending:
                self.journal.flush()

    def _choose(self, unread: list[OSError]) -> Iterator[_Entry]:
        """Yield the matching files; errors of unreadable ones are added to `unread`."""
        found = scan.scan(
            self.root,
            fs=self.fs,
            partial_age_seconds=_NO_AGE_SECONDS,
            threads=self.threads,
            unread=unread,
            on_share=self.progress.reach,
        )
        entries = (each for each in found if self._may_match(each))
        if self.selection.adapter is None:
            yield from entries
            return
        with ThreadPoolExecutor(self.threads, thread_name_prefix="kvtier-purge") as pool:
            while some := list(islice(entries, _READ_AT_ONCE)):
                for entry, answer in zip(some, pool.map(self._is_of_adapter, some), strict=True):
                    if isinstance(answer, OSError):
                        unread.append(answer)
                    elif answer:
                        yield entry

    def _may_match(self, entry: _Entry) -> bool:
        """Return whether a file holds a block of the tenant, whole or in part."""
        if isinstance(entry, scan.Leftover):
            is_partial_block = entry.kind is scan.LeftoverKind.PARTIAL and BLOCKS in entry.path.split("/")
            if not is_partial_block and entry.kind is not scan.LeftoverKind.QUARANTINED:
                return False
        return self.selection.tenant in {None, tenant_of(entry.path)}

    def _is_of_adapter(self, entry: _Entry) -> bool | OSError:
        """Return whether the header names the adapter; True for a partial or damaged file that does not tell."""
        path = f"{self.root}/{entry.path}"
        try:
            header = decode_header(read_file(self.fs, path, most_bytes=HEADER_BYTES))
        except FileNotFoundError:
            return False
        except OSError as error:
            return error
        if isinstance(header, Header):
            return header.lineage.adapter.startswith(self.selection.adapter or "")
        if isinstance(entry, scan.Leftover) or header not in _OTHER_RELEASES:
            # Nothing is lost: no engine reads such a file.
            return True
        return OSError(
            f"{path}: blocks of another release do not tell their adapter; purge this generation with --generation "
            f"{self.root.name}"
        )


class CommandResult(NamedTuple):
    """Result of a command."""

    status: int
    """0: no problem; 1: problems were found, or part of the command could not be done."""
    document: dict[str, Any]


def inspect(directory: Path, tell: scan.Tell, *, threads: int = 4) -> CommandResult:
    """Count the files below the directory."""
    roots = _generations(directory)
    progress, now_ns = scan.WalkProgress(tell), time.time_ns()
    progress.begin(len(roots))
    generations = [
        fsck.count_generation(directory, root, now_ns=now_ns, threads=threads, progress=progress) for root in roots
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
    return CommandResult(1 if any(each.problem for each in generations) else 0, document)


def _volume(directory: Path) -> dict[str, int]:
    """Return size and free bytes of the volume; a directory that does not exist yet counts as the one above it."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    volume = os.statvfs(directory)
    return {"bytes": volume.f_blocks * volume.f_frsize, "free": volume.f_bavail * volume.f_frsize}


def check(
    directory: Path,
    tell: scan.Tell,
    *,
    keys_dir: str = "",
    partial_age_seconds: float = scan.PARTIAL_AGE_SECONDS,
    threads: int = 4,
) -> CommandResult:
    """Verify every byte below the directory."""
    _generations(directory)
    report = fsck.check_all(
        directory,
        keyring=Keyring(keys_dir) if keys_dir else None,
        partial_age_seconds=partial_age_seconds,
        threads=threads,
        progress=scan.WalkProgress(tell),
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
    return CommandResult(1 if report.problems else 0, document)


def purge(  # noqa: PLR0913 - keywords with defaults
    directory: Path,
    tell: scan.Tell,
    *,
    generation: str | None = None,
    tenant: str | None = None,
    lora: str | None = None,
    yes: bool = False,
    threads: int = 8,
) -> CommandResult:
    """Remove the blocks that match every given option, all blocks without one; without `yes` only count them."""
    if tenant and not is_tenant(tenant):
        raise ConfigInvalid(f"{tenant!r} cannot be a tenant: must be {_TENANT_FORM}")
    selection = Purge(tenant, None if lora is None else adapter_name_label(lora))
    results = []
    if _generations(directory) or generation is not None:
        # Nothing is removed through a link, but the directory itself may be one.
        results = purge_blocks(
            directory.resolve(),
            selection,
            generation=generation,
            is_dry=not yes,
            threads=threads,
            progress=scan.WalkProgress(tell),
        )
    document = {
        "dryRun": not yes,
        "blocks": sum(each.blocks for each in results),
        "bytes": sum(each.bytes for each in results),
        "generations": [asdict(each) for each in results],
    }
    return CommandResult(1 if any(each.problem for each in results) else 0, document)


def gc(
    directory: Path, tell: scan.Tell, *, limits: Mapping[str, Any], config: str | None = None, yes: bool = False
) -> CommandResult:
    """Sweep a tier once; without `yes` only report which blocks would go.

    `limits` replace fields of the janitor's document `config`; without that only they apply.
    """
    from kvtier_connector.janitor.sweep import Sweeper  # noqa: PLC0415 - a check or a purge needs no numpy

    document: dict[str, Any] = {"dryRun": not yes, "evicted": {}, "removedLeftovers": {}}
    if not (roots := _generations(directory)):
        return CommandResult(0, {**document, "blocks": 0, "bytes": 0, "problems": []})
    tiers = sorted({root.resolve().parent for root in roots})
    if len(tiers) > 1:
        raise ConfigInvalid(f"{directory}: holds several tiers; name one of {', '.join(map(str, tiers))}")
    # Not lasting: a running janitor keeps its own catalog and permit.
    sweeper = Sweeper(_settings(tiers[0], config, limits), is_lasting=False, may_act=lambda: yes)
    sweeper.open()
    sweeper.finish(tell)
    report = sweeper.report
    evicted = report.tallies.evicted_blocks.copy()
    if not yes:
        for reason, rows in sweeper.plan():
            evicted[reason.value] += rows.size
    document |= {
        "evicted": dict(+evicted),
        "removedLeftovers": dict(+report.tallies.removed_leftovers),
        "blocks": report.usage.blocks,
        "bytes": report.usage.used_bytes,
        "problems": list(report.problems.values()),
    }
    return CommandResult(1 if report.problems else 0, document)


COMMANDS: Final[Mapping[str, Callable[..., CommandResult]]] = {
    each.__name__: each for each in (inspect, check, purge, gc)
}


def do(verb: str, directory: Path, options: Mapping[str, Any], tell: scan.Tell) -> CommandResult:
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
        # Otherwise the generation in use would count as an old one.
        raise ConfigInvalid(f"{tier}: holds no generation {current}; kvtier inspect shows which there are")
    if config_file is not None:
        settings = _read_config(Path(config_file))
    else:
        # The generation made last is most likely the one in use.
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
    try:
        request = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
        directory = _tier_directory(Path(request["config"]))
        result = do(request["verb"], directory, request.get("options", {}), _make_tell())
    except (ConnectorError, OSError) as error:
        _write_line({"status": 1, "error": str(error)})
        return 1
    except (LookupError, ValueError, TypeError) as error:
        _write_line({"status": 2, "error": f"not a request: {error!r}"})
        return 2
    _write_line({"status": result.status, "document": result.document})
    return result.status


def _tier_directory(config_file: Path) -> Path:
    """Return the directory of the janitor's tier; raise ConfigInvalid if the connector's files are not kvtier's."""
    config = _read_config(config_file)
    directory = Path(config.tier_dir)
    # The tier may have used kvtier's own connector before: its generations are still there.
    if config.layout != BLOCKS_LAYOUT and not find_generations(directory):
        raise ConfigInvalid(
            f"tier {config.tier}: the volume has no blocks of kvtier's own connector, and this command does not know "
            "vLLM's files. kvtier status shows their size; the janitor keeps them within spec.disk.budget"
        )
    return directory


def _write_line(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _make_tell() -> scan.Tell:
    """Return a function that writes the progress a few times a second at most."""
    due = 0.0

    def tell(share: float, blocks: int, size: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _TELL_SECONDS
            _write_line({"progress": [share, blocks, size]})

    return tell


if __name__ == "__main__":
    sys.exit(main())
