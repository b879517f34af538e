# SPDX-License-Identifier: Apache-2.0
"""The chores ``export`` and ``import``: a generation as a stream of tar, and back, each block verified as it arrives.

The stream begins with a description (`HEAD`), has the block files under their paths, and ends with a count (`END`): one
that was cut off is recognised, and what came of it is kept.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from kvtier_connector.errors import ConfigInvalid, IdentityMismatch
from kvtier_connector.janitor.chores import Outcome
from kvtier_connector.janitor.cloning import find_root, read_identity
from kvtier_connector.janitor.hottest import left_out
from kvtier_connector.store import identity
from kvtier_connector.store.check import verify_open
from kvtier_connector.store.format import FORMAT_VERSION, HEADER_BYTES, Fault, decode_header, misplaced
from kvtier_connector.store.fs import CREATE_FLAGS, LOCAL, make_directories
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import BlockKey, Home, find_home, home_of, parse_block_path
from kvtier_connector.store.progress import Progress, Tell
from kvtier_connector.store.publishing import replacing, write_all
from kvtier_connector.store.scan import BlockEntry, scan

HEAD: Final = "kvtier.json"
END: Final = "kvtier.end.json"
_FORMAT: Final = 1
_MOST_DESCRIPTION: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 22
MOST_NAMED: Final = 1000
"""Damaged blocks that are named; all are counted."""
_TIME: Final = "KVTIER.mtime_ns"
_AGAIN: Final = "export it again with this release"
_BOTH_WAYS: Final = (CREATE_FLAGS & ~os.O_WRONLY) | os.O_RDWR
_UNVERIFIED: Final = frozenset({Fault.KEY_MISSING, Fault.KEY_WRONG})


def export(  # noqa: PLR0913 - keywords with defaults
    directory: Path,
    tell: Tell,
    *,
    to: IO[bytes],
    generation: str | None = None,
    most_bytes: int | None = None,
    threads: int = 8,
) -> Outcome:
    """Write a generation, or its hottest blocks of so many bytes, to a stream.

    Raises:
        ConfigInvalid: there is no such generation, or it has no description that can be read.
        OSError: the stream does not take it.
    """
    root = find_root(directory, generation)
    document = read_identity(root)
    cold = frozenset() if most_bytes is None else left_out(root, most_bytes)
    progress, counts = Progress(tell), Counter[str]()
    with tarfile.open(fileobj=to, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _describe(archive, HEAD, {"format": _FORMAT, "generation": root.name, "tier": document})
        for entry in scan(root, threads=threads, on_share=progress.reach):
            if not isinstance(entry, BlockEntry):
                continue
            if entry.key in cold:
                counts["leftOut"] += 1
                continue
            if _add(archive, root, entry):
                counts["blocks"] += 1
                counts["bytes"] += entry.size
            progress.add(entry.size)
        _describe(archive, END, {"blocks": counts["blocks"], "bytes": counts["bytes"]})
    progress.finish()
    result = {name: counts[name] for name in ("blocks", "bytes", "leftOut")}
    return Outcome(0, {"generation": root.name, **result})


def _add(archive: tarfile.TarFile, root: Path, entry: BlockEntry) -> bool:
    """Add a block; one that has gone meanwhile is none."""
    try:
        opened = (root / entry.path).open("rb")
    except FileNotFoundError:
        return False
    with opened as file:
        member = tarfile.TarInfo(entry.path)
        # Blocks are written once: its length is that of the open file, whatever its name means by now.
        member.size, member.mode = os.fstat(file.fileno()).st_size, 0o640
        member.pax_headers = {_TIME: str(entry.mtime_ns)}
        archive.addfile(member, file)
    _forget(archive)
    return True


def _forget(archive: tarfile.TarFile) -> None:
    """Drop the list of what was read or written: a generation has millions of blocks, and a stream no way back."""
    archive.members = []  # type: ignore[attr-defined]  # the stubs lack what every release of Python has


def _describe(archive: tarfile.TarFile, name: str, document: Mapping[str, Any]) -> None:
    data = json.dumps(document).encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o640
    archive.addfile(member, io.BytesIO(data))


def import_(directory: Path, tell: Tell, *, source: IO[bytes], keys_dir: str = "", yes: bool = False) -> Outcome:
    """Read a stream into the tier's directory; without `yes` verify all of it and write nothing.

    Raises:
        ConfigInvalid: the stream is none of ours.
        IdentityMismatch: the directory holds blocks of another identity.
    """
    keyring = Keyring(keys_dir) if keys_dir else None
    progress, counts = Progress(tell), Counter[str]()
    faults: list[dict[str, Any]] = []
    head: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    target = directory
    problem = ""
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in _members(archive):
                if head is None:
                    head = _read_head(archive, member)
                    target = directory / head["generation"]
                    _claim(target, head, yes=yes)
                elif member.name == END:
                    end = _read_json(archive, member)
                else:
                    what = _take(archive, member, target, keyring, yes=yes)
                    progress.add(member.size)
                    counts["arrived"] += 1
                    if isinstance(what, Fault):
                        counts["damaged"] += 1
                        if len(faults) < MOST_NAMED:
                            faults.append({"path": member.name, "kind": what.value})
                    else:
                        counts[what] += 1
                        counts["bytes"] += member.size if what != "present" else 0
    except (tarfile.TarError, EOFError) as error:
        problem = f"the stream is damaged or cut off after {counts['arrived']} blocks: {error}"
    if head is None:
        raise ConfigInvalid(problem or f"the stream does not begin with {HEAD}; it is no export of kvtier")
    if not problem and (end is None or end.get("blocks") != counts["arrived"]):
        problem = (
            f"the stream ends after {counts['arrived']} blocks without its own end: what came is kept; send it again"
        )
    progress.finish()
    document = {
        "dryRun": not yes,
        "generation": head["generation"],
        "to": str(target),
        "blocks": counts["copied"] + counts["unverified"],
        "bytes": counts["bytes"],
        "present": counts["present"],
        "unverified": counts["unverified"],
        "damaged": faults,
        "damagedBlocks": counts["damaged"],
        "problem": problem,
    }
    return Outcome(1 if faults or problem else 0, document)


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Give what a stream has one by one; nothing of it is kept."""
    while (member := archive.next()) is not None:
        _forget(archive)
        yield member


def _read_head(archive: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    head = _read_json(archive, member) if member.name == HEAD else {}
    tier = head.get("tier")
    if head.get("format") != _FORMAT or not isinstance(tier, dict) or not isinstance(tier.get("identity"), dict):
        raise ConfigInvalid(f"the stream does not begin with a {HEAD} that this release can read")
    generation = head.get("generation")
    home = find_home(generation) if isinstance(generation, str) else None
    if home is None:
        raise ConfigInvalid(f"{HEAD}: generation is no name of a directory of blocks; {_AGAIN}")
    # No engine uses a directory that describes another generation than its name says.
    claims = (
        ("tier.digest", tier.get("digest"), str(home)),
        ("tier.format", tier.get("format"), FORMAT_VERSION),
        ("tier.identity.engine.epoch", tier["identity"].get("engine.epoch", home.epoch), home.epoch),
    )
    for name, found, wanted in claims:
        if found != wanted:
            raise ConfigInvalid(f"{HEAD}: {name} must be {wanted!r} for generation {generation}; {_AGAIN}")
    return head


def _read_json(archive: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    is_text = member.isfile() and not member.issparse() and member.size <= _MOST_DESCRIPTION
    if not is_text or (file := archive.extractfile(member)) is None:
        raise ConfigInvalid(f"{member.name}: is no description")
    try:
        found = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{member.name}: is no JSON that can be read; {_AGAIN}") from error
    return found if isinstance(found, dict) else {}


def _written_ns(member: tarfile.TarInfo) -> int | None:
    """Return when a block was written, None if that is not said; a clock that is ahead counts as now.

    Raises:
        ConfigInvalid: what is said is no time.
    """
    said = member.pax_headers.get(_TIME)
    if said is None:
        return None
    if re.fullmatch(r"-?[0-9]{1,19}", str(said)) is None:
        raise ConfigInvalid(f"{member.name}: {_TIME} must be nanoseconds since 1970 in digits; {_AGAIN}")
    return max(0, min(int(said), time.time_ns()))


def _claim(target: Path, head: Mapping[str, Any], *, yes: bool) -> None:
    if yes:
        identity.claim(target, head["tier"]["identity"], head["tier"]["digest"])
    elif (there := identity.read(target)) is not None and there != head["tier"]:
        raise IdentityMismatch(f"{target}: holds blocks of another identity; name another directory")


def _take(
    archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, keyring: Keyring | None, *, yes: bool
) -> Fault | str:
    """Return what came of one block: copied, unverified, present, or what is wrong with it."""
    key, home = parse_block_path(member.name), home_of(str(target))
    if key is None or not member.isfile() or (file := archive.extractfile(member)) is None:
        # Never a path of somebody else's choice.
        return Fault.KEY
    path, stamp = target / member.name, _written_ns(member)
    if yes and path.exists():
        return "present"
    # A few bytes may stand for a file of any length, which no export of ours makes use of.
    page = b"" if member.issparse() else file.read(HEADER_BYTES)
    if (fault := _misfit(page, key, home, member.size)) is not None:
        return fault
    with _landing(path, yes=yes) as landed:
        offset = write_all(LOCAL, landed.fd, memoryview(page))
        while piece := file.read(_PIECE_BYTES):
            offset = write_all(LOCAL, landed.fd, memoryview(piece), offset)
        fault = verify_open(LOCAL, landed.fd, key, home, keyring)
        landed.is_good = fault is None or fault in _UNVERIFIED
        if landed.is_good and stamp is not None:
            os.utime(landed.fd, ns=(stamp, stamp))
    if fault is not None and not landed.is_good:
        return fault
    return "copied" if fault is None else "unverified"


def _misfit(page: bytes, key: BlockKey, home: Home, size: int) -> Fault | None:
    """Say by its first page why a file of this length is not the block, before more of it is written."""
    header = decode_header(page)
    if isinstance(header, Fault):
        return header
    if (fault := misplaced(header, key, home)) is not None or size == HEADER_BYTES + header.payload_bytes:
        return fault
    return Fault.TRUNCATED if size < HEADER_BYTES + header.payload_bytes else Fault.LENGTH


class _Landed:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_good = False

    def judge(self) -> None:
        """Raise for what is no good, so that it does not get its name."""
        if not self.is_good:
            raise _RefusedError


class _RefusedError(Exception):
    """What arrived is not the block: it does not get its name."""


@contextmanager
def _landing(path: Path, *, yes: bool) -> Iterator[_Landed]:
    """Give a file that gets its name if it is found good; without `yes` one in memory."""
    if not yes:
        fd = os.memfd_create("kvtier-import")
        try:
            yield _Landed(fd)
        finally:
            os.close(fd)
        return
    make_directories(LOCAL, str(path.parent))
    with suppress(_RefusedError), replacing(LOCAL, str(path), flags=_BOTH_WAYS) as fd:
        landed = _Landed(fd)
        yield landed
        landed.judge()
