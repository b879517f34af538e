# SPDX-License-Identifier: Apache-2.0
"""The events of the volume as they go over the wire: vLLM's own (vllm.distributed.kv_events), field for field. Pure.

Routers that read engines' events (llm-d, Dynamo, vllm-router) read these with the same decoder. A test holds both
against each other.

Tells routers what lies on the volume: BlockStored and BlockRemoved, once for the whole tier.

The janitor alone knows of every block, whoever stored or removed it, so it is the one that tells. What it tells is what
its ledger says: stored minus removed, since the last AllBlocksCleared, is what the ledger holds of the generation that
engines use now. Owned by the keeper's thread.

Publishes messages over ZeroMQ as vLLM's engines do: topic, number, payload; and repeats them to who asks.

Whoever subscribes late missed what was published before. Each new subscription is therefore noticed, and everything is
told anew; whoever finds a gap in the numbers asks the second port for the messages from a number on, as of an engine.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec
import numpy as np
import zmq

from kvtier_connector.janitor.catalog import Ledger
from kvtier_connector.store.layout import find_home

MEDIUM = "STORAGE"
"""vLLM's word for what lies on a volume."""
REMOTE = "REMOTE"
"""Relative to any engine: all of them read the volume, and it is on no node of theirs."""
BlockHash = bytes | int


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """A block is on the volume."""

    block_hashes: list[BlockHash]
    """Of the last vLLM block in the chunk that the file holds."""
    parent_block_hash: BlockHash | None
    """Of the chunk before it; None for the first of a prefix, and where it is not known."""
    token_ids: list[int]
    """Always empty: the volume does not know them. Engines tell them with their own events of the same hashes."""
    block_size: int
    """Tokens of a chunk."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # vLLM's decoder asks for those above, and not for those below.
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """Blocks are not on the volume any more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What this publisher told so far is void; what there is follows."""


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


BATCH = 512
"""Events of one message."""


class Outlet(Protocol):
    """Where messages go."""

    def send(self, payload: bytes) -> bool:
        """Take a message; say whether it will be published."""
        ...

    def wants_all(self) -> bool:
        """Say, once, whether somebody has missed what was told before."""
        ...


class Feed:
    """The events of one tier."""

    def __init__(
        self,
        outlet: Outlet,
        *,
        tier: str,
        block_tokens: int,
        is_integer: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the settings.

        Args:
            outlet: Where messages go.
            tier: ``<namespace>/<name>``, which each event names as its owner.
            block_tokens: Tokens of a chunk.
            is_integer: Whether hashes are numbers of 64 bits, as vLLM's by default, and not all their bytes.
            clock: Seconds since 1970.
        """
        self._outlet = outlet
        self._tier = tier
        self._block_tokens = block_tokens
        self._is_integer = is_integer
        self._clock = clock
        self._ledger = Ledger()
        self._current = ""
        self._is_whole = False
        """Whether all that the ledger holds was told, but for what is pending."""
        self._stored: dict[int, None] = {}
        """Names of rows that are to be told of, in their order."""
        self._removed: list[BlockRemoved] = []

    def begin(self, ledger: Ledger, current: str) -> None:
        """Tell from now on of this ledger; all that was told before is void."""
        self._ledger, self._current, self._is_whole = ledger, current, False
        ledger.on_new, ledger.on_gone = self._note_new, self._note_gone

    def publish(self, current: str) -> None:
        """Tell what has changed; of another generation, and to whoever missed something, everything."""
        if current != self._current or self._outlet.wants_all():
            self._current, self._is_whole = current, False
        events = self._changes() if self._is_whole else self._everything()
        self._is_whole = True
        while some := tuple(islice(events, BATCH)):
            if not self._outlet.send(encode(some, seconds=self._clock())):
                self._is_whole = False  # the rest would make no sense
                break
        self._stored.clear()
        self._removed.clear()

    def _note_new(self, row: int) -> None:
        """Note a block by its name: rows are renumbered, and names stay."""
        if self._is_whole:
            self._stored[int(self._ledger.rows["name"][row])] = None

    def _note_gone(self, row: int) -> None:
        if not self._is_whole:
            return
        name = int(self._ledger.rows["name"][row])
        if name in self._stored:
            del self._stored[name]  # nobody was told of it
        elif self._is_told(int(self._ledger.rows["generation"][row])):
            self._removed.append(self._removed_event(row))

    def _changes(self) -> Iterator[Event]:
        yield from self._removed
        for name in self._stored:
            row = self._ledger.find_name(name)
            if row >= 0 and self._is_told(int(self._ledger.rows["generation"][row])):
                yield self._stored_event(row)

    def _everything(self) -> Iterator[Event]:
        yield AllBlocksCleared()
        for row in np.flatnonzero(self._ledger.rows["is_alive"]).tolist():
            if self._is_told(int(self._ledger.rows["generation"][row])):
                yield self._stored_event(row)

    def _is_told(self, generation: int) -> bool:
        """Tell whether engines read these blocks: another generation may have other blocks of the same hash."""
        home = find_home(self._ledger.generations[generation])
        return home is not None and home.digest == self._current

    def _owner(self, row: int) -> str:
        """Return whose the block is: the tier, the directory of its weights, and its tenant if it has one."""
        each = self._ledger.rows[row]
        tenant = self._ledger.tenants[int(each["tenant"])]
        return "/".join(filter(None, (self._tier, self._ledger.generations[int(each["generation"])], tenant)))

    def _stored_event(self, row: int) -> BlockStored:
        key, parent = self._ledger.key(row), int(self._ledger.rows["parent"][row])
        before = self._ledger.find_name(parent) if parent else -1
        return BlockStored(
            block_hashes=[self._shown(key.hash)],
            parent_block_hash=self._shown(self._ledger.key(before).hash) if before >= 0 else None,
            token_ids=[],
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            group_idx=key.group,
            locality=REMOTE,
            ownership=self._owner(row),
        )

    def _removed_event(self, row: int) -> BlockRemoved:
        key = self._ledger.key(row)
        return BlockRemoved(
            block_hashes=[self._shown(key.hash)],
            medium=MEDIUM,
            group_idx=key.group,
            locality=REMOTE,
            ownership=self._owner(row),
        )

    def _shown(self, block_hash: bytes) -> BlockHash:
        return shown(block_hash, is_integer=self._is_integer)


logger = logging.getLogger(__name__)

BUFFERED = 1000
"""Messages that can be repeated."""
_QUEUED = 256
_FULL_SECONDS = 5.0
_POLL_MS = 50
_LINGER_MS = 1000
_END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message that ends a repetition."""
_SUBSCRIBED = 1
_AGAIN_SECONDS = 10.0
"""Everything is told anew no more often than this, however many come and go."""


class Publisher:
    """A socket for subscribers and one for who missed something.

    One thread owns the sockets and `_buffer`; `send` hands messages over through a queue, and `_has_missed` is an
    event that one sets and the other takes back.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        replay_port: int,
        topic: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind; raises OSError (zmq.ZMQError) where a port is taken. Port 0 takes any that is free."""
        self._topic = topic.encode()
        self._now = now
        self._context = zmq.Context()
        self._subscribers = self._context.socket(zmq.XPUB)
        # Also of a topic that another one has subscribed to already.
        self._subscribers.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = self._context.socket(zmq.ROUTER)
        self.port, self.replay_port = (
            _bind(socket, host, number) for socket, number in ((self._subscribers, port), (self._replay, replay_port))
        )
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED)
        self._number = 0
        self._has_missed = threading.Event()
        self._told_at = -_AGAIN_SECONDS
        self._thread = threading.Thread(target=self._run, name="kvtier-kv-events", daemon=True)

    def start(self) -> None:
        """Start to publish."""
        self._thread.start()

    def close(self) -> None:
        """Publish what is queued, and stop."""
        self._queue.put(None)
        self._thread.join(_FULL_SECONDS)
        self._context.destroy(linger=_LINGER_MS)

    def send(self, payload: bytes) -> bool:
        """Queue a message; say whether it will be published."""
        try:
            self._queue.put(payload, timeout=_FULL_SECONDS)
        except queue.Full:
            logger.warning("events of the volume are not taken; everything is told anew later")
            self._has_missed.set()
            return False
        return True

    def wants_all(self) -> bool:
        """Say, once, whether somebody has missed what was told before."""
        if not self._has_missed.is_set() or self._now() - self._told_at < _AGAIN_SECONDS:
            return False
        self._has_missed.clear()
        self._told_at = self._now()
        return True

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._subscribers, self._replay):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._queue.qsize() else _POLL_MS))
            if self._subscribers in ready:
                self._meet()
            if self._replay in ready:
                self._repeat()
            with contextlib.suppress(queue.Empty):
                payload = self._queue.get_nowait()
                if payload is None:
                    return
                self._publish(payload)

    def _publish(self, payload: bytes) -> None:
        self._subscribers.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._buffer.append((self._number, payload))
        self._number += 1

    def _meet(self) -> None:
        wish = self._subscribers.recv()
        if wish[:1] == bytes([_SUBSCRIBED]) and self._topic.startswith(wish[1:]):
            self._has_missed.set()

    def _repeat(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3:  # noqa: PLR2004 - who, nothing, from which number on
            return
        who, _, asked = frames
        first = int.from_bytes(asked, "big")
        if first < self._number and (not self._buffer or first < self._buffer[0][0]):
            self._has_missed.set()
        for number, payload in self._buffer:
            if number >= first:
                self._replay.send_multipart((who, b"", self._topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((who, b"", b"", _END, b""))


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    address = f"[{host}]" if ":" in host else host or "*"
    socket.bind(f"tcp://{address}:{port or '*'}")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
