# SPDX-License-Identifier: Apache-2.0
"""Publishes KV events about the blocks on the volume, once for the whole tier, in vLLM's own format.

Routers that read engines' events (llm-d, Dynamo, vllm-router) read these with the same decoder. Stored minus removed
blocks since the last AllBlocksCleared are the catalog's blocks of the current generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import zmq

from kvtier_connector.janitor.catalog import Catalog
from kvtier_connector.store.layout import find_home

MEDIUM = "STORAGE"
"""vLLM's word for blocks on a volume."""
REMOTE = "REMOTE"
"""Relative to any engine: all of them read the volume."""
BATCH = 512
"""Events of one message."""
_LINGER_MS = 1000
_SUBSCRIBED = b"\x01"
_MOST_SUBSCRIPTIONS = 1000
"""Read at once: subscribers must not keep the janitor from its work."""
_REPEAT_SECONDS = 10.0
"""All blocks are published again no more often than this, however many subscribers come and go."""

BlockHash = bytes | int


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """Fields and tags as in vllm.distributed.kv_events; a test compares them."""


class BlockStored(_Event, tag=True):
    """A block is on the volume."""

    block_hashes: list[BlockHash]
    """Of the last vLLM block in the chunk that the file holds."""
    parent_block_hash: BlockHash | None
    """Of the preceding chunk; None for the first of a prefix, and where it is not known."""
    token_ids: list[int]
    """Always empty: the volume does not know them. Engines publish them in their own events of the same hashes."""
    block_size: int
    """Tokens of a chunk."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # vLLM's decoder requires the fields above, and not those below.
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(_Event, tag=True):
    """Blocks are not on the volume any more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event, tag=True):
    """All earlier events of this publisher are void; events of the existing blocks follow."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


def encode(events: Sequence[Event], *, seconds: float) -> bytes:
    """Return the payload of one message; `seconds` is the time since 1970."""
    return msgspec.msgpack.encode(_Batch(seconds, events, 0))


def shown(block_hash: bytes, *, is_integer: bool) -> BlockHash:
    """Return a hash as vLLM's events have it: its bytes, or its last 64 bits as a number."""
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1) if is_integer else block_hash


class EventFeed:
    """The events of one tier. Owned by the thread of the catalog."""

    def __init__(self, publisher: Publisher, *, tier: str, block_tokens: int, is_integer: bool) -> None:
        """Store the settings.

        `tier` is ``<namespace>/<name>``, which each event names as its owner. `is_integer`: hashes are numbers of 64
        bits, as vLLM's by default, and not all their bytes.
        """
        self._publisher, self._tier, self._block_tokens = publisher, tier, block_tokens
        self._is_integer = is_integer
        self._catalog, self._current = Catalog(), ""
        self._is_whole = False
        """Whether all blocks of the catalog were published, except the pending changes."""
        self._stored: dict[int, None] = {}
        """Names of new rows, in their order."""
        self._removed: list[BlockRemoved] = []

    def begin(self, catalog: Catalog, current: str) -> None:
        """Follow this catalog from now on; all earlier events are void."""
        self._catalog, self._current, self._is_whole = catalog, current, False
        catalog.on_new, catalog.on_gone = self._on_new, self._on_gone

    def publish(self, current: str) -> None:
        """Publish the changes; or all blocks, if the generation changed or a subscriber missed something."""
        if current != self._current or self._publisher.wants_all():
            self._current, self._is_whole = current, False
        events = self._events()
        while some := tuple(islice(events, BATCH)):
            self._publisher.send(encode(some, seconds=time.time()))
        self._is_whole = True
        self._stored.clear()
        self._removed.clear()

    def _on_new(self, row: int) -> None:
        """Record a block by its name: rows are renumbered, and names stay."""
        if self._is_whole:
            self._stored[int(self._catalog.rows["name"][row])] = None

    def _on_gone(self, row: int) -> None:
        if not self._is_whole:
            return
        name = int(self._catalog.rows["name"][row])
        if name in self._stored:
            del self._stored[name]  # not published yet
        elif self._is_published(row):
            hashes = [shown(self._catalog.key(row).hash, is_integer=self._is_integer)]
            self._removed.append(BlockRemoved(block_hashes=hashes, **self._common(row)))

    def _events(self) -> Iterator[Event]:
        """Yield the changes, or all blocks where these are not published."""
        if self._is_whole:
            yield from self._removed
            rows = map(self._catalog.find_name, self._stored)
        else:
            yield AllBlocksCleared()
            rows = iter(np.flatnonzero(self._catalog.rows["is_alive"]).tolist())
        yield from (self._stored_event(row) for row in rows if row >= 0 and self._is_published(row))

    def _is_published(self, row: int) -> bool:
        """Return whether engines read this block: another generation may have other blocks of the same hash."""
        home = find_home(self._catalog.digest(row))
        return home is not None and home.digest == self._current

    def _stored_event(self, row: int) -> BlockStored:
        key, before = self._catalog.key(row), self._catalog.parent_of(row)
        return BlockStored(
            block_hashes=[shown(key.hash, is_integer=self._is_integer)],
            parent_block_hash=shown(self._catalog.key(before).hash, is_integer=self._is_integer)
            if before >= 0
            else None,
            token_ids=[],
            block_size=self._block_tokens,
            lora_id=None,
            lora_name=None,
            **self._common(row),
        )

    def _common(self, row: int) -> dict[str, Any]:
        """Return the fields of every event; the owner is the tier, the generation's directory, and a tenant if any."""
        key = self._catalog.key(row)
        owner = "/".join(filter(None, (self._tier, self._catalog.digest(row), key.tenant)))
        return {"medium": MEDIUM, "group_idx": key.group, "locality": REMOTE, "ownership": owner}


class Publisher:
    """Publishes messages over ZeroMQ as vLLM's engines do: topic, number, payload.

    Each new subscription is noticed, and all blocks are published again: a late subscriber has missed earlier messages.
    A subscriber that finds a gap in the numbers subscribes again. One thread at a time calls it.
    """

    def __init__(self, *, host: str, port: int, topic: str, now: Callable[[], float] = time.monotonic) -> None:
        """Bind; raises OSError (zmq.ZMQError) where the port is taken. Port 0 takes any free one."""
        self._topic = topic.encode()
        self._now = now
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        # Report subscriptions also of a topic that has a subscriber already.
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        address = f"[{host}]" if ":" in host else host or "*"
        self._socket.bind(f"tcp://{address}:{port or '*'}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._number = 0
        self._has_missed = False
        self._repeated_at = -_REPEAT_SECONDS

    def close(self) -> None:
        """Send the last messages, and stop."""
        self._context.destroy(linger=_LINGER_MS)

    def send(self, payload: bytes) -> None:
        """Hand a message to ZeroMQ, which drops it for a subscriber that does not keep up."""
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._number += 1

    def wants_all(self) -> bool:
        """Return, once, whether a subscriber has missed earlier messages."""
        for _ in range(_MOST_SUBSCRIPTIONS):
            if not self._socket.poll(0):
                break
            wish = self._socket.recv()
            self._has_missed |= wish[:1] == _SUBSCRIBED and self._topic.startswith(wish[1:])
        if not self._has_missed or self._now() - self._repeated_at < _REPEAT_SECONDS:
            return False
        self._has_missed, self._repeated_at = False, self._now()
        return True
