# SPDX-License-Identifier: Apache-2.0
"""Engines that read what the volume has, however busy the machine is, for tests that expect a hit.

An engine computes instead where the volume answers late or computing is quicker. With a model as small as those of
tests, either may be so on a busy machine. Which of them is right is tested with clocks, in `test_rates.py` and others.
"""

from __future__ import annotations

import functools
import time

from kvtier_connector.cascade import attach, lookup, rates, releases, split
from kvtier_connector.io_workers.lookups import LookupWorker
from kvtier_connector.vllm_adapter import secondary_tier
from kvtier_connector.vllm_adapter.split_scheduler import SyncSplitScheduler

PATIENCE_SECONDS = 300.0


class PatientRates(rates.Rates):
    """Learns nothing about prefill: while that is not known, every hit is read."""

    def note_step(self, tokens: int, in_flight: int, pairs: float = 0) -> None:
        super().note_step(tokens, in_flight, pairs)
        self.prefill.value = 0.0


def be_patient() -> None:
    """Have the engines that this process makes from now on read what the volume has, and compare all they compute."""
    secondary_tier.Rates = PatientRates  # type: ignore[misc]  # of this process
    attach.LookupWorker = functools.partial(LookupWorker, lookup_seconds=PATIENCE_SECONDS)  # type: ignore[misc, assignment]  # as above
    lookup.MOST_WAIT_SECONDS = rates.STALLED_SECONDS = split.STALLED_SECONDS = PATIENCE_SECONDS
    releases._WAITING = 1000
    plan = SyncSplitScheduler._join_and_plan

    def wait_and_plan(self: SyncSplitScheduler, splits: split.Splits) -> None:
        """Compute no more of a head than its first part until a part of the tail has come."""
        assert self._tier is not None
        manager = self._tier.manager
        found = [each for request in self.running if (each := splits.get(request.request_id)) is not None]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(each.ordered and not each.ready for each in found) and time.monotonic() < deadline:
            manager.poll()
            splits.advance()
            time.sleep(0.001)
        plan(self, splits)

    SyncSplitScheduler._join_and_plan = wait_and_plan  # type: ignore[method-assign]  # it calls the real one
