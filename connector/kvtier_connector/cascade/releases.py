# SPDX-License-Identifier: Apache-2.0
"""Whether an engine may use the blocks of a generation that engines of another release of vLLM stored.

The first engine of a generation founds it, and all of its release use its blocks. An engine of another release computes
its first prompts whole, loads nothing and stores nothing, and compares what it computed with the blocks of the same
name. Once enough prompts agree, it accepts the generation. A block that differs refuses it, and so do too few blocks to
compare; its release then has a generation of its own, `<digest>.<epoch>`. Either is noted once for the release, in a
file below the root, and later engines of the release follow the note. A block that cannot be read proves nothing.

The scheduler's thread offers copies of what was computed. A thread of its own reads and compares, since the volume may
hang. The thread of the attachment reads what the volume says. A read of `verdict` from any thread is safe.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import mmap
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import vllm
from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier_connector.cascade.attach import CLOSE_WAIT_SECONDS, Attachment
from kvtier_connector.cascade.comparison import LIMITS, Difference, compare
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.contract.engine import ACROSS_VERIFIED, ConnectorConfig
from kvtier_connector.contract.errors import IdentityMismatch, StoreUnavailable
from kvtier_connector.io_workers.buffers import shape_of_rows
from kvtier_connector.store import identity
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss
from kvtier_connector.store.crypto import Keyring
from kvtier_connector.store.fs import FileSystem, list_directory, read_file
from kvtier_connector.store.health import Direction
from kvtier_connector.store.layout import BLOCKS, RELEASES, TENANTS, BlockKey, Home, find_home, home_of
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.fingerprint import Declared

logger = init_logger("vllm.kvtier.releases")

PROMPTS: Final = 3
"""So many prompts must agree."""
MOST_PROMPTS: Final = 256
"""After so many prompts without enough blocks to compare, the release gets a generation of its own."""
SAMPLES_OF_PROMPT: Final = 4
"""Blocks of a prompt that are compared at most."""
_WAITING = 4
"""Copies that wait for the volume at most: memory, and time of the scheduler."""
_MOST_NOTE_BYTES = 1 << 16
_WAIT_SECONDS = 1.0
_ELEMENTS: Final = {each: each for each in LIMITS} | {"fp8": "fp8_e4m3"}
"""By vLLM's name of the KV cache's type, ours."""
_STATES: Final = re.compile("Mamba|Linear|Conv|Delta")
"""Layers whose states are of another type than the KV cache."""
_LABEL = b"kvtier release\0"
_ACCEPTED, _REFUSED = "accepted", "refused"


def release_name(image: str) -> str:
    """Return what stands for the code that computes: the image, if it is known, and the versions in it."""
    versions = f"vLLM {vllm.__version__}, torch {metadata.version('torch')}"
    return f"{image} ({versions})" if image else versions


def own_epoch(release: str) -> str:
    """Return the epoch of a generation that is of one release alone."""
    return f"r{hashlib.sha256(release.encode()).hexdigest()[:15]}"


class Verdict(enum.IntEnum):
    """Permitted use of the generation by an engine; the numbers are the metric's."""

    ACCEPTED = 0
    """Its blocks are of this release, or as good."""
    COMPARING = 1
    REFUSED = 2
    """The engine uses a generation of its release's own."""


class _Sample(NamedTuple):
    prompt: str
    key: BlockKey
    computed: bytes


class ReleaseGate:
    """See the module."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        root: Path,
        release: str,
        *,
        element: str | None,
        fs: FileSystem,
        store: BlockStore,
        keyring: Keyring | None,
    ) -> None:
        """Store the settings; `read_volume` decides, or begins to compare.

        Args:
            root: Directory of the generation.
            release: As `release_name` returns it.
            element: Type of the KV cache; None if blocks of this engine cannot be compared.
            fs: The system calls.
            store: The blocks of the generation, for the thread of the comparison alone.
            keyring: Authenticates the notes where blocks are encrypted.
        """
        self.release, self._root, self._element = release, root, element
        self._fs, self._store, self._keyring = fs.rooted(str(root)), store, keyring
        self._home = home_of(str(root))
        self.home = Home(self._home.digest, own_epoch(release))
        """The generation of the release's own."""
        self._note = f"{root}/{RELEASES}/{self.home.epoch}.json"
        self._founder = f"{root}/{RELEASES}/founder.json"
        self.verdict = Verdict.COMPARING
        self.reason = ""
        """The difference, once the generation is refused."""
        self._was_accepted = False
        self._founded = b""
        """The founder's note as it was before the verdict."""
        self._lock = threading.Lock()
        """Held while the verdict is set: two threads may learn it."""
        self._samples: queue.Queue[_Sample] = queue.Queue(_WAITING)
        self._offered: Counter[str] = Counter()
        """By prompt, of the scheduler's thread."""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._seen: set[str] = set()
        """Prompts that were looked for on the volume; this and the next two are of the thread of the comparison."""
        self._agreed: set[str] = set()
        self._blocks, self._error = 0, 0.0

    @property
    def is_comparing(self) -> bool:
        """Whether no block is loaded or stored until it is decided."""
        return self.verdict is Verdict.COMPARING

    def found(self) -> None:
        """Note that this release founds the generation, unless blocks may be of others, or another release was faster.

        Raises:
            StoreUnavailable: the volume cannot be used now.
        """
        try:
            is_ours = self._read(self._founder) is None and (self._was_accepted or not self._has_blocks())
            if is_ours and identity.write_once(self._fs, self._founder, self._sealed({"release": self.release})):
                # The last of several releases holds, once all have written.
                time.sleep(_WAIT_SECONDS)
        except OSError as error:
            raise StoreUnavailable(f"{self._founder}: cannot be written: {error}") from error

    def _has_blocks(self) -> bool:
        """Return whether there are directories of blocks; raise StoreUnavailable where the volume does not say."""
        try:
            return not {BLOCKS, TENANTS}.isdisjoint(each.name for each in list_directory(self._fs, str(self._root)))
        except OSError as error:
            raise StoreUnavailable(f"{self._root}: cannot be listed: {error}") from error

    def read_volume(self) -> None:
        """Take in what the volume says of the generation, and begin to compare where that decides nothing.

        Raises:
            IdentityMismatch: the directory was made anew by another release while this engine used it.
            StoreUnavailable: the volume cannot be used now.
        """
        founder, note = self._read(self._founder), None
        is_ours = founder is not None and founder["release"] == self.release
        if not is_ours:
            note = self._read_note()
        text = self._text(self._founder)
        if not self._was_accepted:
            self._note_founder(text)
        if is_ours or (note is not None and note["verdict"] == _ACCEPTED):
            self._set_verdict(Verdict.ACCEPTED, str(note["why"]) if note else "")
            return
        if self._was_accepted and note is None and text and text == self._founded:
            # The note was lost, or a key that sealed a note was removed.
            self._decide(_ACCEPTED, "an engine of this release compared them before")
            return
        if self._was_accepted:
            raise IdentityMismatch(
                f"{self._root}: was made anew by another release of vLLM: restart the engine, which compares the "
                "blocks with its own then",
                field="founder",
            )
        if note is not None:
            self._set_verdict(Verdict.REFUSED, str(note["why"]))
            return
        other = "an unknown release" if founder is None else founder["release"]
        if self._element not in LIMITS:
            self.refuse(f"blocks of this model are not compared with those of {other}")
        elif not self._has_blocks():
            self.refuse(f"{other} has stored no blocks to compare")
        elif self._thread is None:
            logger.warning(
                "%s holds blocks of %s, and this engine is %s: it loads and stores nothing until %d prompts that it "
                "computes agree with them",
                self._root,
                other,
                self.release,
                PROMPTS,
            )
            self._thread = threading.Thread(target=self._run, name="kvtier-releases", daemon=True)
            self._thread.start()

    def _note_founder(self, text: bytes) -> None:
        if self._founded and text != self._founded:
            # Agreement with blocks of a directory that is gone says nothing about these.
            self._agreed.clear()
            self._seen.clear()
        self._founded = text

    def refuse_facts(self, error: IdentityMismatch) -> bool:
        """Refuse a generation whose engines say other things of themselves; False if they are of this release.

        Raises:
            StoreUnavailable: the volume cannot be used now.
        """
        founder = self._read(self._founder)
        is_ours = founder is not None and founder["release"] == self.release
        if is_ours or self._was_accepted or not error.field.startswith("engine."):
            return False
        self.refuse(f"its engines have another {error.field}, see {self._root}/tier.json")
        return True

    def follow_note(self) -> None:
        """Follow the note that an engine of this release left, if there is one.

        Raises:
            StoreUnavailable: it cannot be read.
        """
        if self.is_comparing and (note := self._read_note()) is not None:
            self._set_verdict(_verdict_of(note), str(note["why"]))

    def refuse(self, reason: str) -> None:
        """Begin a generation of the release's own."""
        self._decide(_REFUSED, reason)

    def offer(self, prompt: str, key: BlockKey, row: memoryview) -> None:
        """Copy a computed chunk to be compared, unless enough wait. The scheduler's thread."""
        if self.is_comparing and self._offered[prompt] < SAMPLES_OF_PROMPT and not self._samples.full():
            if len(self._offered) > MOST_PROMPTS:
                self._offered.clear()
            self._offered[prompt] += 1
            self._samples.put(_Sample(prompt, key, bytes(row)))

    def close(self) -> None:
        """End the comparison; a thread that the volume holds up is left behind."""
        self._closed.set()

    def _run(self) -> None:
        while self.is_comparing and not self._closed.is_set():
            try:
                self._take(self._samples.get(timeout=_WAIT_SECONDS))
            except queue.Empty:
                continue
            except Exception:
                # The edge of the thread: this block proves nothing.
                logger.exception("A block could not be compared")

    def _take(self, sample: _Sample) -> None:
        buffer = memoryview(mmap.mmap(-1, len(sample.computed)))
        answer = self._store.get(sample.key, buffer)
        if isinstance(answer, Hit):
            self._judge(sample, compare(memoryview(sample.computed), buffer, self._element or ""))
        elif isinstance(answer, Miss):
            self._seen.add(sample.prompt)
        if self.is_comparing and len(self._seen) >= MOST_PROMPTS:
            self.refuse(f"of {len(self._seen)} prompts only {len(self._agreed)} had blocks to compare")

    def _judge(self, sample: _Sample, found: Difference) -> None:
        self._blocks += 1
        self._error = max(self._error, found.error)
        limit = LIMITS[self._element or ""]
        if found.parts:
            self.refuse(
                f"block {sample.key.hash.hex()[:16]} differs in {found.parts} of {found.of_parts} parts, by up to "
                f"{found.error:.1%} (rounding: up to {limit:.0%})"
            )
            return
        self._seen.add(sample.prompt)
        self._agreed.add(sample.prompt)
        if len(self._agreed) >= PROMPTS:
            self._decide(
                _ACCEPTED,
                f"{self._blocks} blocks of {len(self._agreed)} prompts agree, to {self._error:.2%} (rounding: up to "
                f"{limit:.0%})",
            )

    def _decide(self, word: str, why: str) -> None:
        """Note a verdict, unless an engine of this release was faster; the note holds then."""
        note: Mapping[str, Any] = {"release": self.release, "verdict": word, "why": why}
        try:
            identity.write_once(self._fs, self._note, self._sealed(note))
            if self._read_note() is None:
                # It was sealed with a key that is gone, or by a stranger.
                identity.write_once(self._fs, self._note, self._sealed(note), is_replacing=True)
            note = self._read_note() or note
        except (OSError, StoreUnavailable) as error:
            logger.warning("%s: the verdict about %s cannot be noted: %s", self._root, self.release, error)
        self._set_verdict(_verdict_of(note), str(note["why"]))

    def _set_verdict(self, verdict: Verdict, why: str = "") -> None:
        with self._lock:
            if not self.is_comparing:
                return
            self.verdict = verdict
            self._was_accepted = self._was_accepted or verdict is Verdict.ACCEPTED
        if verdict is Verdict.REFUSED:
            self.reason = why
            logger.error(
                "%s: its blocks are not those of %s: %s. Engines of this release use %s",
                self._root,
                self.release,
                why,
                self.home,
            )
        elif why:
            logger.info("%s: its blocks are those of %s: %s", self._root, self.release, why)

    def _read_note(self) -> dict[str, Any] | None:
        note = self._read(self._note)
        is_whole = note is not None and note["release"] == self.release and {"verdict", "why"} <= note.keys()
        return note if is_whole else None

    def _read(self, path: str) -> dict[str, Any] | None:
        """Return what a note says; None if there is none, or it is not believed.

        Where blocks are encrypted, its writer had a key of them. Without encryption any writer of the volume could have
        written blocks as well.
        """
        try:
            note = json.loads(self._text(path))
        except (ValueError, RecursionError):
            return None
        if not isinstance(note, dict) or not isinstance(note.get("release"), str):
            return None
        if self._keyring is None:
            return note
        key = self._keyring.find(str(note.get("key")))
        fields = {name: value for name, value in note.items() if name != "seal"}
        seal = str(note.get("seal")).encode("utf-8", "replace")
        is_sealed = key is not None and hmac.compare_digest(seal, self._seal(fields, key.secret).encode())
        return note if is_sealed else None

    def _text(self, path: str) -> bytes:
        """Return what a file holds; nothing if there is none."""
        try:
            return read_file(self._fs, path, most_bytes=_MOST_NOTE_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise StoreUnavailable(f"{path}: cannot be read: {error}") from error

    def _sealed(self, fields: Mapping[str, Any]) -> str:
        """Return the text of a note, authenticated with the active key where blocks are encrypted."""
        if self._keyring is not None:
            if (key := self._keyring.active()) is None:
                raise StoreUnavailable("no key is active yet, and a note without a seal is not believed")
            named = {**fields, "key": key.name}
            fields = {**named, "seal": self._seal(named, key.secret)}
        return json.dumps(fields, sort_keys=True) + "\n"

    def _seal(self, fields: Mapping[str, Any], secret: bytes) -> str:
        """Authenticate fields together with the generation that they are about."""
        text = json.dumps([str(self._home), fields], sort_keys=True).encode()
        return hmac.new(secret, _LABEL + text, hashlib.sha256).hexdigest()


def _verdict_of(note: Mapping[str, Any]) -> Verdict:
    return Verdict.ACCEPTED if note["verdict"] == _ACCEPTED else Verdict.REFUSED


class ReleasedAttachment(Attachment):
    """An attachment whose directory may hold blocks of another release; see the module.

    Nothing is loaded or stored while a `ReleaseGate` compares. Where it refuses, the thread of the attachment asks the
    scheduler's thread to prepare for the release's own directory, and claims that.
    """

    def __init__(self, config: ConnectorConfig, **settings: Any) -> None:
        """Store the settings, which are those of `Attachment`."""
        super().__init__(config, **settings)
        self.gate: ReleaseGate | None = None
        """None before the engine knows what it is, and where no other engine uses its blocks."""
        self._is_moving, self._has_moved = False, threading.Event()
        """Whether the other directory is to be used, and whether the scheduler's thread has prepared for it."""

    @property
    def is_comparing(self) -> bool:
        """Whether no block is loaded or stored until it is decided."""
        return self.gate is not None and self.gate.is_comparing

    @override
    def open(self, spec: OffloadingSpec, declared: Sequence[Declared], wait_seconds: float) -> None:
        super().open(spec, declared, wait_seconds)
        self.look_after()

    def _make_gate(self) -> ReleaseGate:
        config, facts = self._config, self._facts
        # A chunk of one of several groups fills a part of its row, and the rest holds what was there before.
        is_one_kind = len(facts["engine.groups"]) == 1 and not _STATES.search(" ".join(facts["engine.backends"]))
        return ReleaseGate(
            Path(config.root),
            release_name(self._image),
            element=_ELEMENTS.get(facts["engine.kv_dtype"]) if is_one_kind else None,
            fs=self._fs,
            store=BlockStore(
                Path(config.root), fs=self._fs.rooted(config.root), direct=config.direct_io, keys_dir=config.keys_dir
            ),
            keyring=self.keyring,
        )

    def offer(self, request: TierRequest, order: TransferJob) -> None:
        """Have chunks from everywhere in what was computed compared. The scheduler's thread."""
        if self.gate is None or not (self.gate.is_comparing and self.is_current) or request.refusal is not None:
            return
        rows, size = self._rows.cast("B"), shape_of_rows(self._rows)[1]
        chunks = list(zip(order.keys, order.chunk_ids.tolist(), strict=True))
        for key, row in {chunks[0], chunks[len(chunks) // 2], chunks[-1]} if chunks else ():
            self.gate.offer(request.name, request.block_key(key), rows[row * size : (row + 1) * size])

    @override
    def why_not(self, direction: Direction, *, is_stuck: bool) -> str | None:
        cause = super().why_not(direction, is_stuck=is_stuck)
        return metrics.UNVERIFIED if cause is None and (self.is_comparing or self._is_refused) else cause

    @override
    def look_after(self) -> None:
        if self._is_moving and self.gate is not None:
            # Nothing was read or written in the first directory.
            self._is_moving, self._generation = False, ""
            # They may hang in the volume, which the engine must not wait for.
            for close in (self.lookups.close, partial(self.workers.close, CLOSE_WAIT_SECONDS)):
                threading.Thread(target=close, name="kvtier-close", daemon=True).start()
            config, name = self._config, str(self.gate.home)
            self._prepare(replace(config, digest=name, root=f"{config.root.rstrip('/').rpartition('/')[0]}/{name}"))
            self._permit.is_needed = self._live_file.settings.needs_permit
            self.workers.start()
            self.lookups.start()
            self._has_moved.set()
        super().look_after()

    @override
    def observe(self) -> None:
        super().observe()
        if self.gate is not None:
            self._stats.set(metrics.RELEASE, self.gate.verdict)
        if self.is_comparing or self._is_refused:
            self._stats.set(metrics.ACTIVE, 0)

    @override
    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()
        super().close()

    @override
    def _look(self) -> None:
        if self.gate is not None and self.gate.is_comparing:
            with contextlib.suppress(StoreUnavailable):
                self.gate.follow_note()
        if self._is_refused:
            self._attach()
        super()._look()

    @property
    def _is_refused(self) -> bool:
        """Whether the directory is not for this release, and its own is not used yet."""
        return self.gate is not None and self.gate.verdict is Verdict.REFUSED and not self._has_moved.is_set()

    @override
    def _claim_root(self) -> bool:
        if find_home(self._config.digest) != Home(self._config.digest):
            # No engine of another release uses it.
            return super()._claim_root()
        self.gate = self.gate or self._make_gate()
        is_new = False
        if not self._is_refused:
            try:
                self.gate.found()
                is_new = super()._claim_root()
                self.gate.read_volume()
            except IdentityMismatch as error:
                if not self.gate.refuse_facts(error):
                    raise
        if self._is_refused:
            self._ask_to_move()
            return super()._claim_root()
        return is_new

    def _ask_to_move(self) -> None:
        """Wait until the scheduler's thread is prepared for the directory of this release; raise if the engine ends."""
        self.is_readable, self.refusal = False, "its release of vLLM gets a generation of its own"
        self._is_moving = True
        self._decided.set()
        while not self._has_moved.wait(_WAIT_SECONDS):
            if self._closed.is_set():
                raise StoreUnavailable(self.refusal)
        config = self._config
        self._claim = identity.RootClaim(
            Path(config.root), {**config.identity, **self._facts}, config.digest, fs=self._fs
        )


def attachment_class(config: ConnectorConfig) -> type[Attachment]:
    """Return the kind of attachment for these settings."""
    return ReleasedAttachment if config.across_releases == ACROSS_VERIFIED else Attachment
