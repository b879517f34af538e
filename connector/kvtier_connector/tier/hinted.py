# SPDX-License-Identifier: Apache-2.0
"""Requests with hints: counts them, and tells the janitor what they ask for once their blocks lie on the volume."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import ReqContext

from kvtier_connector.store.shared import SharedStore
from kvtier_connector.tier import metrics
from kvtier_connector.tier.hints import Hints, Problem
from kvtier_connector.tier.requests import TierRequest
from kvtier_connector.tier.transfers import Transfers

logger = init_logger("vllm.kvtier.hints")

_MOST_TOLD = 64
"""Things that are not understood, of which the log tells: each once, since clients may invent as many as they like."""


class HintedRequests:
    """The scheduler's thread only."""

    def __init__(self, stats: metrics.Stats) -> None:
        """Start with none."""
        self._stats = stats
        self._ended: list[tuple[ReqContext, TierRequest]] = []
        """Whose blocks may still be written."""
        self._told: set[Problem] = set()

    def __bool__(self) -> bool:
        """Say whether there is anything to tell yet."""
        return bool(self._ended)

    def count(self, hints: Hints) -> None:
        """Count what a request asks for, and what of that is ignored."""
        for name in hints.taken:
            self._stats.count(metrics.HINTS, cause=name)
        for problem in hints.problems:
            self._stats.count(metrics.IGNORED_HINTS, cause=problem.cause)
            if problem not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(problem)
                logger.warning(
                    "Not understood in kv_transfer_params or kv_hints of a request, from now on only counted: %s (%s)",
                    problem.name,
                    problem.cause,
                )

    def end(self, context: ReqContext, request: TierRequest) -> None:
        """Take in that a request has ended."""
        hints = request.hints
        if hints.may_store and (hints.is_demoted or hints.retained is not None):
            self._ended.append((context, request))

    def pass_on(self, transfers: Transfers, store: SharedStore, payload_bytes: int) -> None:
        """Tell of those whose blocks have been written; call it when this step's orders to write are given."""
        if not self._ended:
            return
        waiting = []
        for context, request in self._ended:
            if transfers.is_storing(context):
                waiting.append((context, request))
            else:
                request.note_hints(store, payload_bytes)
        self._ended = waiting
