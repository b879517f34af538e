# SPDX-License-Identifier: Apache-2.0
"""The chore ``clone``: copies a generation to another directory, and believes no block there before it was verified.

Where both lie on one file system that can, a copy shares its bytes with what it is a copy of and takes no time. What
is there already stays; so a clone that was cut short goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvtier_connector.errors import ConfigInvalid, IdentityMismatch
from kvtier_connector.janitor.by_hand import find_tier
from kvtier_connector.janitor.chores import Outcome
from kvtier_connector.store import identity
from kvtier_connector.store.check import verify_open
from kvtier_connector.store.format import FORMAT_VERSION, Fault
from kvtier_connector.store.fs import CREATE_FLAGS, LOCAL, READ_FLAGS, make_directories
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import find_home
from kvtier_connector.store.progress import Progress, Tell
from kvtier_connector.store.publishing import replacing
from kvtier_connector.store.scan import BlockEntry, scan

_FICLONE: Final = 0x40049409
_PIECE_BYTES: Final = 1 << 24
_AT_ONCE: Final = 256
_BOTH_WAYS: Final = (CREATE_FLAGS & ~os.O_WRONLY) | os.O_RDWR
_UNVERIFIED: Final = frozenset({Fault.KEY_MISSING, Fault.KEY_WRONG})


class _DamagedError(Exception):
    """What arrived is not the block."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


def clone(  # noqa: PLR0913 - keywords with defaults
    directory: Path,
    tell: Tell,
    *,
    to: str,
    generation: str | None = None,
    keys_dir: str = "",
    yes: bool = False,
    threads: int = 8,
) -> Outcome:
    """Copy a generation below the tier's directory `to`; without `yes` only count what would be copied.

    Raises:
        ConfigInvalid: there is no such generation, or it has no description that can be read.
        IdentityMismatch: what is at the target is another's.
    """
    root = find_root(directory, generation)
    document = read_identity(root)
    target, progress = Path(to).absolute() / root.name, Progress(tell)
    if target.resolve() == root.resolve():
        raise ConfigInvalid(f"{to}: is the tier that is to be copied; name another directory")
    if yes:
        identity.claim(target, document["identity"], document["digest"])
    elif (there := identity.read(target)) is not None and there != document:
        raise IdentityMismatch(f"{target}: holds blocks of another identity; name another directory")
    keyring = Keyring(keys_dir) if keys_dir else None
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-clone") as pool:
        for entries in _some(root, progress, threads):
            for entry, what in zip(
                entries, pool.map(lambda each: _copy(root, target, each, keyring, yes=yes), entries), strict=True
            ):
                progress.add(entry.size)
                if isinstance(what, Fault):
                    faults.append({"path": entry.path, "kind": what.value})
                    continue
                counts[what] += 1
                counts["bytes"] += entry.size if what != "present" else 0
    progress.finish()
    copied = counts["copied"] + counts["shared"] + counts["unverified"]
    result = {
        "dryRun": not yes,
        "generation": root.name,
        "to": str(target),
        "blocks": copied,
        "bytes": counts["bytes"],
        "shared": counts["shared"],
        "present": counts["present"],
        "unverified": counts["unverified"],
        "damaged": faults,
    }
    return Outcome(1 if faults else 0, result)


def find_root(directory: Path, generation: str | None) -> Path:
    """Return the directory of a generation: the one that is named, or the only one there is.

    Raises:
        ConfigInvalid: there is none of that name, or there are several to choose from.
    """
    tier = find_tier(directory)
    roots = {root.name: root for root in find_generations(tier)}
    if generation is not None and generation not in roots:
        raise ConfigInvalid(f"{tier}: holds no generation {generation}; kvtier inspect shows which there are")
    if generation is None and directory.resolve().name in roots and directory.resolve().parent == tier:
        generation = directory.resolve().name
    if generation is None and len(roots) > 1:
        raise ConfigInvalid(
            f"{tier}: holds several generations; name one with --generation: {', '.join(sorted(roots))}"
        )
    return roots[generation] if generation is not None else next(iter(roots.values()))


def read_identity(root: Path) -> dict[str, Any]:
    """Return what a generation says of itself, so that its blocks can be taken elsewhere.

    Raises:
        ConfigInvalid: it has no description, or this release reads none of its blocks.
        IdentityMismatch: the description cannot be understood.
        StoreUnavailable: it cannot be read.
    """
    document = identity.read(root)
    if document is None:
        raise ConfigInvalid(f"{root}: has no tier.json, so nobody can tell whose blocks these are; none is copied")
    if (version := document.get("format")) != FORMAT_VERSION:
        raise ConfigInvalid(
            f"{root}: is of format {version!r}, of which this release reads no block; take the release that wrote it"
        )
    return document


def _some(root: Path, progress: Progress, threads: int) -> Iterator[list[BlockEntry]]:
    found: list[BlockEntry] = []
    for entry in scan(root, threads=threads, on_share=progress.reach):
        if isinstance(entry, BlockEntry):
            found.append(entry)
        if len(found) == _AT_ONCE:
            yield found
            found = []
    yield found


def _copy(root: Path, target: Path, entry: BlockEntry, keyring: Keyring | None, *, yes: bool) -> Fault | str:
    """Return what came of one block: copied, shared, unverified, present, or what is wrong with it."""
    path = target / entry.path
    if path.exists():
        return "present"
    if not yes:
        return "copied"
    try:
        source = LOCAL.open(f"{root}/{entry.path}", READ_FLAGS)
    except FileNotFoundError:
        return "present"
    try:
        make_directories(LOCAL, str(path.parent))
        with replacing(LOCAL, str(path), flags=_BOTH_WAYS) as fd:
            is_shared = _fill(source, fd, entry.size)
            fault = verify_open(LOCAL, fd, entry.key, find_home(target.name), keyring)
            _refuse(fault)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    except _DamagedError as error:
        return error.fault
    finally:
        LOCAL.close(source)
    if fault is not None:
        return "unverified"
    return "shared" if is_shared else "copied"


def _refuse(fault: Fault | None) -> None:
    """Raise for what is damaged, so that what was written so far does not get its name."""
    if fault is not None and fault not in _UNVERIFIED:
        raise _DamagedError(fault)


def _fill(source: int, fd: int, size: int) -> bool:
    """Copy a file; tell whether both share their bytes now."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, _FICLONE, source)
        return True
    done = 0
    while done < size and (count := os.sendfile(fd, source, done, min(_PIECE_BYTES, size - done))):
        done += count
    return False
