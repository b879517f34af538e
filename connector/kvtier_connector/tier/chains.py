# SPDX-License-Identifier: Apache-2.0
"""Where each chunk of a request stands in its prefix, so that whoever makes room can evict its end first.

vLLM notes, for each chunk of a request, the token at which it ends. A `Chain` turns that around: the number of each
chunk among those of its group, and the chunk before it. What vLLM did not note has no lineage, which costs nothing but
a worse choice of what to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from vllm.v1.kv_offload.base import (
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage
from kvtier_connector.store.shared import SharedStore
from kvtier_connector.tier.tenants import find_tenant

_LATE = 8
"""Chunks at the end of a prompt that are asked about one by one."""


class Chain:
    """The chunks of one request. The scheduler's alone; it grows as vLLM notes more of them."""

    def __init__(self, context: ReqContext, tokens: Mapping[int, int], tenant: str | None = "") -> None:
        """Store the settings; `tokens` is how many tokens a chunk of each group has, a tenant of None is unknown."""
        self.is_refused = tenant is None
        """Whether the request is kept off the volume, because nobody can tell whose it is."""
        self._tenant = tenant or ""
        # There is no public way from a position to its chunk. The dictionary keeps the order of insertion.
        self._ends: Mapping[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        self._tokens = tokens
        self._seen = 0
        self._keys: dict[int, list[OffloadKey]] = {}

    def name(self, key: OffloadKey) -> BlockKey:
        """Return the store's name of vLLM's key."""
        return BlockKey(get_offload_block_hash(key), get_offload_group_idx(key), self._tenant)

    def lineage(self, key: OffloadKey) -> Lineage:
        """Return the chunk's number and the hash of the one before it; nothing where vLLM did not note both."""
        self._read_on()
        group = get_offload_group_idx(key)
        position = self._position(key, group)
        if position is None or not 0 < position < len(keys := self._keys.get(group, [])):
            return NO_LINEAGE
        return Lineage(get_offload_block_hash(keys[position - 1]), position)

    def last_present(self, is_present: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Return, for each group, a late chunk that is there, of the prefix or of the end; it asks about a few only.

        A prefix is there up to some chunk. Of a group with a sliding window only the end is there, so it is looked at
        first. With other holes a chunk may be answered that is not the last.
        """
        self._read_on()
        found = []
        for keys in self._keys.values():
            last = next((key for key in keys[: -_LATE - 1 : -1] if is_present(key)), None)
            if last is None and (count := _count_prefix(keys, is_present)):
                last = keys[count - 1]
            if last is not None:
                found.append(last)
        return found

    def note_used(self, store: SharedStore, payload_bytes: int) -> None:
        """Tell whoever makes room what the request used, also where it came from the GPU or the CPU tier."""
        if self.is_refused:
            return
        for key in self.last_present(lambda key: store.state(self.name(key)) is Presence.PRESENT):
            store.note_used(self.name(key), payload_bytes, self.lineage(key))

    def _position(self, key: OffloadKey, group: int) -> int | None:
        end = self._ends.get(key)
        tokens = self._tokens.get(group)
        return None if end is None or not tokens or end % tokens else end // tokens - 1

    def _read_on(self) -> None:
        """Take in what vLLM has noted since the last time; chunks of a group come in order."""
        if self._seen == len(self._ends):
            return
        for key in islice(self._ends, self._seen, None):
            group = get_offload_group_idx(key)
            keys = self._keys.setdefault(group, [])
            # A chunk that ends inside another one is no link of the chain.
            if self._position(key, group) == len(keys):
                keys.append(key)
        self._seen = len(self._ends)


def _count_prefix(keys: Sequence[OffloadKey], is_present: Callable[[OffloadKey], bool]) -> int:
    """Return how many are there from the first on, if behind one that is not there are none; by halving."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if is_present(keys[middle]):
            low = middle + 1
        else:
            high = middle
    return low


class Chains:
    """Makes the chain of each request, and keeps it where vLLM keeps what belongs to a request."""

    def __init__(self, spec: OffloadingSpec, tenant_source: str) -> None:
        """Store the settings; `tenant_source` is one of `contract.TENANT_SOURCES`."""
        config = spec.config
        self.tokens = {
            index: group.tokens_per_block * config.cache.blocks_per_chunk for index, group in enumerate(config.groups)
        }
        """How many tokens a chunk of each group has."""
        self._tenant_source = tenant_source

    def of(self, context: ReqContext) -> Chain:
        """Return the request's chain."""
        chain: Chain | None = context.get_state(Chain)
        if chain is None:
            chain = Chain(context, self.tokens, find_tenant(context, self._tenant_source))
            context.set_state(chain)
        return chain
