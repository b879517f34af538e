# SPDX-License-Identifier: Apache-2.0
"""What the tier does for requests: seconds of computing that it saves, and how long they wait for their first token.

Seconds are told apart by tenant, waits by where the beginning of a prompt came from. Scheduler's thread only.

The scheduler sees a first token when it looks at its requests in the step after, or when one ends. The time runs
from the request's arrival at the engine, so waiting for room and for the volume counts, too. A request that has
answered costs a step nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.v1.request import Request

from kvtier_connector.tier import metrics
from kvtier_connector.tier.metrics import Stats

DISK, MEMORY, NOTHING = "disk", "memory", "nothing"
"""Where the beginning of a prompt came from: the volume, at least in part; the CPU tier or the GPU; or nowhere."""

MOST_TENANTS = 200
OTHERS = "(other)"


class Savings:
    """Seconds of computing that loads made needless, by tenant.

    A label of a metric stays for as long as the engine runs: of more tenants than `MOST_TENANTS`, those that come last
    are counted together, as `OTHERS`, which is no tenant's name.
    """

    def __init__(self, stats: Stats) -> None:
        """Count nothing yet."""
        self._stats = stats
        self._tenants: set[str] = set()

    def count(self, tenant: str, seconds: float) -> None:
        """Add what a hit of a tenant saved; 0 is nothing, and makes no label."""
        if not seconds:
            return
        if tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS:
            tenant = OTHERS
        else:
            self._tenants.add(tenant)
        self._stats.count(metrics.SAVED_SECONDS, seconds, cause=tenant)


class FirstTokens:
    """The requests of one engine that have not answered yet."""

    def __init__(self, stats: Stats, clock: Callable[[], float] = time.time) -> None:
        """Store what counts; the clock is the one that vLLM stamps arrivals with."""
        self._stats = stats
        self._clock = clock
        self._waiting: dict[str, tuple[Request, str]] = {}

    def begin(self, request: Request, found: str) -> None:
        """Note that a request got its blocks; after a load, or a preemption, it gets more, and what was found stays."""
        if not request.num_output_tokens:
            _, before = self._waiting.get(request.request_id, (request, NOTHING))
            self._waiting[request.request_id] = request, found if before == NOTHING else before

    def look(self) -> None:
        """Count those that have answered since the last step."""
        for name in [name for name, (request, _) in self._waiting.items() if request.num_output_tokens]:
            self.end(name)

    def end(self, name: str) -> None:
        """Forget a request, and count it if it has answered."""
        request, found = self._waiting.pop(name, (None, NOTHING))
        if request is None or not request.num_output_tokens:
            return
        self._stats.count(metrics.FIRST_TOKENS, cause=found)
        self._stats.count(metrics.FIRST_TOKEN_SECONDS, max(0.0, self._clock() - request.arrival_time), cause=found)
        self._stats.count(metrics.FIRST_TOKEN_PROMPTS, request.num_prompt_tokens, cause=found)
