# SPDX-License-Identifier: Apache-2.0
"""Which generations a tier has on the volume, who uses them still, and which of them go."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import (
    BLOCKS,
    JOURNAL,
    PURGES_FILE,
    QUARANTINE,
    TENANTS,
    TIER_FILE,
    find_home,
    is_partial,
    parse_journal_path,
)

_PARTS = {BLOCKS, TENANTS, QUARANTINE, JOURNAL, PURGES_FILE, TIER_FILE}


class Generation(NamedTuple):
    """One generation on the volume."""

    digest: str
    created_ns: int
    """When its ``tier.json`` was written, 0 if it has none."""
    strangers: tuple[str, ...]
    """Names under its root that nothing here makes; it is never removed with them."""
    problem: str = ""
    """Why it cannot be looked at; empty if it can. Then nothing else is known of it."""


class Standing(NamedTuple):
    """How much a generation is needed."""

    digest: str
    active_ns: int
    """When an engine last did something in it, as far as anybody can tell."""


def find_generations(fs: FileSystem, tier_dir: str, known: Iterable[Generation] = ()) -> list[Generation]:
    """Return the generations of the tier by digest; those known already are not looked at again.

    Raises:
        OSError: the directory of the tier cannot be looked at.
    """
    by_digest = {each.digest: each for each in known if not each.problem}
    try:
        entries = fs.scandir(tier_dir)
    except FileNotFoundError:
        return []
    found = []
    for entry in sorted(entries, key=lambda each: each.name):
        if entry.name in by_digest:
            found.append(by_digest[entry.name])
        # A preflight's directory may hold whatever a generation holds.
        elif find_home(entry.name) is not None and entry.is_dir(follow_symlinks=False):
            try:
                generation = look_at(fs, tier_dir, entry.name)
            except OSError as error:
                # The others can be kept all the same.
                generation = Generation(entry.name, 0, (), str(error))
            found += [] if generation is None else [generation]
    return found


def look_at(fs: FileSystem, tier_dir: str, digest: str) -> Generation | None:
    """Return the generation in a directory, None if there is none; raise OSError if it cannot be looked at."""
    root = f"{tier_dir}/{digest}"
    try:
        names = {entry.name for entry in fs.scandir(root)}
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not names & _PARTS:
        return None
    created_ns = 0
    if TIER_FILE in names:
        try:
            created_ns = fs.stat(f"{root}/{TIER_FILE}").st_mtime_ns
        except FileNotFoundError:
            created_ns = 0
    strangers = sorted(name for name in names - _PARTS if not is_partial(name))
    return Generation(digest, created_ns, tuple(strangers))


def last_written_ns(fs: FileSystem, root: str, *, but: Collection[str]) -> int:
    """Return when anybody but these writers last wrote a journal, 0 if nobody did; raise OSError if nobody can tell."""
    latest = 0
    try:
        entries = fs.scandir(f"{root}/{JOURNAL}")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for entry in entries:
        name = parse_journal_path(f"{JOURNAL}/{entry.name}")
        if name is None or name.writer in but:
            continue
        try:
            latest = max(latest, fs.stat(f"{root}/{JOURNAL}/{entry.name}").st_mtime_ns)
        except FileNotFoundError:
            continue
    return latest


def rank(standings: Iterable[Standing], current: str) -> list[str]:
    """Return the digests in the order in which they are given up last: the current one, then by last activity."""
    ordered = sorted(standings, key=lambda each: (each.digest != current, -each.active_ns, each.digest))
    return [each.digest for each in ordered]


def condemn(standings: Iterable[Standing], *, current: str, keep_previous: int, idle_ns: int, now_ns: int) -> list[str]:
    """Return the generations to remove whole: neither current, nor one of the previous ones to keep, nor in use.

    Directories of weights that replaced the model's own are none of the previous ones: no edit leads back to them.
    """
    others = [each for each in standings if each.digest != current]
    others.sort(key=lambda each: (-each.active_ns, each.digest))
    kept = [each for each in others if not _is_of_an_update(each.digest)][:keep_previous]
    return [each.digest for each in others if each not in kept and now_ns - each.active_ns > idle_ns]


def _is_of_an_update(directory: str) -> bool:
    home = find_home(directory)
    return home is not None and home.epoch != ""
