# SPDX-License-Identifier: Apache-2.0
"""One tier as two nodes see it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from checks import check
from waiting import until

from kvtier_connector.store.identity import claim
from kvtier_netfs.volume import SharedVolume, UnavailableError

PATIENCE_SECONDS = 120.0

QUICKEST = "glusterfs-distribute"
"""It is there within a second, so it is part of every run; the others are for `make test-netfs`."""
Kind = TypeVar("Kind", bound=SharedVolume)


@contextmanager
def mounted(kind: type[Kind], base: Path) -> Iterator[Kind]:
    """Mount it until the last test that uses it has ended; skip with the reason where this machine cannot."""
    with ExitStack() as stack:
        try:
            volume = stack.enter_context(kind(base))
        except UnavailableError as error:
            pytest.skip(f"{kind.name}: {error}")
        yield volume


@dataclass(frozen=True)
class Nodes:
    """The root of a generation by the path of each node."""

    a: Path
    b: Path
    volume: SharedVolume

    def both(self) -> tuple[Path, Path]:
        return self.a, self.b


@contextmanager
def nodes_on(volume: SharedVolume, name: str) -> Iterator[Nodes]:
    """Make a directory of a tier; nothing is wrong in it at the end, whichever node looks."""
    nodes = Nodes(volume.a / name / "ns.llama/aa", volume.b / name / "ns.llama/aa", volume)
    claim(nodes.a, {"model": "test"}, "aa")
    until(nodes.b.exists, "the other node sees the directory")
    yield nodes
    for root in nodes.both():
        # A client of a server that was away may still be on its way back.
        look = functools.partial(check, root, partial_age_seconds=0)
        until(lambda look=look: not look(), lambda look=look: str(look()))
