# SPDX-License-Identifier: Apache-2.0
"""As much of SPDY 3.1 as port-forwarding takes: streams that a client opens, data both ways, no flow control. Pure.

kubectl sends SPDY through a WebSocket, and its SPDY ignores windows; so does this.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_NAMES: Final = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200|OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_REST: Final = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative "
    "Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 "
    "Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec "
    "00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset="
    "iso-8859-1,utf-,*,enq=0."
)
_LENGTH: Final = struct.Struct(">I")
_HEADER: Final = struct.Struct(">II")
_CONTROL: Final = 0x80030000
_IS_CONTROL: Final = 0x80000000
_STREAM: Final = 0x7FFFFFFF
_SIZE: Final = 0xFFFFFF
_REPLY, _PING = 2, 6
_OPENING_BYTES: Final = 10
_FIN: Final = 1


def _sized(text: str) -> bytes:
    return _LENGTH.pack(len(text)) + text.encode()


def dictionary() -> bytes:
    """Return the texts that both sides know before the first header."""
    return b"".join(_sized(name.replace("|", " ")) for name in _NAMES.split()) + _REST.encode()


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Something that the client sent about one stream."""

    stream: int
    headers: dict[str, str] = field(default_factory=dict)
    """Of a stream that opens; empty for any other frame."""
    data: bytes = b""
    is_end: bool = False
    """The client will send nothing more on the stream."""


class Session:
    """One connection: turns bytes into frames, and what is to be said into bytes."""

    def __init__(self) -> None:
        """Start with nothing received."""
        self._received = b""
        self._inflate = zlib.decompressobj(zdict=dictionary())
        self._deflate = zlib.compressobj()

    def receive(self, data: bytes) -> Iterator[Frame | bytes]:
        """Yield the frames that are complete now, and bytes that are to be sent back as they are."""
        self._received += data
        while len(self._received) >= _HEADER.size:
            first, second = _HEADER.unpack_from(self._received)
            end = _HEADER.size + (second & _SIZE)
            if len(self._received) < end:
                return
            body, self._received = self._received[_HEADER.size : end], self._received[end:]
            is_end = bool(second >> 24 & _FIN)
            if not first & _IS_CONTROL:
                yield Frame(stream=first & _STREAM, data=body, is_end=is_end)
                continue
            stream = _LENGTH.unpack_from(body)[0] & _STREAM if len(body) >= _LENGTH.size else 0
            match first & ~_CONTROL:
                case 1:
                    yield Frame(stream=stream, headers=self._headers(body[_OPENING_BYTES:]), is_end=is_end)
                case 3:
                    yield Frame(stream=stream, is_end=True)
                case 6:
                    yield _HEADER.pack(_CONTROL | _PING, len(body)) + body

    def _headers(self, block: bytes) -> dict[str, str]:
        plain = self._inflate.decompress(block)
        texts: list[str] = []
        place = _LENGTH.size
        while place < len(plain):
            size = _LENGTH.unpack_from(plain, place)[0]
            place += _LENGTH.size
            texts.append(plain[place : place + size].decode())
            place += size
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def accept(self, stream: int) -> bytes:
        """Return the answer to a stream that was opened: it carries no headers."""
        block = self._deflate.compress(_LENGTH.pack(0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _HEADER.pack(_CONTROL | _REPLY, _LENGTH.size + len(block)) + _LENGTH.pack(stream) + block


def data(stream: int, content: bytes, *, is_end: bool = False) -> bytes:
    """Return content as a frame of a stream."""
    return _HEADER.pack(stream, (_FIN if is_end else 0) << 24 | len(content)) + content
