# SPDX-License-Identifier: Apache-2.0
"""The state of one request: its tenant, the position of each chunk, and what was found and decided.

A tenant is a directory on the volume, with a quota. It does not keep one tenant's prompts from another's. In the
GPU and the CPU tier vLLM finds chunks by their hash alone, which covers the cache salt and no parameter. A request
whose tenant cannot be told is kept off the volume: it is computed, and not stored.

vLLM notes, for each chunk of a request, the token at which it ends. A `TierRequest` turns that around: the number of
each chunk in its group, and the chunk before it. So the janitor can evict the end of a prefix first. A chunk that vLLM
did not note has no lineage, which costs no more than a worse choice in an eviction.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import islice

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.request import Request

from kvtier_connector.cascade.attach import Attachment
from kvtier_connector.cascade.hints import NO_HINTS, HintProblem, Hints
from kvtier_connector.cascade.media import KnownMedia, Media
from kvtier_connector.cascade.rates import Way
from kvtier_connector.contract.engine import TENANT_PARAMETER
from kvtier_connector.store.journal import Op
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage, is_tenant
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.lora import Adapter, AdapterIdentity, Adapters

logger = init_logger("vllm.kvtier.hints")

SALT_DIGITS = 16
"""Of the SHA-256 of a salt: the salt itself, which is a secret, is neither a directory's name nor in a header."""
_LATE_CHUNKS = 8
"""At the end of a prompt, that are asked about one by one."""
_MOST_LOGGED = 64
"""Hints that are logged because they are not understood: each once, since clients may invent many."""


def find_tenant(context: ReqContext, source: str) -> str | None:
    """Return the request's tenant, empty if it has none, None if it cannot be told.

    Args:
        context: The request; vLLM's own `Request`, with its cache salt, is part of its state.
        source: One of `contract.TENANT_SOURCES`.
    """
    if source == "CacheSalt":
        request: Request | None = context.get_state(Request)
        if request is None:
            return None
        return hashlib.sha256(request.cache_salt.encode()).hexdigest()[:SALT_DIGITS] if request.cache_salt else ""
    if source == "Parameter":
        named = (context.kv_transfer_params or {}).get(TENANT_PARAMETER)
        if named is None:
            return ""
        return named if isinstance(named, str) and is_tenant(named) else None
    return ""


class TierRequest:
    """One request. The scheduler's alone; its chunks grow as vLLM notes more of them."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        context: ReqContext,
        tokens: Mapping[int, int],
        tenant: str | None = "",
        *,
        locality: Locality | None = None,
        adapter: Adapter | None = None,
        media: Media | None = None,
    ) -> None:
        """Store the settings.

        Args:
            context: vLLM's record of it.
            tokens: How many tokens a chunk of each group has.
            tenant: Whose it is; None where that is unknown.
            locality: What the volume is to requests that name the tiers they load from.
            adapter: Its LoRA adapter; None if it has none.
            media: What its prompt holds beside text; None if that is nothing.
        """
        self.name = context.req_id
        self.hints: Hints = context.get_state(Hints) or NO_HINTS
        """The wishes of its client."""
        self._has_tenant = tenant is not None
        self._adapter = adapter
        self._media = media
        self.way: Way | None = None
        """How it gets its hit; None before that was found, and again once it was acted upon."""
        self.lookups: dict[int, tuple[OffloadKey, ...]] = {}
        """Chunks that the volume is asked for, by number of the lookup."""
        self.found: set[OffloadKey] = set()
        """Chunks that lookups found on the volume, or that lie between such."""
        self.absent: set[OffloadKey] = set()
        """Chunks that lookups did not find."""
        self.looked_at = 0.0
        """When the last lookup ended, on `time.monotonic`."""
        self.waits_since: float | None = None
        """Since when nothing but a lookup keeps it from its turn."""
        self.on_volume: set[OffloadKey] = set()
        """Chunks that the last look-up found on the volume and not in the CPU tier."""
        self.missing: dict[OffloadKey, str] = {}
        """Chunks that were to be read and that this request does without, by chunk with the cause."""
        self.leased: set[OffloadKey] = set()
        """Chunks that were fetched for it before it was scheduled, and stay in the CPU tier for it."""
        self.causes: set[str] = set()
        """Of its misses, as far as they were counted."""
        self._wants_volume = context.load_tier_filter.allows(Medium.STORAGE, locality)
        self.tenant = tenant or ""
        """Whose it is; empty for the common blocks."""
        # There is no public way from a position to its chunk. The dictionary keeps the order of insertion.
        self._ends: Mapping[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        self._tokens = tokens
        self._seen = 0
        self._keys: dict[int, list[OffloadKey]] = {}

    @property
    def is_pending(self) -> bool:
        """Whether its adapter is still being looked at."""
        return self._adapter is not None and self._adapter.is_pending

    @property
    def is_mixed(self) -> bool:
        """Whether chunks of the same key may have been computed with another adapter, or upon other media."""
        if self._media is not None and self._media.is_mixed:
            return True
        return self._adapter is not None and not self.is_pending and self._identity is None

    @property
    def refusal(self) -> str | None:
        """Why the request is kept off the volume: its tenant, media or adapter cannot be told. None if it is not."""
        if not self._has_tenant:
            return metrics.NO_TENANT
        if self._media is not None and self._media.is_mixed:
            return metrics.NO_MEDIA
        is_unknown = self._adapter is not None and (self.is_pending or self._identity is None)
        return metrics.NO_ADAPTER if is_unknown else None

    @property
    def read_refusal(self) -> str | None:
        """Why the volume is not asked for it, None if it is."""
        return self.refusal or (None if self._wants_volume else metrics.UNWANTED)

    def begin_anew(self) -> None:
        """Forget what was found and decided: the request was preempted, and looks again."""
        self.way = None
        self.missing.clear()
        self.forget_lookups()
        self.causes.clear()

    def forget_lookups(self) -> None:
        """Forget what lookups found, and have no part in those that are open."""
        self.lookups.clear()
        self.found.clear()
        self.absent.clear()
        self.waits_since = None

    def is_asking(self, key: OffloadKey) -> bool:
        """Say whether the volume is being asked for a chunk."""
        return any(key in keys for keys in self.lookups.values())

    def block_key(self, key: OffloadKey) -> BlockKey:
        """Return the store's name of vLLM's key."""
        if self._adapter is None and self._media is None:
            return BlockKey(get_offload_block_hash(key), get_offload_group_idx(key), self.tenant)
        return BlockKey(self._hash(key), get_offload_group_idx(key), self.tenant)

    def lineage(self, key: OffloadKey) -> Lineage:
        """Return the chunk's number and the hash of the one before it; nothing where vLLM did not note both."""
        self._read_on()
        label = self._identity.label if self._identity else ""
        keys = self._keys.get(group := get_offload_group_idx(key), [])
        position = self._ends[key] // self._tokens[group] - 1 if key in self._ends and keys else 0
        if not 0 < position < len(keys) or keys[position] != key:
            return NO_LINEAGE._replace(adapter=label)
        return Lineage(self._hash(keys[position - 1]), position, label)

    def last_present(self, is_present: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Return, for each group, a late chunk that is there, of the prefix or of the end; it asks about a few only.

        A prefix is there up to some chunk. Of a group with a sliding window only the end is there, so it is looked at
        first. With other holes a chunk may be answered that is not the last.
        """
        self._read_on()
        found = []
        for keys in self._keys.values():
            last = next((key for key in keys[: -_LATE_CHUNKS - 1 : -1] if is_present(key)), None)
            if last is None and (count := bisect_left(keys, 1, key=lambda key: not is_present(key))):
                last = keys[count - 1]
            if last is not None:
                found.append(last)
        return found

    def note_used(self, attachment: Attachment, payload_bytes: int) -> None:
        """Tell the janitor what the request used, also where it came from the GPU or the CPU tier."""
        if self.refusal or not self.hints.may_store:
            return
        for key in self.last_present(lambda key: attachment.memory.has(self.block_key(key))):
            attachment.tell_janitor(Op.USED, self.block_key(key), payload_bytes, self.lineage(key))

    def note_hints(self, attachment: Attachment, payload_bytes: int) -> None:
        """Tell the janitor what its client asks for, once all of its chunks are stored that are to be."""
        # A private prompt leaves no name of a block behind, also none that another request stored.
        if self.refusal or not self.hints.may_store:
            return
        if (retained := self.hints.retained) is not None:
            limit = math.inf if retained.tokens is None else retained.tokens
            memory, seconds = attachment.memory, retained.seconds
            for key in self.last_present(lambda key: self._ends[key] <= limit and memory.has(self.block_key(key))):
                attachment.tell_janitor(Op.RETAINED, self.block_key(key), payload_bytes, ahead_seconds=seconds)

    @property
    def _identity(self) -> AdapterIdentity | None:
        return None if self._adapter is None else self._adapter.identity

    def _hash(self, key: OffloadKey) -> bytes:
        """Return the hash that the volume knows a chunk by: vLLM's, and what its media and its adapter hold."""
        block_hash = get_offload_block_hash(key)
        if self._media is not None:
            block_hash = self._media.hash_of(block_hash, self._ends.get(key))
        return self._identity.hash_of(block_hash) if self._identity else block_hash

    def _read_on(self) -> None:
        """Take in what vLLM has noted since the last time; chunks of a group come in order."""
        if self._seen == len(self._ends):
            # To walk up to the new ones takes as long as to take them in, and each chunk of a prompt asks.
            return
        for key in islice(self._ends, self._seen, None):
            group = get_offload_group_idx(key)
            keys = self._keys.setdefault(group, [])
            # A chunk that ends inside another one is no link of the chain.
            if self._ends[key] == (len(keys) + 1) * self._tokens.get(group, 0):
                keys.append(key)
        self._seen = len(self._ends)


class TierRequests:
    """Makes the record of each request, and keeps it where vLLM keeps what belongs to a request.

    It also counts what clients ask for, and tells the janitor once the blocks lie on the volume. The scheduler's thread
    only.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        *,
        tenant_source: str,
        locality: Locality | None,
        adapters: Adapters,
        stats: metrics.Stats,
    ) -> None:
        """Store the settings; `tenant_source` is one of `contract.TENANT_SOURCES`."""
        config = spec.config
        self.tokens = {
            index: group.tokens_per_block * config.cache.blocks_per_chunk for index, group in enumerate(config.groups)
        }
        """How many tokens a chunk of each group has."""
        self._tenant_source = tenant_source
        self._locality = locality
        self._adapters = adapters
        self._known_media = KnownMedia()
        self._stats = stats
        self._logged: set[HintProblem] = set()
        self._ended: list[ReqContext] = []
        """Those with something to tell the janitor, whose blocks may still be written."""

    def of(self, context: ReqContext) -> TierRequest:
        """Return the record of a request."""
        request: TierRequest | None = context.get_state(TierRequest)
        if request is None:
            tenant = find_tenant(context, self._tenant_source)
            adapter = media = None
            of_vllm: Request | None = context.get_state(Request)
            if of_vllm is not None and of_vllm.lora_request is not None:
                adapter = self._adapters.read(of_vllm.lora_request)
            # A session may add some later.
            if of_vllm is not None and (of_vllm.mm_features or of_vllm.resumable):
                media = Media(of_vllm.mm_features, self._known_media)
            request = TierRequest(context, self.tokens, tenant, locality=self._locality, adapter=adapter, media=media)
            context.set_state(request)
        return request

    @property
    def is_telling(self) -> bool:
        """Whether the janitor is to be told of requests that have ended."""
        return bool(self._ended)

    def count(self, hints: Hints) -> None:
        """Count what a request asks for, and what of that is ignored."""
        for name in hints.taken:
            self._stats.count(metrics.HINTS, cause=name)
        for problem in hints.problems:
            self._stats.count(metrics.IGNORED_HINTS, cause=problem.cause)
            if problem not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(problem)
                logger.warning(
                    "Not understood in kv_transfer_params or kv_hints of a request, from now on only counted: %s (%s)",
                    problem.name,
                    problem.cause,
                )

    def end(self, context: ReqContext) -> None:
        """Take in that a request has ended."""
        hints = self.of(context).hints
        if hints.may_store and hints.retained is not None:
            self._ended.append(context)

    def tell(self, attachment: Attachment, payload_bytes: int, *, is_storing: Callable[[ReqContext], bool]) -> None:
        """Tell of those whose blocks have been written; call it when this step's orders to write are given."""
        ended, self._ended = self._ended, []
        for context in ended:
            if is_storing(context):
                self._ended.append(context)
            else:
                self.of(context).note_hints(attachment, payload_bytes)
