# SPDX-License-Identifier: Apache-2.0
"""Gives tests real network file systems, each mounted twice: one directory as two nodes see it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from nodes import QUICKEST, Nodes, mounted, nodes_on

from kvtier_netfs import KINDS
from kvtier_netfs.volume import SharedVolume

_numbers = itertools.count()


@pytest.fixture(
    scope="session", params=[pytest.param(name, marks=[] if name == QUICKEST else pytest.mark.netfs) for name in KINDS]
)
def shared_volume(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedVolume]:
    with mounted(KINDS[request.param], tmp_path_factory.mktemp(request.param) / "volume") as volume:
        yield volume


@pytest.fixture
def nodes(shared_volume: SharedVolume) -> Iterator[Nodes]:
    with nodes_on(shared_volume, f"test{next(_numbers)}") as nodes:
        yield nodes
