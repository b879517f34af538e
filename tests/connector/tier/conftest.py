# SPDX-License-Identifier: Apache-2.0
"""Gives each test engines that share one directory, and closes them."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    # Importing torch and vLLM warns of their own deprecations; ours still fail the tests.
    warnings.simplefilter("ignore")
    from engine_fleet import PROMPT, Engines
    from engine_rig import SimulatedEngine
    from rig import Rigs

    from kvtier_connector.io_workers.lookups import LookupWorker

PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have requests wait for lookups and reads on a busy host, where no test computes for as long as a model does.

    What is not stored is offered again when the test is over.
    """
    for constant in (
        "lookup.LEAST_WAIT_SECONDS",
        "lookup.MOST_WAIT_SECONDS",
        "rates.LEAST_PATIENCE_SECONDS",
        "rates.STALLED_SECONDS",
        "transfers.RETRY_SECONDS",
    ):
        monkeypatch.setattr(f"kvtier_connector.cascade.{constant}", PATIENCE_SECONDS)
    # All blocks that are offered are compared, however late that begins.
    monkeypatch.setattr("kvtier_connector.cascade.releases._WAITING", 1000)
    patient = functools.partial(LookupWorker, lookup_seconds=PATIENCE_SECONDS)
    monkeypatch.setattr("kvtier_connector.cascade.attach.LookupWorker", patient)


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Rigs]:
    made = Rigs(tmp_path)
    yield made
    made.close()
    # Memory of a region is unmapped when its last view goes.
    gc.collect()


@pytest.fixture
def engines(rigs: Rigs) -> Iterator[Engines]:
    made = Engines(rigs)
    yield made
    made.close()


@pytest.fixture
def writer(engines: Engines) -> SimulatedEngine:
    made = engines.make()
    assert made.ask("writer", PROMPT) == len(PROMPT)
    made.run()
    assert engines.assert_volume_holds(made, PROMPT) == 20
    return made
