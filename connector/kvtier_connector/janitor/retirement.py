# SPDX-License-Identifier: Apache-2.0
"""Gives up generations that nobody needs any more: whole, a step at a time, and never one that somebody uses."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from kvtier_connector.contract_janitor import JanitorConfig
from kvtier_connector.janitor.generations import Generation, Standing, condemn, last_written_ns, look_at, rank
from kvtier_connector.janitor.removal import GenerationRemoval
from kvtier_connector.store.fs import FileSystem

logger = logging.getLogger(__name__)


class Retirement:
    """The generations of one tier. Owned by the janitor's thread."""

    def __init__(
        self,
        tier_dir: str,
        *,
        fs: FileSystem,
        own_writers: Callable[[], Collection[str]],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the settings; `own_writers` names the journals that do not count as use."""
        self._dir = tier_dir
        self._fs = fs
        self._own_writers = own_writers
        self._clock = clock
        self._active: dict[str, int] = {}

    def step(
        self, generations: Sequence[Generation], config: JanitorConfig, may_go_on: Callable[[], bool]
    ) -> Iterator[tuple[str, bool]]:
        """Remove what is to be removed; yield each digest and whether all of it is gone.

        Raises:
            OSError: at the end, if the volume refused or a generation holds what is somebody else's; the others went.
        """
        failed: OSError | None = None
        self._active = {}
        for each in generations:
            if each.digest == config.current:
                continue
            try:
                self._active[each.digest] = self._active_ns(each)
            except OSError as error:
                # Nobody can tell that it is idle.
                self._active[each.digest] = self._clock()
                failed = failed or error
        standings = [Standing(digest, active_ns) for digest, active_ns in self._active.items()]
        for digest in condemn(
            standings,
            current=config.current,
            keep_previous=config.keep_previous,
            idle_ns=int(config.generation_idle_seconds * 1e9),
            now_ns=self._clock(),
        ):
            try:
                is_gone = self._remove(digest, may_go_on)
            except OSError as error:
                failed = failed or error
                continue
            yield digest, is_gone
        if failed is not None:
            raise failed

    def order(self, generations: Sequence[Generation], config: JanitorConfig) -> list[str]:
        """Return the digests, the one whose blocks go last first."""
        standings = (Standing(each.digest, self._active.get(each.digest, each.created_ns)) for each in generations)
        return rank(standings, config.current)

    def is_in_use(self, digest: str, config: JanitorConfig) -> bool:
        """Say whether engines may use the generation, so that they are to be told what goes."""
        idle_ns = int(config.generation_idle_seconds * 1e9)
        return digest == config.current or self._clock() - self._active.get(digest, 0) <= idle_ns

    def _active_ns(self, generation: Generation) -> int:
        written_ns = last_written_ns(self._fs, f"{self._dir}/{generation.digest}", but=self._own_writers())
        return max(generation.created_ns, written_ns)

    def _remove(self, digest: str, may_go_on: Callable[[], bool]) -> bool:
        found = look_at(self._fs, self._dir, digest)
        if found is None:
            return True
        if found.strangers:
            what = f"not removed, since somebody put {', '.join(found.strangers)} there: remove it by hand"
            raise OSError(errno.ENOTEMPTY, what, f"{self._dir}/{digest}")
        is_gone = GenerationRemoval(self._fs, f"{self._dir}/{digest}").step(may_go_on)
        if is_gone:
            logger.info("removed the generation %s", digest)
        return is_gone
