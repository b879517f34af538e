# SPDX-License-Identifier: Apache-2.0
"""What the operator writes and the pod reads: one JSON document per tier.

Pure and stdlib only: the operator imports this module and nothing else of the connector, so its image needs neither
vLLM nor torch. The document reaches the pod as a file of a ConfigMap; ``secondary_tiers[].config_file`` names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvtier_connector.errors import ConfigInvalid

CONTRACT_VERSION = 1
"""Raised only when a reader of the previous version could misread the document."""

BLOCK_FORMAT_VERSION = 2
"""Format of the block files of this release, see FORMAT.md; part of every generation's identity."""

TENANT_PATTERN = r"[a-z0-9][a-z0-9._-]{0,31}"
"""What a tenant can be called: the name becomes a directory, on file systems of every kind."""
KEY_ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What an encryption key can be called: an entry of a Secret, up to the length that a block's header has room for."""

MOST_IO_THREADS = 256
MOST_IO_PROCESSES = 256

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
    max_bytes: int
    """Stores stop when the blocks of the tier take this many bytes on the volume; 0 means no limit."""
    io_threads: int = 16
    """Threads that read and write block files, per engine."""
    io_processes: int | None = None
    """Processes that move blocks past the engine's interpreter lock: about 20 MB of memory each, a block, and page
    tables. 0 leaves it to the threads; None means as many as there are CPUs, ``io_threads`` at most."""
    load_deadline_seconds: float = 30.0
    """A load that has not finished by then is answered as a miss and recomputed."""

    refresh_seconds: float = 1.0
    """What another pod stored is known here after this long, without asking the volume."""
    rescan_seconds: float = 1800.0
    """How often the whole root is walked, which finds what no pod told of; a million files take half a minute."""
    scan_threads: int = 4
    """Directories that a walk reads at once."""
    direct_io: bool | None = None
    """Whether to bypass the page cache; None asks the volume."""
    live_file: str = ""
    """Path of the mounted file with what may change while engines run, see `encode_live`; empty means ReadWrite for
    ever."""

    def __post_init__(self) -> None:
        """Raise ConfigInvalid naming the first field that cannot be used."""
        checks = (
            (self.root.startswith("/"), "root", "must be an absolute path"),
            (self.digest != "" and self.root.rstrip("/").endswith("/" + self.digest), "digest", "must end root"),
            (self.max_bytes >= 0, "max_bytes", "must be 0 (no limit) or more"),
            (1 <= self.io_threads <= MOST_IO_THREADS, "io_threads", f"must be between 1 and {MOST_IO_THREADS}"),
            (
                self.io_processes is None or 0 <= self.io_processes <= MOST_IO_PROCESSES,
                "io_processes",
                f"must be between 0 (none) and {MOST_IO_PROCESSES}",
            ),
            (self.load_deadline_seconds > 0, "load_deadline_seconds", "must be more than 0"),
            (self.refresh_seconds > 0, "refresh_seconds", "must be more than 0"),
            (self.rescan_seconds > 0, "rescan_seconds", "must be more than 0"),
            (1 <= self.scan_threads <= MOST_IO_THREADS, "scan_threads", f"must be between 1 and {MOST_IO_THREADS}"),
            (self.live_file == "" or self.live_file.startswith("/"), "live_file", "must be an absolute path"),
        )
        for is_valid, field, remedy in checks:
            if not is_valid:
                raise ConfigInvalid(f"{CONFIG_FILE}: {field}={getattr(self, field)!r} {remedy}")


def encode(config: ConnectorConfig) -> str:
    """Return the document as canonical JSON: the same config gives the same bytes."""
    return json.dumps({"version": CONTRACT_VERSION, **asdict(config)}, sort_keys=True, indent=2) + "\n"


def encode_live(mode: str) -> str:
    """Return the live settings as canonical JSON: what engines follow without a restart.

    Args:
        mode: what the volume may be used for: ``ReadWrite``, ``ReadOnly`` or ``Bypass``.
    """
    return json.dumps({"mode": mode}, sort_keys=True, indent=2) + "\n"


def decode(text: str) -> ConnectorConfig:
    """Read a document written by `encode`.

    Raises:
        ConfigInvalid: the text is not JSON, of another contract version, or a field is missing, unknown or unusable.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"{CONFIG_FILE}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigInvalid(f"{CONFIG_FILE}: must be a JSON object, found {type(document).__name__}")
    version = document.pop("version", None)
    if version != CONTRACT_VERSION:
        raise ConfigInvalid(
            f"{CONFIG_FILE}: version {version!r} is not {CONTRACT_VERSION}; "
            "run the connector image of the same release as the operator"
        )
    known = {field.name for field in fields(ConnectorConfig)}
    if unknown := sorted(set(document) - known):
        raise ConfigInvalid(f"{CONFIG_FILE}: unknown field {unknown[0]!r}")
    try:
        return ConnectorConfig(**document)
    except (TypeError, AttributeError) as error:
        raise ConfigInvalid(f"{CONFIG_FILE}: {error}") from error
