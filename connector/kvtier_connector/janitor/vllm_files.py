# SPDX-License-Identifier: Apache-2.0
"""How vLLM's own fs tier lays out its files below a generation: which are blocks, and which are leftovers. Pure.

``<model>_<12 hex>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``, beside ``<model>_<12 hex>/config.json``; what is being
written ends in ``_<number>.tmp``. Nothing else there is ever removed.

Keeps the files of vLLM's own fs tier within the budget, which vLLM never does itself.

Nobody tells of these files: no journal, no header, no checksum. So they are walked again and again, a walk after about
four times as long as the last one took, and the least recently used go first, by the times that the file system keeps:
of writing, and of reading where it is mounted so that it notes that (``relatime`` once a day, ``noatime`` never).
Engines hear of nothing either: what is gone when they come to read it is a miss for them, and is computed. They cannot
be asked to stop storing, so between two walks the budget may be exceeded by what they write meanwhile.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.contract.usage import GenerationUsage, Usage
from kvtier_connector.janitor.evict import ActiveFileSystem
from kvtier_connector.janitor.metrics import Problems, Report, Tallies
from kvtier_connector.janitor.permit import BrakeWriter, Clocks
from kvtier_connector.janitor.policy import Space, make_limits, make_space
from kvtier_connector.store.fs import LOCAL, FileSystem

_RANK = re.compile(r"^.+_[0-9a-f]{12}_r[0-9]+$")
_FIRST = re.compile(r"^[0-9a-f]{3}$")
_SECOND = re.compile(r"^[0-9a-f]{2}_g[0-9]+$")
_BLOCK = re.compile(r"^[0-9a-f]{16,128}\.bin$")
_PARTIAL = re.compile(r"^[0-9a-f]{16,128}\.bin_[0-9]+\.tmp$")


class File(NamedTuple):
    """One file of the fs tier."""

    generation: str
    path: str
    """Relative to the tier's directory."""
    size: int
    mtime_ns: int
    used_ns: int
    """The later of written and, as far as the mount keeps that, read."""
    is_partial: bool


def is_generation(fs: FileSystem, root: str) -> bool:
    """Tell whether a directory holds files of vLLM's tier; raises OSError if it cannot be looked at."""
    return any(_RANK.match(entry.name) and entry.is_dir(follow_symlinks=False) for entry in _list(fs, root))


def walk(fs: FileSystem, tier_dir: str, generation: str) -> Iterator[list[File]]:
    """Yield the files of a generation, one directory of them after another; raises OSError where one is refused."""
    for rank in _directories(fs, f"{tier_dir}/{generation}", _RANK):
        for first in _directories(fs, f"{tier_dir}/{generation}/{rank}", _FIRST):
            below = f"{generation}/{rank}/{first}"
            for second in _directories(fs, f"{tier_dir}/{below}", _SECOND):
                yield list(_files(fs, tier_dir, generation, f"{below}/{second}"))


def directories(fs: FileSystem, tier_dir: str, generation: str) -> Iterator[str]:
    """Yield the directories of a generation that hold files or directories of vLLM's, the deepest first."""
    for rank in _directories(fs, f"{tier_dir}/{generation}", _RANK):
        for first in _directories(fs, f"{tier_dir}/{generation}/{rank}", _FIRST):
            below = f"{generation}/{rank}/{first}"
            yield from (f"{below}/{second}" for second in _directories(fs, f"{tier_dir}/{below}", _SECOND))
            yield below
        yield f"{generation}/{rank}"


def _files(fs: FileSystem, tier_dir: str, generation: str, directory: str) -> Iterator[File]:
    for entry in _list(fs, f"{tier_dir}/{directory}"):
        is_partial = _PARTIAL.match(entry.name) is not None
        if not is_partial and not _BLOCK.match(entry.name):
            continue
        try:
            found = fs.stat(f"{tier_dir}/{directory}/{entry.name}")
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            used_ns = max(found.st_mtime_ns, found.st_atime_ns)
            path = f"{directory}/{entry.name}"
            yield File(generation, path, found.st_size, found.st_mtime_ns, used_ns, is_partial)


def _directories(fs: FileSystem, path: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the names of directories, and of no link to one, that the tier makes."""
    found = [each for each in _list(fs, path) if pattern.match(each.name) and each.is_dir(follow_symlinks=False)]
    return sorted(each.name for each in found)


def _list(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    try:
        return fs.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


logger = logging.getLogger(__name__)

STEP_SECONDS = 1.0
"""How long one step works before it lets its caller look around."""
_REST = 4
"""So many times as long as a walk took, the next one waits."""


@dataclass(slots=True)
class _Seen:
    """What a walk has met so far."""

    files: list[File] = field(default_factory=list)
    partials: list[File] = field(default_factory=list)
    by_generation: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    """Blocks, bytes and nanoseconds of the last use."""


class FsKeeper:
    """Owned by one thread, which may hang in the volume for as long as that does; `report` may be read by any."""

    def __init__(
        self,
        config: JanitorConfig,
        *,
        fs: FileSystem = LOCAL,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """Store the settings; nothing is read or written yet.

        Args:
            config: The settings; `configure` replaces them.
            fs: The system calls.
            clock: Nanoseconds since 1970.
            now: Seconds that never go back.
            may_act: Asked before each removal: whether this is still the active janitor of the tier.
        """
        self.config = config
        self._dir = str(Path(config.tier_dir))
        self._fs = ActiveFileSystem(fs, self._dir, may_act=may_act)
        brake = BrakeWriter(self._dir, fs=self._fs)
        self._clocks = Clocks(
            ask=lambda: brake.ask_time_ns() if may_act() else None, is_starting=False, clock=clock, now=now
        )
        self._now = now
        self._may_act = may_act
        self._problems = Problems(config.tier, now=now)
        self._space = Space()
        self._work: Iterator[None] | None = None
        self._next_walk = 0.0
        self._spared: set[str] = set()
        """Paths of files that stayed in the last sweep because they were used."""
        self._stuck: set[str] = set()
        """Paths of files that could not be removed: others go before them."""
        self._evicted: defaultdict[str, int] = defaultdict(int)
        self._evicted_bytes: defaultdict[str, int] = defaultdict(int)
        self._tallies = Tallies()
        self._usage = Usage(tier=config.tier)
        self.report: Report | None = None
        """The last one; None before the first step."""

    def open(self) -> None:
        """Begin: nothing was kept of an earlier janitor."""

    def configure(self, config: JanitorConfig) -> None:
        """Follow other settings from the next step on."""
        self.config = config
        self._next_walk = 0.0

    def close(self) -> None:
        """End; nothing is to be saved."""
        self._work = None

    def step(self) -> float:
        """Work for about a second; return after how many seconds there is something to do again."""
        if self._work is None:
            if self._now() < self._next_walk:
                return min(self._next_walk - self._now(), self.config.sweep_seconds)
            self._work = self._sweep()
        ends = self._now() + STEP_SECONDS
        with self._problems.trying("walk"):
            for _ in self._work:
                if self._now() >= ends:
                    self._publish()
                    return 0.0
        if "walk" in self._problems:
            self._next_walk = max(self._next_walk, self._now() + self.config.sweep_seconds)
        self._work = None
        self._publish()
        return max(0.0, min(self._next_walk - self._now(), self.config.sweep_seconds))

    def _sweep(self) -> Iterator[None]:
        """Walk everything, decide, and remove, with a pause after each directory and each file."""
        began, seen = self._now(), _Seen()
        generations = self._generations()
        if generations:
            self._clocks.look()
            self._problems.state("clock", self._clocks.problem)
        if generations:
            answer = self._fs.statvfs(self._dir)
            self._space = make_space(answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize)
        for generation in generations:
            for files in walk(self._fs, self._dir, generation):
                self._note(files, seen)
                yield
        self._count(generations, seen)
        walked = self._now() - began
        self._stuck = {each.path for each in seen.files if each.path in self._stuck}
        failures: list[OSError] = []
        yield from self._remove(seen, failures)
        yield from self._remove_leftovers(seen, failures)
        self._count(generations, seen)
        self._next_walk = self._now() + max(self.config.sweep_seconds, _REST * walked)
        if failures:
            raise failures[0]

    def _generations(self) -> list[str]:
        """Return the directories that vLLM's tier has written to, the current one first."""
        try:
            entries = self._fs.scandir(self._dir)
        except FileNotFoundError:
            return []  # no engine has stored anything yet
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        found = [name for name in names if is_generation(self._fs, f"{self._dir}/{name}")]
        return sorted(found, key=lambda name: (name != self.config.current, name))

    @staticmethod
    def _note(files: list[File], seen: _Seen) -> None:
        for file in files:
            if file.is_partial:
                seen.partials.append(file)
                continue
            seen.files.append(file)
            each = seen.by_generation[file.generation]
            each[0] += 1
            each[1] += file.size
            each[2] = max(each[2], file.used_ns)

    def _victims(self, seen: _Seen, removed: list[File]) -> Iterator[tuple[File, str]]:
        """Yield what is to go and why, the files that are too old or of no use first.

        Then the least recently used ones, until what the caller adds to `removed` makes enough room.
        """
        condemned = self._condemned(seen)
        used = sum(each.size for each in seen.files)
        limits = make_limits(
            self.config, self._space, tenants=(), used={}, other_bytes=0, now_ns=self._clocks.time_ns()
        )
        before_ns = limits.expire_before if limits.expire_before is not None and self._clocks.is_known else 0
        for file in seen.files:
            if file.generation in condemned:
                yield file, "generation"
            elif file.mtime_ns < before_ns:
                yield file, "ttl"
        is_over = bool(limits.high_bytes) and used > limits.high_bytes
        to_free = used - limits.low_bytes if is_over else 0
        for_volume = min(limits.wanted_free_bytes, used - limits.floor_bytes)
        gone = {file.path for file in removed}
        freed, count = sum(file.size for file in removed), len(removed)
        # Blocks of earlier generations before those of the current one, and among them the least recently used.
        order = sorted(
            (each for each in seen.files if each.path not in gone),
            key=lambda each: (each.path in self._stuck, each.generation == self.config.current, each.used_ns),
        )
        for file in order:
            if freed >= max(to_free, for_volume):
                return
            yield file, "budget" if freed < to_free else "volume"
            freed, count = freed + sum(file.size for file in removed[count:]), len(removed)

    def _condemned(self, seen: _Seen) -> set[str]:
        """Return the generations that are neither current, nor among the previous ones to keep, nor in use."""
        others = [name for name in seen.by_generation if name != self.config.current]
        others.sort(key=lambda name: -seen.by_generation[name][2])
        idle_ns = int(self.config.generation_idle_seconds * 1e9)
        gone = others[self.config.keep_previous :]
        now_ns = self._clocks.time_ns() if self._clocks.is_known else 0
        return {name for name in gone if now_ns - seen.by_generation[name][2] > idle_ns}

    def _remove(self, seen: _Seen, failures: list[OSError]) -> Iterator[None]:
        began, removed = self._now(), list[File]()
        spared_before, self._spared = self._spared, set()
        for file, reason in self._victims(seen, removed):
            if not self._may_act():
                return
            if self._may_go(file, reason, spared_before) and self._is_unlinked(file, failures):
                removed.append(file)
                each = seen.by_generation[file.generation]
                each[0] -= 1
                each[1] -= file.size
                self._evicted[reason] += 1
                self._evicted_bytes[reason] += file.size
            yield
        if removed:
            self._tallies.sweeps += 1
            self._tallies.sweep_seconds = self._now() - began
            self._tallies.last_sweep = self._clocks.time_ns() / 1e9

    def _may_go(self, file: File, reason: str, spared_before: set[str]) -> bool:
        """Say whether a file is as it was when it was chosen; a read spares it from making room, once in a row."""
        try:
            found = self._fs.stat(f"{self._dir}/{file.path}")
        except FileNotFoundError:
            return False
        is_read = reason in {"budget", "volume"} and found.st_atime_ns > file.used_ns
        if found.st_mtime_ns == file.mtime_ns and (not is_read or file.path in spared_before):
            return True
        self._spared.add(file.path)
        self._tallies.spared_blocks += 1
        return False

    def _is_unlinked(self, file: File, failures: list[OSError]) -> bool:
        """Remove one file; one that cannot be is noted, and keeps no other from going."""
        try:
            self._fs.unlink(f"{self._dir}/{file.path}")
        except FileNotFoundError:
            return False  # somebody else was quicker
        except OSError as error:
            self._stuck.add(file.path)
            failures.append(error)
            return False
        self._stuck.discard(file.path)
        return True

    def _remove_leftovers(self, seen: _Seen, failures: list[OSError]) -> Iterator[None]:
        """Remove what was being written by an engine that is gone, and empty directories of condemned generations."""
        age_seconds = min(self.config.partial_age_seconds, self.config.ttl_seconds or math.inf)
        before_ns = self._clocks.time_ns() - int(age_seconds * 1e9) if self._clocks.is_known else 0
        for file in seen.partials:
            if file.mtime_ns < before_ns and self._may_act() and self._is_unlinked(file, failures):
                self._tallies.removed_leftovers["partial"] += 1
            yield
        for generation in sorted(self._condemned(seen)):
            for directory in list(directories(self._fs, self._dir, generation)):
                if not self._may_act():
                    return
                try:
                    self._fs.rmdir(f"{self._dir}/{directory}")
                except OSError:
                    break  # something is in it, and the next walk sees what
                yield
            seen.by_generation.pop(generation, None)
            self._tallies.removed_leftovers["generation"] += 1

    def _count(self, generations: list[str], seen: _Seen) -> None:
        """Take over what a whole walk has met."""
        each = [
            GenerationUsage(digest=name, blocks=blocks, used_bytes=size, last_used=used_ns / 1e9)
            for name in generations
            for blocks, size, used_ns in [seen.by_generation.get(name, (0, 0, 0))]
        ]
        oldest = min((file.mtime_ns for file in seen.files), default=0)
        self._usage = Usage(
            tier=self.config.tier,
            is_counted=True,
            used_bytes=sum(found.used_bytes for found in each),
            blocks=sum(found.blocks for found in each),
            oldest=oldest / 1e9,
            generations=tuple(each),
        )

    def _publish(self) -> None:
        usage = self._usage
        usage = Usage(
            tier=usage.tier,
            is_counted=usage.is_counted,
            used_bytes=usage.used_bytes,
            blocks=usage.blocks,
            volume_bytes=self._space.total_bytes,
            volume_free_bytes=self._space.free_bytes,
            oldest=usage.oldest,
            evicted_blocks=sum(count for reason, count in self._evicted.items() if reason in {"budget", "volume"}),
            generations=usage.generations,
        )
        self.report = Report(
            usage=usage,
            evicted_blocks=dict(self._evicted),
            evicted_bytes=dict(self._evicted_bytes),
            spared_blocks=self._tallies.spared_blocks,
            removed_leftovers=dict(self._tallies.removed_leftovers),
            max_bytes=self.config.max_bytes,
            sweeps=self._tallies.sweeps,
            sweep_seconds=self._tallies.sweep_seconds,
            last_sweep=self._tallies.last_sweep,
            problems=dict(self._problems.messages),
        )
