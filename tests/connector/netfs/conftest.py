# SPDX-License-Identifier: Apache-2.0
"""Gives tests real network file systems, each mounted twice: one directory as two nodes see it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

SUITES = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), *(str(SUITES / each) for each in ("store", "io_workers", "faults"))]

from nodes import Nodes, nodes_on  # noqa: E402 - as above

from kvtier_netfs import KINDS  # noqa: E402 - found through the lines above
from kvtier_netfs.volume import SharedVolume, UnavailableError  # noqa: E402 - as above

QUICKEST = "glusterfs-distribute"
"""It is there within a second, so it is part of every run; the others are for `make test-netfs`."""
Kind = TypeVar("Kind", bound=SharedVolume)
_numbers = itertools.count()


@contextmanager
def mounted(kind: type[Kind], base: Path) -> Iterator[Kind]:
    """Mount it for as long as somebody needs it; skip with the reason where this machine cannot."""
    with ExitStack() as stack:
        try:
            volume = stack.enter_context(kind(base))
        except UnavailableError as error:
            pytest.skip(f"{kind.name}: {error}")
        yield volume


@pytest.fixture(
    scope="session", params=[pytest.param(name, marks=[] if name == QUICKEST else pytest.mark.netfs) for name in KINDS]
)
def shared_volume(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedVolume]:
    with mounted(KINDS[request.param], tmp_path_factory.mktemp(request.param) / "volume") as volume:
        yield volume


@pytest.fixture
def nodes(shared_volume: SharedVolume) -> Iterator[Nodes]:
    """One tier's directory, new for each test."""
    with nodes_on(shared_volume, f"test{next(_numbers)}") as nodes:
        yield nodes
