# SPDX-License-Identifier: Apache-2.0
"""The document that the operator writes for the janitor of a tier, as JSON, read again whenever the file changes.

Pure and stdlib only, as the engines' contract is, so that the operator may import it. All sizes are bytes, all times
seconds. The document reaches the janitor as a file of a ConfigMap that is mounted as a directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_connector.contract import documents

JANITOR_CONTRACT_VERSION = 1
"""Raised only when a reader of the previous version could misread the document."""

JANITOR_CONFIG_FILE = "janitor.json"
"""Key of the document in the ConfigMap, and the name of the file in the pod."""

JANITOR_PORT = 9400
"""Where /metrics, /healthz and /usage are served."""

BLOCKS_LAYOUT = "kvtier"
"""Layout of kvtier's own connector."""

VLLM_FS_LAYOUT = "vllm-fs"
"""Layout of vLLM's own fs tier."""

FIXED_FIELDS = (
    "tier", "tier_dir", "lease_name", "lease_namespace", "identity", "http_port", "threads", "events_port",
    "events_topic", "events_integer_hashes", "block_tokens", "layout",
)  # fmt: skip
"""A change of one of these is honoured by a new process; every other field is honoured by the running one."""

_MOST_THREADS = 64
_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class JanitorConfig:
    """Settings of the janitor of one ``KVCacheTier``."""

    tier: str
    """``<namespace>/<name>`` of the KVCacheTier; for messages and metrics only."""
    tier_dir: str
    """Absolute directory of all generations of the tier: ``<mount>/<path>/<namespace>.<name>``."""
    current: str
    """Digest of the generation that the engines use, or are about to use; never removed."""

    max_bytes: int = 0
    """Limit of all generations of the tier together on the volume; 0 means no limit."""
    high_watermark: float = 0.90
    """Share of ``max_bytes``, or of a tenant's quota, above which blocks are evicted."""
    low_watermark: float = 0.75
    """Share of ``max_bytes``, or of a tenant's quota, down to which they are evicted."""
    min_free_fraction: float = 0.0
    """Share of the file system that shall stay free; 0 leaves that to others."""
    min_free_bytes: int = 0
    """Bytes of the file system that shall stay free; with a fraction too, the larger of the two counts."""
    min_bytes: int = 0
    """Blocks of the tier are not evicted below this for the file system's sake; the tier's own budget counts alone."""
    ttl_seconds: float | None = None
    """Blocks older than this are removed, however often they are read; None keeps them until room is needed."""
    keep_previous: int = 1
    """Previous generations that stay, for a rollback."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """By tenant, what its blocks may take."""
    default_quota_bytes: int = 0
    """Quota of each tenant that ``quotas`` does not name; 0 means no limit."""

    partial_age_seconds: float = 3600.0
    """A partial file not written to for so long has no writer any more."""
    quarantine_age_seconds: float = 7 * 86_400.0
    """How long a damaged file is kept for a person to look at."""
    journal_age_seconds: float = 86_400.0
    """A journal not written to for so long has no writer any more."""
    generation_idle_seconds: float = 3600.0
    """A generation of whose journals one was written to, or its time renewed, within this time is in use, and is not
    removed. Engines that are there renew theirs every ten minutes."""
    sweep_seconds: float = 5.0
    """How often journals are read and the budget is compared."""
    verify_seconds: float = 3600.0
    """Every directory of blocks is listed once in this time, which finds what no journal tells of."""

    lease_name: str = ""
    """Name of the Lease by which one janitor is active at a time; empty runs alone."""
    lease_namespace: str = ""
    """Namespace of the Lease."""
    identity: str = ""
    """Holder of the Lease; empty takes the host's name, which is the pod's."""
    http_port: int = JANITOR_PORT
    """Port of /metrics, /healthz and /usage; 0 takes any that is free."""
    events_port: int = field(default=-1, metadata=documents.ADDED)
    """Where KV events of the volume are published (ZeroMQ, as vLLM's); 0 takes any that is free, -1 publishes none."""
    events_topic: str = field(default="", metadata=documents.ADDED)
    """Their topic."""
    events_integer_hashes: bool = field(default=True, metadata=documents.ADDED)
    """Whether a hash in them is a number of 64 bits, as vLLM's by default, and not all its bytes."""
    block_tokens: int = field(default=0, metadata=documents.ADDED)
    """Tokens of one file, for the events; 0 where that is not known."""
    layout: str = field(default=BLOCKS_LAYOUT, metadata=documents.ADDED)
    """How the files of the tier lie: ``kvtier``, or ``vllm-fs`` for those of vLLM's own fs tier."""
    threads: int = 8
    """Files that are removed or looked at at once, since a network volume answers each after a while."""

    def __post_init__(self) -> None:
        """Raise ConfigInvalid naming the first field that cannot be used."""
        claims = (
            (self.tier_dir.startswith("/"), "tier_dir", "must be an absolute path"),
            (_is_name(self.current), "current", "must be a generation digest: one path component"),
            (self.max_bytes >= 0, "max_bytes", "must be 0 (no limit) or more"),
            (0 < self.high_watermark <= 1, "high_watermark", "must be more than 0 and at most 1"),
            (0 < self.low_watermark <= 1, "low_watermark", "must be more than 0 and at most 1"),
            (
                self.low_watermark < self.high_watermark,
                "low_watermark",
                f"must be below high_watermark={self.high_watermark!r}",
            ),
            (0 <= self.min_free_fraction < 1, "min_free_fraction", "must be 0 or more and below 1"),
            *((getattr(self, name) >= 0, name, "must be 0 or more") for name in _ZERO_OR_MORE),
            (
                self.max_bytes == 0 or self.min_bytes <= self.max_bytes,
                "min_bytes",
                f"must not exceed max_bytes={self.max_bytes!r}",
            ),
            (
                self.ttl_seconds is None or self.ttl_seconds > 0,
                "ttl_seconds",
                "must be more than 0; leave it out to keep blocks until room is needed",
            ),
            (all(quota > 0 for quota in self.quotas.values()), "quotas", "must all be more than 0"),
            (self.default_quota_bytes >= 0, "default_quota_bytes", "must be 0 (no limit) or more"),
            *((getattr(self, name) > 0, name, "must be more than 0") for name in _DURATIONS),
            *(
                (math.isfinite(1e9 * (getattr(self, name) or 0)), name, "must be finite, also in nanoseconds")
                for name in (*_DURATIONS, "ttl_seconds")
            ),
            (self.lease_name == "" or self.lease_namespace != "", "lease_namespace", "must be set where lease_name is"),
            (0 <= self.http_port <= _MOST_PORT, "http_port", f"must be between 0 and {_MOST_PORT}"),
            (-1 <= self.events_port <= _MOST_PORT, "events_port", f"must be between -1 and {_MOST_PORT}"),
            (self.layout in {BLOCKS_LAYOUT, VLLM_FS_LAYOUT}, "layout", f"must be {BLOCKS_LAYOUT} or {VLLM_FS_LAYOUT}"),
            (1 <= self.threads <= _MOST_THREADS, "threads", f"must be between 1 and {_MOST_THREADS}"),
        )
        documents.refuse_unusable(self, claims, file=JANITOR_CONFIG_FILE)


_ZERO_OR_MORE = ("min_free_bytes", "min_bytes", "keep_previous", "block_tokens")
_DURATIONS = (
    "partial_age_seconds",
    "quarantine_age_seconds",
    "journal_age_seconds",
    "generation_idle_seconds",
    "sweep_seconds",
    "verify_seconds",
)


def _is_name(text: str) -> bool:
    return text not in {"", ".", ".."} and "/" not in text and "\0" not in text


def encode(config: JanitorConfig) -> str:
    """Return the document as canonical JSON: the same config gives the same bytes."""
    return documents.encode(config, version=JANITOR_CONTRACT_VERSION)


def decode(text: str) -> JanitorConfig:
    """Read a document written by `encode`.

    Raises:
        ConfigInvalid: the text is not JSON, of another contract version, or a field is missing, unknown or unusable.
    """
    return documents.decode(
        JanitorConfig, text, file=JANITOR_CONFIG_FILE, version=JANITOR_CONTRACT_VERSION, image="janitor"
    )
