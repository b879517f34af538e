# SPDX-License-Identifier: Apache-2.0
"""The document that the operator writes for the engines of a tier, as JSON in a ConfigMap.

Pure and stdlib only: the operator imports this module and nothing else of the connector, so its image needs neither
vLLM nor torch. The document reaches the pod as a file of a ConfigMap; ``secondary_tiers[].config_file`` names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_connector.contract import documents
from kvtier_connector.contract.errors import ConfigInvalid

CONTRACT_VERSION = 1
"""Raised only when a reader of the previous version could misread the document."""

BLOCK_FORMAT_VERSION = 4
"""Format of the block files of this release, see FORMAT.md; part of every generation's identity."""

GENERATION_PATTERN = r"[A-Za-z0-9_-]{1,64}"
"""Form of a generation's digest, which names its directory and stands in each of its blocks."""
REPLACED_WEIGHTS = "replaced weights"
"""Label of ``vllm:kvtier_disk_refused`` while an engine's weights are not those that it started with."""
EPOCH_PATTERN = r"[a-z0-9]{1,32}"
"""Form of the name of other weights than the model's own: it follows the digest and a dot in a directory's name."""
TENANT_PATTERN = r"[a-z0-9][a-z0-9._-]{0,31}"
"""Form of a tenant's name, which becomes a directory, on file systems of every kind."""
KEY_ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Form of an encryption key's name: an entry of a Secret, up to the length that a block's header has room for."""

KEY_BYTES = 32
"""Length of an encryption key, AES-256; a file of the mounted Secret holds it raw, as 64 hex digits or in base64."""

MODES = ("ReadWrite", "ReadOnly", "Bypass")
"""Permitted uses of the volume, the strictest last."""

COMPRESSION_OFF, COMPRESSION_ALWAYS = "Off", "Always"
COMPRESSIONS = (COMPRESSION_OFF, "Auto", COMPRESSION_ALWAYS)
"""Whether blocks are written compressed: never, where the volume is slower than processors, or where it saves any."""

ACROSS_RELEASES = (ACROSS_NEVER, ACROSS_VERIFIED) = ("Never", "Verified")
"""Whether engines use blocks of another release of vLLM: never, or once computed blocks agree with them."""

TENANT_SOURCES = ("None", "CacheSalt", "Parameter")
"""Where a request's tenant comes from: nowhere, its ``cache_salt``, or its ``kv_transfer_params``."""
TENANT_PARAMETER = "kvtier_tenant"
"""The entry of a request's ``kv_transfer_params`` that names its tenant."""

LMCACHE_PLUGIN = "kvtier"
"""Under this name LMCache's configuration has a client of Redis of ours."""
LMCACHE_URL_SETTING = f"remote_storage_plugin.{LMCACHE_PLUGIN}.url"
"""Entry of LMCache's extra configuration with the address of its Redis, without a password."""
REDIS_PASSWORD_VARIABLE = "LMCACHE_RESP_PASSWORD"  # noqa: S105  the name of a variable, not a password

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""Releases of vLLM that the connector works with, oldest first; see `vllm_release`."""

MOST_IO_PROCESSES = 256
MOST_DEFAULT_IO_PROCESSES = 16
"""Most worker processes of an engine whose ``io_processes`` is null."""
MOST_REUSE = 100

MOST_MAPPED_BYTES = 16 << 30
"""Bytes of the CPU tier that a worker process keeps mapped at most, since page tables take memory, too."""
_WORKER_BASE_BYTES = 40 << 20
"""Memory of a worker process for the interpreter and its modules."""

_WORKER_CODEC_BYTES = 24 << 20
"""Memory of a worker process for numpy and the codec's tables and buffers."""

CONFIG_FILE = "connector.json"
"""Key of the document in the ConfigMap, and the name of the file in the pod."""

LIVE_FILE = "live.json"
"""Key of the live settings in the same ConfigMap, and the name of the file in the pod."""


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Settings of one shared-volume tier, the same in every pod of a ``KVCacheTier``."""

    tier: str
    """``<namespace>/<name>`` of the KVCacheTier; for messages only."""
    root: str
    """Absolute directory of this generation inside the pod: ``<mount>/<path>/<tier>/<digest>``."""
    digest: str
    """Generation digest: lower-case hex, the last component of ``root``."""
    identity: Mapping[str, Any]
    """The fields that ``digest`` was computed from; written to ``tier.json`` and compared at every start."""
    io_processes: int | None = None
    """Worker processes that read and write blocks; each takes about 20 MB of memory, a block, and page tables. None
    means one for each CPU, and up to 16 where the volume answers slowly."""
    load_deadline_seconds: float = 30.0
    """A load that has not finished by then is answered as a miss and recomputed."""

    refresh_seconds: float = 1.0
    """Least delay between two looks at the directory, the store permit and the live settings, in seconds."""
    direct_io: bool | None = None
    """Whether to bypass the page cache; None asks the volume."""
    keys_dir: str = ""
    """Directory of the mounted Secret whose entries are encryption keys; empty means no encryption. Blocks that are not
    encrypted are then neither written nor read."""
    compression: str = field(default=COMPRESSION_OFF, metadata=documents.ADDED)
    """One of `COMPRESSIONS`, of what is written."""
    across_releases: str = field(default=ACROSS_NEVER, metadata=documents.ADDED)
    """One of `ACROSS_RELEASES`; with ``Never``, the identity must tell releases apart."""
    tenant_from: str = "None"
    """One of `TENANT_SOURCES`."""
    live_file: str = ""
    """Path of the mounted file with what may change while engines run, see `encode_live`. Empty: ReadWrite."""
    state_dir: str = ""
    """Directory of the pod where an engine tells its startup probe whether it serves with the volume, or empty."""
    attach_grace_seconds: float = 60.0
    """A volume that has not answered for so long since it was first asked holds no engine back any longer."""

    min_tokens: int = 0
    """Hits of fewer tokens are computed; 0 is no such limit."""
    min_reuse: int = 1
    """A block is written once so many requests have asked for it; 1 writes every block."""

    def __post_init__(self) -> None:
        """Raise ConfigInvalid naming the first field that cannot be used."""
        claims = (
            (self.root.startswith("/"), "root", "must be an absolute path"),
            (
                re.fullmatch(rf"{GENERATION_PATTERN}(\.{EPOCH_PATTERN})?", self.digest, re.ASCII) is not None,
                "digest",
                f"must match {GENERATION_PATTERN}",
            ),
            (self.root.rstrip("/").endswith("/" + self.digest), "digest", "must end root"),
            (
                self.io_processes is None or 1 <= self.io_processes <= MOST_IO_PROCESSES,
                "io_processes",
                f"must be between 1 and {MOST_IO_PROCESSES}, or null",
            ),
            (self.load_deadline_seconds > 0, "load_deadline_seconds", "must be more than 0"),
            (self.refresh_seconds > 0, "refresh_seconds", "must be more than 0"),
            (self.keys_dir == "" or self.keys_dir.startswith("/"), "keys_dir", "must be an absolute path"),
            (self.compression in COMPRESSIONS, "compression", f"must be one of {', '.join(COMPRESSIONS)}"),
            (self.across_releases in ACROSS_RELEASES, "across_releases", "must be Never or Verified"),
            (self.tenant_from in TENANT_SOURCES, "tenant_from", f"must be one of {', '.join(TENANT_SOURCES)}"),
            (self.min_tokens >= 0, "min_tokens", "must be 0 (no limit) or more"),
            (1 <= self.min_reuse <= MOST_REUSE, "min_reuse", f"must be between 1 and {MOST_REUSE}"),
            (self.live_file == "" or self.live_file.startswith("/"), "live_file", "must be an absolute path"),
            (self.state_dir == "" or self.state_dir.startswith("/"), "state_dir", "must be an absolute path"),
            (self.attach_grace_seconds > 0, "attach_grace_seconds", "must be more than 0"),
        )
        documents.refuse_unusable(self, claims, file=CONFIG_FILE)


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """Settings that engines follow while they run; no digest of a pod template contains them."""

    mode: str = "ReadWrite"
    """Permitted use of the volume: ``ReadWrite``, ``ReadOnly`` or ``Bypass``."""
    needs_permit: bool = False
    """Whether blocks are stored only while the janitor permits it, as where the tier has a janitor."""
    active_key: str = ""
    """Entry of ``keys_dir`` with which blocks are encrypted from now on. Without one, nothing is stored."""


def vllm_release(version: str) -> str | None:
    """Return the release, ``0.33.0``, of a version of vLLM or of a tag of its image; None if it names none.

    ``0.33.0+cpu`` and ``v0.33.0-x86_64`` are builds of 0.33.0; ``0.33.0rc1`` and ``0.33.1`` are other releases;
    ``latest`` and ``nightly-0.33`` name none.
    """
    found = re.match(r"v?([0-9]+\.[0-9]+\.[0-9]+(?:\.?[a-z]+[0-9]+)*)(?:$|[+-])", version)
    return found and found[1]


def worker_memory_bytes(cpu_bytes: int, *, workers: int, chunk_bytes: int, compresses: bool = False) -> int:
    """Return the most memory that the worker processes of one engine take besides the CPU tier itself.

    Each process has a buffer for one row of the CPU tier, a chunk; compressing takes another, and numpy. A page of
    /dev/shm, of 4 KiB unless it is a huge one, takes eight bytes of page tables.
    """
    tables = -(-min(cpu_bytes, MOST_MAPPED_BYTES) // 4096) * 8
    packing = chunk_bytes + _WORKER_CODEC_BYTES if compresses else 0
    return workers * (_WORKER_BASE_BYTES + chunk_bytes + tables + packing)


def encode(config: ConnectorConfig) -> str:
    """Return the document as canonical JSON: the same config gives the same bytes."""
    return documents.encode(config, version=CONTRACT_VERSION)


def encode_live(mode: str, *, active_key: str = "", needs_permit: bool = False) -> str:
    """Return `LiveSettings` as canonical JSON: what engines follow without a restart."""
    said = {"active_key": active_key, "needs_permit": needs_permit}
    return documents.encode_object({"mode": mode, **{name: value for name, value in said.items() if value}})


def decode_live(text: str) -> LiveSettings:
    """Read the live settings; fields of a later release are ignored, since an operator is upgraded before its engines.

    Raises:
        ConfigInvalid: the text is not JSON, or a field cannot be used.
    """
    document = documents.decode_object(text, file=LIVE_FILE)
    mode = document.get("mode")
    active_key, needs_permit = document.get("active_key", ""), document.get("needs_permit", False)
    if mode not in MODES:
        raise ConfigInvalid(f"{LIVE_FILE}: mode={mode!r} must be one of {', '.join(MODES)}")
    if active_key != "" and not (isinstance(active_key, str) and re.fullmatch(KEY_ID_PATTERN, active_key, re.ASCII)):
        raise ConfigInvalid(f"{LIVE_FILE}: active_key={active_key!r} must match {KEY_ID_PATTERN}")
    if not isinstance(needs_permit, bool):
        raise ConfigInvalid(f"{LIVE_FILE}: needs_permit={needs_permit!r} must be true or false")
    return LiveSettings(mode=mode, active_key=active_key, needs_permit=needs_permit)


def decode(text: str) -> ConnectorConfig:
    """Read a document written by `encode`.

    Raises:
        ConfigInvalid: the text is not JSON, of another contract version, or a field is missing, unknown or unusable.
    """
    return documents.decode(ConnectorConfig, text, file=CONFIG_FILE, version=CONTRACT_VERSION, image="connector")
