# SPDX-License-Identifier: Apache-2.0
"""Keeps the files of vLLM's own fs tier within the budget, which vLLM never does itself.

The files are ``<model>_<12 hex>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin`` below a generation, beside
``<model>_<12 hex>/config.json``; a file being written ends in ``_<number>.tmp``. Nothing else is ever removed.

These files have no journal, header or checksum, so all of them are walked again and again. The least recently used go
first, by the file's times of writing and of reading. A mount records reads once a day (``relatime``) or never
(``noatime``). An engine that reads a removed file has a miss. Engines cannot be paused, so they may exceed the budget
between two walks.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.contract.usage import GenerationUsage, Usage
from kvtier_connector.janitor.evict import ActiveFileSystem
from kvtier_connector.janitor.metrics import JanitorReport, Problems, Tallies
from kvtier_connector.janitor.permit import VolumeTime, ask_volume_ns
from kvtier_connector.janitor.policy import Space, make_limits, make_space
from kvtier_connector.store.fs import LOCAL, FileSystem

STEP_SECONDS = 1.0
"""How long one step works before it returns to its caller."""
_REST = 4
"""The next walk begins after this many times as long as the last one took."""
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
    """Time of writing or, as far as the mount records it, of reading; the later one."""
    is_partial: bool


def is_generation(fs: FileSystem, root: str) -> bool:
    """Return whether a directory holds files of vLLM's tier; raise OSError if it cannot be read."""
    return any(_RANK.match(entry.name) and entry.is_dir(follow_symlinks=False) for entry in _list(fs, root))


def walk(fs: FileSystem, tier_dir: str, generation: str) -> Iterator[list[File]]:
    """Yield the files of a generation, directory by directory; raise OSError where one cannot be read."""
    for directory in directories(fs, tier_dir, generation):
        if _SECOND.match(directory.rpartition("/")[2]):
            yield list(_files(fs, tier_dir, generation, directory))


def directories(fs: FileSystem, tier_dir: str, generation: str) -> Iterator[str]:
    """Yield the directories of a generation that vLLM makes, each after those in it."""
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
    """Return the names of directories that vLLM makes; a link to one is none."""
    found = [each for each in _list(fs, path) if pattern.match(each.name) and each.is_dir(follow_symlinks=False)]
    return sorted(each.name for each in found)


def _list(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    try:
        return fs.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(slots=True)
class _Walked:
    """Files found by one walk."""

    files: list[File] = field(default_factory=list)
    partials: list[File] = field(default_factory=list)
    by_generation: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    """Blocks, bytes and nanoseconds of the last use."""

    def add(self, file: File) -> None:
        if file.is_partial:
            self.partials.append(file)
            return
        self.files.append(file)
        each = self.by_generation[file.generation]
        each[0] += 1
        each[1] += file.size
        each[2] = max(each[2], file.used_ns)


class VllmFilesSweeper:
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
            may_act: Called before each removal: whether this is still the active janitor of the tier.
        """
        self.config = config
        self._dir = str(Path(config.tier_dir))
        self._fs = fs = ActiveFileSystem(fs, self._dir, may_act=may_act)
        self._clocks = VolumeTime(
            ask=lambda: ask_volume_ns(fs, self._dir) if may_act() else None, is_starting=False, clock=clock, now=now
        )
        self._now = now
        self._may_act = may_act
        self._problems = Problems(config.tier, now=now)
        self._space = Space()
        self._work: Iterator[None] | None = None
        self._next_walk = 0.0
        self._spared: set[str] = set()
        """Paths of files that stayed in the last sweep because they were read meanwhile."""
        self._stuck: set[str] = set()
        """Paths of files that could not be removed: others go before them."""
        self._tallies = Tallies()
        self._usage = Usage(tier=config.tier)
        self.report: JanitorReport | None = None
        """The last one; None before the first step."""

    def open(self) -> None:
        """Begin: an earlier janitor saved nothing."""

    def configure(self, config: JanitorConfig) -> None:
        """Follow other settings from the next step on."""
        self.config = config
        self._next_walk = 0.0

    def close(self) -> None:
        """End; nothing is saved."""
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
        began, walked = self._now(), _Walked()
        generations = self._generations()
        if generations:
            self._clocks.look()
            self._problems.state("clock", self._clocks.problem)
            answer = self._fs.statvfs(self._dir)
            self._space = make_space(answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize)
        for generation in generations:
            for files in walk(self._fs, self._dir, generation):
                for file in files:
                    walked.add(file)
                yield
        self._count(generations, walked)
        seconds = self._now() - began
        self._stuck = {each.path for each in walked.files if each.path in self._stuck}
        failures: list[OSError] = []
        yield from self._remove(walked, failures)
        yield from self._remove_leftovers(walked, failures)
        self._count(generations, walked)
        self._next_walk = self._now() + max(self.config.sweep_seconds, _REST * seconds)
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

    def _victims(self, walked: _Walked, removed: list[File]) -> Iterator[tuple[File, str]]:
        """Yield files to remove with the reason: expired ones and those of old generations first.

        Then the least recently used ones, until the files that the caller adds to `removed` make enough room.
        """
        condemned = self._condemned(walked)
        used = sum(each.size for each in walked.files)
        limits = make_limits(
            self.config, self._space, tenants=(), used={}, other_bytes=0, now_ns=self._clocks.time_ns()
        )
        before_ns = limits.expire_before if limits.expire_before is not None and self._clocks.is_known else 0
        for file in walked.files:
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
            (each for each in walked.files if each.path not in gone),
            key=lambda each: (each.path in self._stuck, each.generation == self.config.current, each.used_ns),
        )
        for file in order:
            if freed >= max(to_free, for_volume):
                return
            yield file, "budget" if freed < to_free else "volume"
            freed, count = freed + sum(file.size for file in removed[count:]), len(removed)

    def _condemned(self, walked: _Walked) -> set[str]:
        """Return the generations that are neither current, nor among the previous ones to keep, nor in use."""
        others = [name for name in walked.by_generation if name != self.config.current]
        others.sort(key=lambda name: -walked.by_generation[name][2])
        idle_ns = int(self.config.generation_idle_seconds * 1e9)
        now_ns = self._clocks.time_ns() if self._clocks.is_known else 0
        gone = others[self.config.keep_previous :]
        return {name for name in gone if now_ns - walked.by_generation[name][2] > idle_ns}

    def _remove(self, walked: _Walked, failures: list[OSError]) -> Iterator[None]:
        began, removed = self._now(), list[File]()
        spared_before, self._spared = self._spared, set()
        for file, reason in self._victims(walked, removed):
            if not self._may_act():
                return
            if self._may_go(file, reason, spared_before) and self._is_unlinked(file, failures):
                removed.append(file)
                each = walked.by_generation[file.generation]
                each[0] -= 1
                each[1] -= file.size
                self._tallies.evicted_blocks[reason] += 1
                self._tallies.evicted_bytes[reason] += file.size
            yield
        if removed:
            self._tallies.end_sweep(seconds=self._now() - began, ended=self._clocks.time_ns() / 1e9)

    def _may_go(self, file: File, reason: str, spared_before: set[str]) -> bool:
        """Return whether a file is unchanged since it was chosen; a read spares it from making room, once in a row."""
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
        """Remove one file; a refused one keeps no other from going."""
        try:
            self._fs.unlink(f"{self._dir}/{file.path}")
        except FileNotFoundError:
            return False
        except OSError as error:
            self._stuck.add(file.path)
            failures.append(error)
            return False
        self._stuck.discard(file.path)
        return True

    def _remove_leftovers(self, walked: _Walked, failures: list[OSError]) -> Iterator[None]:
        """Remove partial files of engines that are gone, and empty directories of condemned generations."""
        age_seconds = min(self.config.partial_age_seconds, self.config.ttl_seconds or math.inf)
        before_ns = self._clocks.time_ns() - int(age_seconds * 1e9) if self._clocks.is_known else 0
        for file in walked.partials:
            if file.mtime_ns < before_ns and self._may_act() and self._is_unlinked(file, failures):
                self._tallies.removed_leftovers["partial"] += 1
            yield
        for generation in sorted(self._condemned(walked)):
            for directory in list(directories(self._fs, self._dir, generation)):
                if not self._may_act():
                    return
                try:
                    self._fs.rmdir(f"{self._dir}/{directory}")
                except OSError:
                    break  # it is not empty, and the next walk sees why
                yield
            walked.by_generation.pop(generation, None)
            self._tallies.removed_leftovers["generation"] += 1

    def _count(self, generations: list[str], walked: _Walked) -> None:
        """Take over the sums of a whole walk."""
        each = [
            GenerationUsage(digest=name, blocks=blocks, used_bytes=size, last_used=used_ns / 1e9)
            for name in generations
            for blocks, size, used_ns in [walked.by_generation.get(name, (0, 0, 0))]
        ]
        oldest = min((file.mtime_ns for file in walked.files), default=0)
        self._usage = Usage(
            tier=self.config.tier,
            is_counted=True,
            used_bytes=sum(found.used_bytes for found in each),
            blocks=sum(found.blocks for found in each),
            oldest=oldest / 1e9,
            generations=tuple(each),
        )

    def _publish(self) -> None:
        usage = replace(
            self._usage,
            volume_bytes=self._space.total_bytes,
            volume_free_bytes=self._space.free_bytes,
            evicted_blocks=self._tallies.evicted_blocks["budget"] + self._tallies.evicted_blocks["volume"],
        )
        self.report = JanitorReport(
            usage=usage,
            tallies=self._tallies.copy(),
            problems=dict(self._problems.messages),
            max_bytes=self.config.max_bytes,
        )
