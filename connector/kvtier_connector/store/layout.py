# SPDX-License-Identifier: Apache-2.0
"""Where things lie under the root of a tier: a block's key gives its path, and the path gives the key back.

Pure: names only, nothing is read or written. Paths are relative to the root and use forward slashes.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import NamedTuple

from kvtier_connector.contract.engine import EPOCH_PATTERN, GENERATION_PATTERN, KEY_ID_PATTERN, TENANT_PATTERN

ALIGNMENT = 4096
"""Size of a file's header, and what O_DIRECT needs of a buffer's address and of a payload's length."""
BLOCKS = "blocks"
"""Directory of the block files."""
QUARANTINE = "quarantine"
"""Directory of the block files that failed verification, kept for a person to look at until they are removed."""
TENANTS = "tenants"
"""Directory of the tenants' own trees, each with blocks and a quarantine of its own."""
JOURNAL = "journal"
"""Directory of the journals, in which processes tell each other what they did."""
TIER_FILE = "tier.json"
"""The file at the root that says whose blocks these are."""
PURGES_FILE = "purges.jsonl"
"""The file at the root that tells writers what was purged."""
RELEASES = "releases"
"""Directory of verdicts about the blocks, one of each release of vLLM that compared them with its own."""
BESIDE_GENERATIONS = frozenset({"permit.json", "volume.json", "janitor.catalog"})
"""Files that kvtier keeps beside the generations of a tier."""

MIN_HASH_BYTES = 3
"""Shorter hashes could not name a directory; no hash algorithm in use is anywhere near."""
MAX_HASH_BYTES = 32
"""The header and the records have room for this much, which is SHA-256: vLLM has no longer hash."""
MAX_GROUP = 2**32 - 1
MAX_POSITION = 2**31 - 1
MAX_TENANT_CHARACTERS = 32
MAX_KEY_ID_CHARACTERS = 64
MAX_DIGEST_CHARACTERS = 64
MAX_EPOCH_CHARACTERS = 32
ADAPTER_CHARACTERS = 32

_TENANT = re.compile(TENANT_PATTERN, re.ASCII)
_KEY_ID = re.compile(KEY_ID_PATTERN, re.ASCII)
_HOME = re.compile(rf"(?P<digest>{GENERATION_PATTERN})(?:\.(?P<epoch>{EPOCH_PATTERN}))?", re.ASCII)
_ADAPTER = re.compile(rf"[0-9a-f]{{{ADAPTER_CHARACTERS}}}", re.ASCII)
_BLOCK = re.compile(
    rf"(?:{TENANTS}/(?P<tenant>{TENANT_PATTERN})/)?{BLOCKS}/(?P<first>[0-9a-f]{{3}})/"
    r"(?P<hash>(?P=first)[0-9a-f]+)_g(?P<group>0|[1-9][0-9]{0,9})\.kvb",
    re.ASCII,
)
_JOURNAL = re.compile(rf"{JOURNAL}/(?P<writer>[0-9a-f]{{32}})\.(?P<number>[0-9]{{8}})\.kvj", re.ASCII)
_TREE = rf"(?:{TENANTS}/{TENANT_PATTERN}/)?"
_QUARANTINED = re.compile(rf"{_TREE}{QUARANTINE}/[0-9a-f]+_g[0-9]+\.kvb\.[a-z_]+\.[0-9a-f]{{32}}", re.ASCII)
_PARTIAL = re.compile(r"(?:.*/)?\..+\.[0-9a-f]{32}-partial", re.ASCII | re.DOTALL)
_OTHERS = re.compile(
    rf"{TIER_FILE}|{PURGES_FILE}|{JOURNAL}|{RELEASES}(?:/{EPOCH_PATTERN}\.json)?|{TENANTS}(?:/{TENANT_PATTERN})?|"
    rf"{_TREE}(?:{QUARANTINE}|{BLOCKS}(?:/[0-9a-f]{{3}})?)",
    re.ASCII,
)


class BlockKey(NamedTuple):
    """Names one block: the hash of its tokens and of everything before them, and its KV cache group."""

    hash: bytes
    group: int
    tenant: str = ""
    """Whose block it is: the same tokens of two tenants are two blocks. Empty for the tier's common blocks."""


class Home(NamedTuple):
    """Whose blocks a directory holds: its name says so, and so does the header of each block in it."""

    digest: str
    """Digest of the generation."""
    epoch: str = ""
    """Names the weights, where they were replaced in a running engine; empty for those that the model came with."""

    def __str__(self) -> str:
        """Return the name of the directory."""
        return f"{self.digest}.{self.epoch}" if self.epoch else self.digest


class Lineage(NamedTuple):
    """Origin of a block. A hint for eviction: a wrong one costs a hole in a prefix."""

    parent: bytes = b""
    """Hash of the block before it, of the same group and tenant; empty for the first, and where it is not known."""
    position: int = 0
    """Its number among the chunks of the prefix, from 0; 0 where it is not known."""
    adapter: str = ""
    """By which LoRA adapter it was computed, the first half as `adapter_name_label`; empty for the model alone."""


NO_LINEAGE = Lineage()
"""Lineage of a first block, and of a block of unknown origin."""


class JournalName(NamedTuple):
    """Names one segment of a journal. Segments of one writer are filled one after the other."""

    writer: str
    """32 hex digits that no other process has."""
    number: int


def is_valid(key: BlockKey) -> bool:
    """Return whether the key can be stored: its hash and tenant fit the header, its group an unsigned 32-bit number."""
    is_number_valid = MIN_HASH_BYTES <= len(key.hash) <= MAX_HASH_BYTES and 0 <= key.group <= MAX_GROUP
    return is_number_valid and (key.tenant == "" or is_tenant(key.tenant))


@functools.lru_cache(maxsize=4096)
def is_tenant(name: str) -> bool:
    """Return whether a tenant can have this name: it becomes a directory, on file systems of every kind."""
    return _TENANT.fullmatch(name) is not None


def adapter_name_label(name: str) -> str:
    """Return the part of an adapter's label in headers that all contents of an adapter of this name have."""
    return hashlib.sha256(name.encode()).hexdigest()[: ADAPTER_CHARACTERS // 2]


def is_key_id(name: str) -> bool:
    """Return whether an encryption key can have this name."""
    return _KEY_ID.fullmatch(name) is not None


def is_valid_lineage(lineage: Lineage) -> bool:
    """Return whether it fits the header: no parent, or one with a hash of a usable length."""
    is_parent_valid = not lineage.parent or MIN_HASH_BYTES <= len(lineage.parent) <= MAX_HASH_BYTES
    is_adapter_valid = not lineage.adapter or _ADAPTER.fullmatch(lineage.adapter) is not None
    return is_parent_valid and is_adapter_valid and 0 <= lineage.position <= MAX_POSITION


@functools.lru_cache(maxsize=64)
def find_home(directory: str) -> Home | None:
    """Return whose blocks lie in a directory of this name, None if a generation cannot have it."""
    match = _HOME.fullmatch(directory)
    return match and Home(match["digest"], match["epoch"] or "")


def home_of(root: str) -> Home:
    """Return whose blocks lie under this root; raise ValueError if no generation can have such a directory."""
    home = find_home(root.rstrip("/").rpartition("/")[2])
    if home is None:
        raise ValueError(f"{root}: the name of a generation's directory must match {_HOME.pattern}")
    return home


def tenant_directory(tenant: str) -> str:
    """Return what stands before a tenant's paths: ``tenants/<tenant>/``, nothing for the common blocks."""
    return f"{TENANTS}/{tenant}/" if tenant else ""


def block_name(key: BlockKey) -> str:
    """Return the name of the block's file, without its directories."""
    if not is_valid(key):
        raise ValueError(
            f"{key!r}: the hash must have {MIN_HASH_BYTES} to {MAX_HASH_BYTES} bytes, the group must fit 32 bits and "
            f"the tenant must match {TENANT_PATTERN}"
        )
    return f"{key.hash.hex()}_g{key.group}.kvb"


def block_path(key: BlockKey) -> str:
    """Return the block's path: ``blocks/<3 hex digits>/<hash>_g<group>.kvb``, in the tenant's tree.

    4096 directories: a million blocks are about 250 files in each. After the first few thousand blocks none is made
    any more, and a walk lists no more than these.
    """
    name = block_name(key)
    return f"{tenant_directory(key.tenant)}{BLOCKS}/{name[:3]}/{name}"


def parse_block_path(relative: str) -> BlockKey | None:
    """Return the key of a path made by `block_path`, None for any other path."""
    match = _BLOCK.fullmatch(relative)
    if match is None or len(match["hash"]) % 2:
        return None
    key = BlockKey(bytes.fromhex(match["hash"]), int(match["group"]), match["tenant"] or "")
    return key if is_valid(key) else None


def partial_path(path: str, token: str) -> str:
    """Return the name under which a file is written before it is renamed to `path`; `token` is 32 hex digits.

    GlusterFS keeps a file on the server that its name leads to, but takes a dot, a name, a dot and more for that name.
    So a rename moves nothing to another server, and leaves no pointer behind that each later reader follows.
    """
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.{token}-partial"


def is_partial(name: str) -> bool:
    """Return whether the name is one that `partial_path` makes."""
    return _PARTIAL.fullmatch(name) is not None


def quarantine_path(key: BlockKey, reason: str, token: str) -> str:
    """Return where a damaged block file is moved: its name, why, and a token, since a block can be damaged twice."""
    return f"{tenant_directory(key.tenant)}{QUARANTINE}/{block_name(key)}.{reason}.{token}"


def tenant_of(relative: str) -> str:
    """Return the tenant in whose tree a path lies; empty for the common tree."""
    parts = relative.split("/", 2)
    return parts[1] if parts[0] == TENANTS and len(parts) > 2 and is_tenant(parts[1]) else ""  # noqa: PLR2004 - parts


def is_quarantined(relative: str) -> bool:
    """Return whether the path is one made by `quarantine_path`."""
    return _QUARANTINED.fullmatch(relative) is not None


def journal_path(name: JournalName) -> str:
    """Return the path of a segment: ``journal/<writer>.<number, 8 digits>.kvj``."""
    return f"{JOURNAL}/{name.writer}.{name.number:08d}.kvj"


def parse_journal_path(relative: str) -> JournalName | None:
    """Return the name of a path made by `journal_path`, None for any other path."""
    match = _JOURNAL.fullmatch(relative)
    return None if match is None else JournalName(match["writer"], int(match["number"]))


def is_own(relative: str) -> bool:
    """Return whether kvtier gives this path to a file or directory of a generation; others are of other programs."""
    is_data = parse_block_path(relative) is not None or parse_journal_path(relative) is not None
    return is_data or is_quarantined(relative) or is_partial(relative) or _OTHERS.fullmatch(relative) is not None
