# SPDX-License-Identifier: Apache-2.0
"""The bytes of a block file: one 4096-byte header, then the payload; and the checksums of payloads.

Pure: bytes in, values out. FORMAT.md beside the package documents every offset; the two change together.

Checksums reveal damage, not forgery. AES-GMAC is the tag of AES-GCM over data that is not encrypted; the processor's
instructions make it three times as fast as BLAKE3. Its key and nonce are public constants below, so any writer of the
volume can compute it. It needs ``cryptography``, which vLLM's images have. Without the package, blocks are written with
BLAKE3, and blocks with the other checksum are a miss.
"""

from __future__ import annotations

import enum
import functools
import struct
import zlib
from typing import Any, Final, NamedTuple, Self

from blake3 import blake3

from kvtier_connector.contract.engine import BLOCK_FORMAT_VERSION
from kvtier_connector.store import layout
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Home, Lineage, find_home

try:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
except ImportError:
    HAS_AES = False
else:
    HAS_AES = True

CHECKSUM_BYTES = 32
"""Room in the header; a shorter checksum is followed by zeros."""

_GMAC_KEY = b"kvtier checksum2"
_GMAC_NONCE = bytes(12)


class Algorithm(enum.IntEnum):
    """How the payload's checksum is computed."""

    NONE = 0
    """The payload is encrypted, and the tag of its encryption stands in the place of the checksum."""
    BLAKE3_256 = 1
    AES_GMAC = 2


@functools.cache
def _gmac_cipher() -> Cipher[modes.GCM]:
    """Return what is the same for every payload; to make it takes longer than to read a small chunk."""
    return Cipher(algorithms.AES(_GMAC_KEY), modes.GCM(_GMAC_NONCE))


class _Gmac:
    def __init__(self) -> None:
        self._encryptor = _gmac_cipher().encryptor()

    def update(self, piece: memoryview, /) -> None:
        self._encryptor.authenticate_additional_data(piece)

    def digest(self) -> bytes:
        self._encryptor.finalize()
        return self._encryptor.tag.ljust(CHECKSUM_BYTES, b"\0")


Hasher = blake3 | _Gmac
"""Takes in a payload piece by piece."""

DEFAULT_ALGORITHM: Final = Algorithm.AES_GMAC if HAS_AES else Algorithm.BLAKE3_256
"""Algorithm of new blocks."""


def new_hasher(algorithm: int) -> Hasher:
    """Return a hasher for this checksum; raise ValueError where it cannot be computed here."""
    if algorithm == Algorithm.BLAKE3_256:
        return blake3()
    if algorithm == Algorithm.AES_GMAC and HAS_AES:
        return _Gmac()
    raise ValueError(f"{algorithm!r}: this checksum cannot be computed here")


def checksum(payload: memoryview, algorithm: Algorithm = DEFAULT_ALGORITHM) -> bytes:
    """Return the checksum of a whole payload."""
    hasher = new_hasher(algorithm)
    hasher.update(payload)
    return hasher.digest()


HEADER_BYTES = layout.ALIGNMENT
MAGIC = b"KVTB"
FORMAT_VERSION = BLOCK_FORMAT_VERSION
WIDTHS = (1, 2, 4)
"""Bytes of the numbers in a compressed block: 2 for bfloat16 and float16, 1 for the formats of 8 bits."""
KEY_CHECK_BYTES = 8
NONCE_BYTES = 12
TAG_BYTES = 16

_FIELDS = struct.Struct(
    f"<4sIIIIIQQII{layout.MAX_HASH_BYTES}sII{layout.MAX_HASH_BYTES}s{layout.MAX_TENANT_CHARACTERS}s{CHECKSUM_BYTES}s"
    f"{layout.MAX_KEY_ID_CHARACTERS}s{KEY_CHECK_BYTES}s{NONCE_BYTES}s"
    f"{layout.MAX_DIGEST_CHARACTERS}s{layout.MAX_EPOCH_CHARACTERS}s{layout.ADAPTER_CHARACTERS}sQII"
)
_CRC = struct.Struct("<I")
CRC_OFFSET = HEADER_BYTES - _CRC.size
"""Where the header's own checksum stands."""
CHECKSUM_PLACE = slice(152, 152 + CHECKSUM_BYTES)
"""Where the payload's checksum, or the tag of its encryption, stands."""
_PADDING = bytes(CRC_OFFSET - _FIELDS.size)


_MOVED = "a reader moves it away, and the block is computed again"
_NO_PACKAGE = "the package cryptography is missing: pip install cryptography"
_REMEDY = "a later release may serve it" if HAS_AES else _NO_PACKAGE


class Fault(enum.Enum):
    """Why a block file cannot be served, with a sentence for people: the caller counts it and recomputes."""

    EMPTY = "empty", f"it has no bytes, as after a power failure; {_MOVED}"
    TRUNCATED = "truncated", f"it ends too early; {_MOVED}"
    MAGIC = "magic", f"it does not begin as a block does; {_MOVED}"
    VERSION = "version", "another release wrote it; readers of that one serve it"
    HEADER = "header", f"its header is damaged; {_MOVED}"
    KEY = "key", f"it holds another block than its name says; {_MOVED}"
    GENERATION = (
        "generation",
        f"it was written for another generation than its directory's, or for other weights; {_MOVED}",
    )
    LENGTH = "length", "its block is of another length than its readers'; they compute it again"
    TRAILING = "trailing", f"it goes on behind its payload; {_MOVED}"
    CHECKSUM = "checksum", f"its bytes are not those that were written; {_MOVED}"
    ALGORITHM = "algorithm", f"it needs a checksum or an encryption that is not known here; {_REMEDY}"
    KEY_MISSING = "key_missing", "it is encrypted with a key that is not here"
    KEY_WRONG = "key_wrong", "it is encrypted with another key than the one of this name here"
    CLEAR = "clear", "it is not encrypted, and readers believe encrypted blocks only"
    PACKING = "packing", f"what was written cannot be decompressed; {_MOVED}"
    TAG = "tag", f"its bytes are not those that were encrypted; {_MOVED}"
    IO = "io", "the system could not read it; look at the volume"

    _value_: str
    explanation: str
    is_damage: bool
    """Whether the file is bad for every reader, so that moving it out of the way loses nothing."""

    def __new__(cls, value: str, explanation: str) -> Self:
        """Make a fault of a value for programs."""
        fault = object.__new__(cls)
        fault._value_ = value
        fault.explanation, fault.is_damage = explanation, explanation.endswith(_MOVED)
        return fault


class Encryption(enum.IntEnum):
    """How the payload is encrypted."""

    NONE = 0
    AES_256_GCM = 1


class Seal(NamedTuple):
    """With what a payload is encrypted; not the key itself."""

    key_id: str = ""
    """The key's name."""
    key_check: bytes = bytes(KEY_CHECK_BYTES)
    """Tells two keys of one name apart."""
    nonce: bytes = bytes(NONCE_BYTES)


NO_SEAL = Seal()
"""Seal of a payload that is not encrypted."""


class Method(enum.IntEnum):
    """How the payload is compressed."""

    NONE = 0
    ZSTD_PLANES = 1
    """Planes of bytes of one place, compressed with Zstandard where that helps; see FORMAT.md."""


class Packing(NamedTuple):
    """How a payload is decompressed."""

    method: int = Method.NONE
    block_bytes: int = 0
    """Length of the decompressed block."""
    width: int = 0
    """Bytes of the numbers that it consists of."""


NOT_PACKED = Packing()
"""Packing of a payload that is not compressed."""
FLAG_PACKED = 1
"""Set in the header of a compressed block: a release that knows of none leaves the file alone."""


class Header(NamedTuple):
    """Contents of the first page of a block file."""

    key: BlockKey
    payload_bytes: int
    """As it lies in the file, after compression."""
    checksum: bytes
    """Checksum of the payload, or tag of its encryption; always 32 bytes."""
    created_ns: int
    """When the writer wrote it: nanoseconds since 1970, by the writer's clock."""
    home: Home
    """The directory that it was written for."""
    lineage: Lineage = NO_LINEAGE
    algorithm: int = DEFAULT_ALGORITHM
    encryption: int = Encryption.NONE
    seal: Seal = NO_SEAL
    packing: Packing = NOT_PACKED
    flags: int = 0
    """`FLAG_PACKED` follows from `packing`; others are of later releases."""

    @property
    def block_bytes(self) -> int:
        """Length of the block that a reader gets."""
        return self.packing.block_bytes or self.payload_bytes


def encode_header(header: Header) -> bytes:
    """Return the page that `decode_header` reads; raise ValueError for a header that no reader would accept."""
    key, lineage, seal = header.key, header.lineage, header.seal
    if not _is_sound(header) or header.payload_bytes < 1 or len(header.checksum) != CHECKSUM_BYTES:
        raise ValueError(
            f"{header!r}: the key, its home or lineage, the payload length or the checksum does not fit the format"
        )
    if not _is_known(header):
        raise ValueError(f"{header!r}: this release knows no such checksum algorithm, encryption or flags")
    try:
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            header.flags | (FLAG_PACKED if header.packing != NOT_PACKED else 0),
            header.algorithm,
            header.encryption,
            header.payload_bytes,
            header.created_ns,
            key.group,
            len(key.hash),
            key.hash,
            len(lineage.parent),
            lineage.position,
            lineage.parent,
            key.tenant.encode(),
            header.checksum,
            seal.key_id.encode(),
            seal.key_check,
            seal.nonce,
            header.home.digest.encode(),
            header.home.epoch.encode(),
            lineage.adapter.encode(),
            header.packing.block_bytes,
            header.packing.method,
            header.packing.width,
        )
    except struct.error as error:
        raise ValueError(f"{header!r}: {error}") from error
    page = fields + _PADDING
    return page + _CRC.pack(zlib.crc32(page))


def decode_header(data: bytes | bytearray | memoryview) -> Header | Fault:
    """Read the first page of a block file; bytes after it are ignored.

    The page's own checksum comes before the version, so that a flipped bit in the version is damage and not a message
    from the future. Every later version keeps the magic, the version and the checksum of the first page in place.
    """
    if len(data) < HEADER_BYTES:
        return Fault.TRUNCATED if len(data) else Fault.EMPTY
    if data[: len(MAGIC)] != MAGIC:
        return Fault.MAGIC
    if _CRC.unpack_from(data, CRC_OFFSET)[0] != zlib.crc32(data[:CRC_OFFSET]):
        return Fault.HEADER
    fields = _FIELDS.unpack_from(data)
    if fields[1] != FORMAT_VERSION:
        return Fault.VERSION
    header = _build(fields)
    if header is None:
        return Fault.HEADER
    return header if _is_known(header) else Fault.ALGORITHM


def _build(fields: tuple[Any, ...]) -> Header | None:
    """Return the header that has these fields, None if they make no sense together."""
    _, _, header_bytes, flags, algorithm, encryption, payload_bytes, created_ns, group, *rest = fields
    hash_bytes, padded, parent_bytes, position, padded_parent, tenant, checksum, *rest = rest
    key_id, key_check, nonce, *origin, block_bytes, method, width = rest
    if header_bytes != HEADER_BYTES or payload_bytes < 1 or max(hash_bytes, parent_bytes) > layout.MAX_HASH_BYTES:
        return None
    texts = [text.rstrip(b"\0") for text in (tenant, key_id, *origin)]
    if any(padded[hash_bytes:]) or any(padded_parent[parent_bytes:]) or not all(text.isascii() for text in texts):
        return None
    tenant, key_id, digest, epoch, adapter = (text.decode("ascii") for text in texts)
    key = BlockKey(padded[:hash_bytes], group, tenant)
    lineage = Lineage(padded_parent[:parent_bytes], position, adapter)
    seal, home = Seal(key_id, key_check, nonce), Home(digest, epoch)
    # Where the flag is not set, the fields are not looked at, as by every release before this one.
    is_packed = bool(flags & FLAG_PACKED) and method != Method.NONE
    packing = Packing(method, block_bytes, width) if is_packed else NOT_PACKED
    flags -= FLAG_PACKED if is_packed else 0
    header = Header(
        key, payload_bytes, checksum, created_ns, home, lineage, algorithm, encryption, seal, packing, flags
    )
    return header if _is_sound(header) else None


def _is_sound(header: Header) -> bool:
    is_home = find_home(str(header.home)) == header.home
    is_named_right = is_home and layout.is_valid(header.key) and layout.is_valid_lineage(header.lineage)
    return is_named_right and _is_sealed_right(header) and _is_packed_right(header)


def misplaced(header: Header, key: BlockKey, home: Home) -> Fault | None:
    """Return whether a file holds another block than its name says, or one of another directory; None if neither."""
    if header.key != key:
        return Fault.KEY
    return None if header.home == home else Fault.GENERATION


def _is_sealed_right(header: Header) -> bool:
    """Return whether an encrypted block names its key and one in clear does not; True for an unknown encryption."""
    if header.encryption == Encryption.NONE:
        return header.seal == NO_SEAL
    if header.encryption != Encryption.AES_256_GCM:
        return True
    seal = header.seal
    is_long_enough = len(seal.key_check) == KEY_CHECK_BYTES and len(seal.nonce) == NONCE_BYTES
    return is_long_enough and layout.is_key_id(seal.key_id) and not any(header.checksum[TAG_BYTES:])


def _is_packed_right(header: Header) -> bool:
    """Return whether a compressed block is longer than its payload; True for an unknown method."""
    method, block_bytes, width = header.packing
    if method != Method.ZSTD_PLANES:
        return method != Method.NONE or header.packing == NOT_PACKED
    return width in WIDTHS and block_bytes % width == 0 and block_bytes > header.payload_bytes


def _is_known(header: Header) -> bool:
    if header.encryption == Encryption.NONE:
        is_verifiable = header.algorithm in {Algorithm.BLAKE3_256, Algorithm.AES_GMAC}
    else:
        is_verifiable = header.encryption == Encryption.AES_256_GCM and header.algorithm == Algorithm.NONE
    return is_verifiable and header.packing.method in set(Method) and header.flags == 0
