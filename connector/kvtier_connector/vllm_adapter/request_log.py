# SPDX-License-Identifier: Apache-2.0
"""Logs two lines for each request at level DEBUG: what its lookup found, and how it ended.

Lines name requests, tokens and causes, and hold no prompt, hash, salt or tenant. At any other level engines have the
scheduler's side without this log, so it costs nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx
from vllm.v1.request import Request

from kvtier_connector.cascade.rates import Way
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.split_scheduler import AdmittingScheduler

logger = init_logger("vllm.kvtier.request")

NO_LOAD = "no_load"
"""The cause for a request whose parameters forbid loads."""
_NOTHING = "-"
_CAUSES = {Way.COMPUTE: metrics.SLOWER, Way.SHORT: metrics.SHORT}


@dataclass(slots=True)
class _Entry:
    began_at: float
    looked_up: int | None = None
    """Preemptions before the last logged lookup."""
    gpu_tokens: int = 0
    loaded_tokens: int = 0
    load_began_at: float = 0.0
    load_seconds: float | None = None
    joined: str = _NOTHING
    unstored: Counter[str] = field(default_factory=Counter)
    """Chunks that were not written, by cause."""


def scheduler_class() -> type[AdmittingScheduler]:
    """Return the class of the scheduler's side: with the log at level DEBUG, without it otherwise."""
    return LoggingScheduler if logger.isEnabledFor(logging.DEBUG) else AdmittingScheduler


class LoggingScheduler(AdmittingScheduler):
    """The scheduler's side with the log. Scheduler's thread only."""

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entries: dict[str, _Entry] = {}
        self._mark_key = os.urandom(16)
        self._counted_group = next(iter(self._full_attention_groups), 0)
        """The KV group whose chunks are counted."""
        self.manager.tier.transfers.on_skipped = self._note_skipped

    @override
    def on_new_request(self, request: Request) -> None:
        self._entries[request.request_id] = _Entry(time.monotonic())
        super().on_new_request(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        is_joining = request.request_id in self.joined
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        entry = self._entries.get(request.request_id)
        if entry is None or tokens is None or is_joining or entry.looked_up == request.num_preemptions:
            return tokens, is_async
        entry.looked_up, entry.gpu_tokens = request.num_preemptions, num_computed_tokens
        self._log_lookup(request, entry, tokens)
        return tokens, is_async

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and (entry := self._entries.get(request.request_id)) is not None:
            entry.loaded_tokens, entry.load_began_at = num_external_tokens, time.monotonic()

    def end_split(self, name: str, *, has_joined: bool) -> None:
        """Note where a split hit joins, and end the split."""
        split, entry = self._splits.get(name), self._entries.get(name)
        if has_joined and split is not None and entry is not None:
            entry.joined = f"{split.computed}@{time.monotonic() - entry.began_at:.3f}"
            entry.loaded_tokens = split.end - split.computed
            entry.load_seconds = self._splits.rates.now() - split.began_at
        super().end_split(name, has_joined=has_joined)

    def _note_over(self, name: str) -> None:
        if name in self._ending and (entry := self._entries.get(name)) is not None:
            entry.load_seconds = time.monotonic() - entry.load_began_at
        super()._note_over(name)

    @override
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        entry, found = self._entries.pop(request.request_id, None), self.request(request.request_id)
        if entry is not None and found is not None:
            self._log_end(request, entry, found)
        return super().request_finished(request)

    def _end(self, name: str, *, unwritten: list[int]) -> None:
        entry = self._entries.get(name)
        if unwritten and entry is not None:
            groups = self.config.kv_group_configs
            lost = len(unwritten) * groups[0].tokens_per_block if len(groups) == 1 else entry.loaded_tokens
            entry.loaded_tokens = max(0, entry.loaded_tokens - lost)
        super()._end(name, unwritten=unwritten)

    def _note_skipped(self, name: str, cause: str) -> None:
        if (entry := self._entries.get(name)) is not None:
            entry.unstored[cause] += 1

    def _log_lookup(self, request: Request, entry: _Entry, tokens: int) -> None:
        found = self.request(request.request_id)
        assert found is not None
        way, split = found.way, self._splits.get(request.request_id)
        if split is not None:
            way, tokens = Way.SPLIT, split.end - entry.gpu_tokens
        volume = self._count_tokens(found.on_volume | found.leased)
        memory = tokens
        if way is None or way.reads:
            # Of a window or a state the last chunks alone are read, and stand for all before.
            volume = min(volume, tokens) if self._full_attention_groups or not volume else tokens
            memory = tokens - volume
        if not volume:
            way = Way.LOAD if tokens else Way.COMPUTE
        rates = self.manager.tier.rates
        # Another engine would give another one: names are short enough to be guessed.
        mark = hashlib.blake2b(found.tenant.encode(), key=self._mark_key, digest_size=4)
        logger.debug(
            "Found request=%s prompt=%d gpu=%d memory=%d volume=%d way=%s why_not=%s tenant=%s "
            "volume_rate=%.0f compute_rate=%.0f seconds=%.3f",
            request.request_id,
            request.num_prompt_tokens,
            entry.gpu_tokens,
            memory,
            volume,
            (way or Way.LOAD).value,
            self._causes_of(found),
            mark.hexdigest() if found.tenant else _NOTHING,
            rates.volume.value,
            rates.prefill.value,
            time.monotonic() - entry.began_at,
        )

    def _log_end(self, request: Request, entry: _Entry, found: TierRequest) -> None:
        logger.debug(
            "Ended request=%s status=%s loaded=%d computed=%d joined=%s why_not=%s not_stored=%s preempted=%d "
            "load_seconds=%s seconds=%.3f",
            request.request_id,
            request.status.name,
            entry.loaded_tokens,
            max(0, request.num_prompt_tokens - entry.gpu_tokens - entry.loaded_tokens),
            entry.joined,
            self._causes_of(found),
            _text_of(entry.unstored),
            request.num_preemptions,
            _NOTHING if entry.load_seconds is None else f"{entry.load_seconds:.3f}",
            time.monotonic() - entry.began_at,
        )

    def _count_tokens(self, keys: Iterable[OffloadKey]) -> int:
        group = self._counted_group
        count = sum(get_offload_group_idx(key) == group for key in keys)
        return int(count * self.config.kv_group_configs[group].tokens_per_chunk)

    def _causes_of(self, found: TierRequest) -> str:
        """Return why chunks are not loaded; with their number where they were to be read and could not be."""
        causes = dict.fromkeys(found.causes, 0) | Counter(found.missing.values())
        if found.way in _CAUSES:
            causes[_CAUSES[found.way]] = 0
        if not found.hints.may_load:
            causes[NO_LOAD] = 0
        return _text_of(causes)


def _text_of(causes: dict[str, int]) -> str:
    return ",".join(f"{cause}:{count}" if count else cause for cause, count in sorted(causes.items())) or _NOTHING
