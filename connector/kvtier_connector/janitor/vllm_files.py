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

import copy
import math
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvtier_connector.contract.usage import GenerationUsage, Usage
from kvtier_connector.janitor.catalog import NEARLY_ALL
from kvtier_connector.janitor.metrics import JanitorReport
from kvtier_connector.janitor.permit import TTL_HELD
from kvtier_connector.janitor.policy import BlockColumns, choose, make_limits
from kvtier_connector.janitor.sweep import STEP_SECONDS, TierSweeper
from kvtier_connector.store.fs import FileSystem, list_directory

_REST = 4
"""The next walk begins after this many times as long as the last one took."""
_GENERATION = re.compile(r"^[0-9a-f]{16}$")
"""Digests of the operator: a copy that a person made has another name."""
_RANK = re.compile(r"^.+_[0-9a-f]{12}_r[0-9]+$")
_FIRST = re.compile(r"^[0-9a-f]{3}$")
_SECOND = re.compile(r"^[0-9a-f]{2}_g[0-9]+$")
_BLOCK = re.compile(r"^[0-9a-f]{16,128}\.bin(?P<partial>_[0-9]+\.tmp)?$")


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
    for entry in list_directory(fs, f"{tier_dir}/{directory}"):
        if (name := _BLOCK.match(entry.name)) is None:
            continue
        path = f"{directory}/{entry.name}"
        try:
            found = fs.stat(f"{tier_dir}/{path}")
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            used_ns = max(found.st_mtime_ns, found.st_atime_ns)
            yield File(generation, path, found.st_size, found.st_mtime_ns, used_ns, name["partial"] is not None)


def _directories(fs: FileSystem, path: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the names of directories that vLLM makes; a link to one is none."""
    found = [each for each in list_directory(fs, path) if pattern.match(each.name)]
    return sorted(each.name for each in found if each.is_dir(follow_symlinks=False))


class VllmFilesSweeper(TierSweeper):
    """The sweeper of the files of vLLM's own tier."""

    def open(self) -> None:
        """Begin: an earlier janitor saved nothing."""
        self._work: Iterator[None] | None = None
        self._stuck: set[str] = set()
        """Paths of files that could not be removed: others go before them."""
        self._usage = Usage(tier=self.config.tier)

    def close(self) -> None:
        """End; nothing is saved."""
        self._work = None

    def step(self) -> float:
        """Work for about a second; return after how many seconds there is something to do again."""
        if self._work is None:
            if self._now() < self._next_look:
                return min(self._next_look - self._now(), self.config.sweep_seconds)
            self._work = self._sweep()
        ends = self._now() + STEP_SECONDS
        with self._problems.trying("walk"):
            for _ in self._work:
                if self._now() >= ends:
                    self._publish()
                    return 0.0
        if "walk" in self._problems:
            self._next_look = max(self._next_look, self._now() + self.config.sweep_seconds)
        self._work = None
        self._publish()
        return max(0.0, min(self._next_look - self._now(), self.config.sweep_seconds))

    def _sweep(self) -> Iterator[None]:
        """Walk everything, decide, and remove, with a pause after each directory and each file."""
        began, files, failures = self._now(), list[File](), list[OSError]()
        generations = self._generations()
        if generations:
            self._look_at_clock()
            self._look_at_space()
        for generation in generations:
            for found in walk(self._fs, self._dir, generation):
                files += found
                yield
        self._count(generations, files)
        decided, removed = self._now(), set[str]()
        self._stuck &= {each.path for each in files}
        condemned = self._condemned(files)
        for file, reason in [*self._abandoned(files, condemned), *self._chosen(files, condemned)]:
            if not self._may_act():
                return
            if self._is_removed(file, reason, failures):
                removed.add(file.path)
            yield
        yield from self._remove_directories(condemned)
        self._count(generations, [each for each in files if each.path not in removed])
        if removed:
            self._tallies.end_sweep(seconds=self._now() - decided, ended=self._clocks.time_ns() / 1e9)
        self._next_look = self._now() + max(self.config.sweep_seconds, _REST * (decided - began))
        if failures:
            raise failures[0]

    def _generations(self) -> list[str]:
        """Return the directories that vLLM's tier has written to, the current one first."""
        names = _directories(self._fs, self._dir, _GENERATION)
        found = [name for name in names if _directories(self._fs, f"{self._dir}/{name}", _RANK)]
        return sorted(found, key=lambda name: (name != self.config.current, name))

    def _condemned(self, files: Iterable[File]) -> set[str]:
        """Return the generations that are neither current, nor among the previous ones to keep, nor in use."""
        last_used: dict[str, int] = {}
        for each in files:
            if each.generation != self.config.current and not each.is_partial:
                last_used[each.generation] = max(each.used_ns, last_used.get(each.generation, 0))
        gone = sorted(last_used, key=lambda name: -last_used[name])[self.config.keep_previous :]
        before_ns = -math.inf if self._is_doubtful else self._before_ns(self.config.generation_idle_seconds)
        return {name for name in gone if last_used[name] < before_ns}

    def _before_ns(self, seconds: float | None) -> float:
        """Return when a file of that age was written; nothing is old before the volume has told its time."""
        is_known = self._clocks.is_known and seconds is not None
        return self._clocks.time_ns() - int((seconds or 0.0) * 1e9) if is_known else -math.inf

    def _abandoned(self, files: Iterable[File], condemned: set[str]) -> Iterator[tuple[File, str]]:
        """Yield partial files of engines that are gone, and blocks of condemned generations, with the reason."""
        before_ns = self._before_ns(min(self.config.partial_age_seconds, self.config.ttl_seconds or math.inf))
        for file in files:
            if file.is_partial and file.mtime_ns < before_ns:
                yield file, "partial"
            elif not file.is_partial and file.generation in condemned:
                yield file, "generation"

    def _chosen(self, files: Iterable[File], condemned: set[str]) -> Iterator[tuple[File, str]]:
        """Yield files that are too old; and for room, those of earlier generations and the least recently used."""
        files = [each for each in files if not each.is_partial and each.generation not in condemned]
        now_ns = self._clocks.time_ns()
        limits = make_limits(self.config, self._space, tenants=(), used={}, other_bytes=0, now_ns=now_ns)
        # The next walk may be far away, so one decision frees all that is lacking.
        expired = sum(each.mtime_ns < (limits.expire_before or 0) for each in files)
        is_held = self._is_doubtful and expired > NEARLY_ALL * len(files)
        self._problems.state("ttl", TTL_HELD if is_held else "")
        expire_before = None if is_held or not self._clocks.is_known else limits.expire_before
        limits = replace(limits, expire_before=expire_before, portion=1)
        rows, zeros = np.array([each[2:5] for each in files], np.int64).reshape(-1, 3), np.zeros(len(files), np.int64)
        is_last = np.array([each.path in self._stuck for each in files], np.bool_)
        is_old = np.array([each.generation != self.config.current for each in files], np.bool_)
        columns = BlockColumns(
            before=zeros - 1,
            position=zeros,
            size=rows[:, 0],
            created=rows[:, 1],
            used=np.where(is_last, np.iinfo(np.int64).max, rows[:, 2]),
            tenant=zeros,
            age=np.where(is_last, -1, is_old),
        )
        for reason, chosen in choose(columns, limits):
            yield from ((files[row], reason.value) for row in chosen.tolist())

    def _is_removed(self, file: File, reason: str, failures: list[OSError]) -> bool:
        """Remove a file that was not written anew since it was chosen; a refused file keeps no other from going."""
        path = f"{self._dir}/{file.path}"
        try:
            if self._fs.stat(path).st_mtime_ns != file.mtime_ns:
                self._tallies.spared_blocks += not file.is_partial
                return False
            self._fs.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._stuck.add(file.path)
            failures.append(error)
            return False
        self._stuck.discard(file.path)
        if file.is_partial:
            self._tallies.removed_leftovers["partial"] += 1
        else:
            self._tallies.evicted_blocks[reason] += 1
            self._tallies.evicted_bytes[reason] += file.size
        return True

    def _remove_directories(self, condemned: Iterable[str]) -> Iterator[None]:
        """Remove the empty directories of generations that are gone."""
        for generation in sorted(condemned):
            for directory in list(directories(self._fs, self._dir, generation)):
                try:
                    self._fs.rmdir(f"{self._dir}/{directory}")
                except OSError:
                    break  # it is not empty, and the next walk sees why
                yield
            else:
                self._tallies.removed_leftovers["generation"] += 1

    def _count(self, generations: Sequence[str], files: Iterable[File]) -> None:
        """Take over the sums of a whole walk."""
        blocks = [each for each in files if not each.is_partial]
        by_generation = {name: [each for each in blocks if each.generation == name] for name in generations}
        self._usage = Usage(
            tier=self.config.tier,
            is_counted=True,
            used_bytes=sum(each.size for each in blocks),
            blocks=len(blocks),
            oldest=min((each.mtime_ns for each in blocks), default=0) / 1e9,
            generations=tuple(
                GenerationUsage(
                    digest=name,
                    blocks=len(found),
                    used_bytes=sum(each.size for each in found),
                    last_used=max((each.used_ns for each in found), default=0) / 1e9,
                )
                for name, found in by_generation.items()
            ),
        )

    def _publish(self) -> None:
        usage = replace(
            self._usage,
            volume_bytes=self._space.total_bytes,
            volume_free_bytes=self._space.free_bytes,
            evicted_blocks=self._tallies.evicted_for_room,
        )
        self.report = JanitorReport(
            usage=usage,
            tallies=copy.deepcopy(self._tallies),
            problems=dict(self._problems.messages),
            max_bytes=self.config.max_bytes,
        )
