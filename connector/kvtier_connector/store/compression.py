# SPDX-License-Identifier: Apache-2.0
"""Lossless compression of payloads, and the decision where it pays.

Of a bfloat16, the byte with the exponent takes few values and the one with the mantissa looks random. So each piece of
a payload is split into planes, with the bytes of one place of every number. A plane is compressed with Zstandard if
that saves anything. The library is the system's own libzstd, which Debian's and Ubuntu's package manager needs, so
every image of vLLM has it; numpy is among vLLM's dependencies. Both are loaded at first use. A `Codec` belongs to one
thread.

Compression pays where the volume is slower than the processors that compress. The preflight measured the volume; the
codec is measured on the blocks themselves, now and then. Any thread may ask, and a race between two costs nothing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Any

from kvtier_connector.contract import engine
from kvtier_connector.store.fs import VolumeProfile
from kvtier_connector.store.header import WIDTHS
from kvtier_connector.store.layout import ALIGNMENT

PIECE_BYTES = 1 << 19
"""So much of a payload is packed by itself: with its planes it stays in the core's cache."""
LEAST_SAVED = 0.05
"""A payload is packed if it loses at least this share of its bytes."""

_LIBRARY = "libzstd.so.1"
_PARAMETERS = {100: 1, 102: 6, 105: 7, 107: 1}
"""Values of ``ZSTD_cParameter``: level 1, a table of 2^6 places, matches of 7 bytes or more, and the fast strategy.

The planes have few repetitions, so only shorter codes for frequent bytes help. These values find them three times as
fast as the defaults.
"""
_LENGTH = struct.Struct("<I")
_TRIED_BYTES = 1 << 12
_PLANE_SAVED = 0.03

Take = Callable[[int, memoryview], bool]
"""Takes bytes of a block from an offset on, before they are verified; False ends the read. The memory is reused."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        importlib.import_module("numpy")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ZSTD_createCCtx", pointer, ()),
            ("ZSTD_freeCCtx", size, (pointer,)),
            ("ZSTD_createDCtx", pointer, ()),
            ("ZSTD_freeDCtx", size, (pointer,)),
            ("ZSTD_CCtx_setParameter", size, (pointer, ctypes.c_int, ctypes.c_int)),
            ("ZSTD_compress2", size, (pointer, pointer, size, pointer, size)),
            ("ZSTD_decompressDCtx", size, (pointer, pointer, size, pointer, size)),
            ("ZSTD_isError", ctypes.c_uint, (size,)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError, ImportError):
        return None
    return library


def is_available() -> bool:
    """Return whether payloads can be packed and unpacked here."""
    return _library() is not None


class Codec:
    """Packs and unpacks payloads, with memory of its own for one piece. One thread."""

    def __init__(self) -> None:
        """Raise OSError where `is_available` is false."""
        library = _library()
        if library is None:
            raise OSError(f"{_LIBRARY} or numpy cannot be loaded")
        self._library = library
        self._numpy: Any = importlib.import_module("numpy")
        self._packing = library.ZSTD_createCCtx()
        self._unpacking = library.ZSTD_createDCtx()
        if not self._packing or not self._unpacking:
            raise MemoryError("Zstandard has no memory for its tables")
        for parameter, value in _PARAMETERS.items():
            library.ZSTD_CCtx_setParameter(self._packing, parameter, value)
        self._piece = self._numpy.frombuffer(mmap.mmap(-1, PIECE_BYTES), dtype="u1")
        self._plane = self._numpy.empty(PIECE_BYTES, dtype="u1")

    def __del__(self) -> None:
        """Give the tables back."""
        self._library.ZSTD_freeCCtx(self._packing)
        self._library.ZSTD_freeDCtx(self._unpacking)

    def pack(self, payload: memoryview, into: memoryview, width: int) -> int:
        """Write a packed payload and return its length, a multiple of the page; 0 if it would not save enough.

        The payload's length is a multiple of the width, which is one of `WIDTHS`. After 0, `into` is undefined.
        """
        source = self._numpy.frombuffer(payload, dtype="u1")
        target = self._numpy.frombuffer(into, dtype="u1")
        most = int(payload.nbytes * (1 - LEAST_SAVED))
        lengths: list[int] = []
        done = _LENGTH.size * width * -(-payload.nbytes // PIECE_BYTES)
        for start in range(0, payload.nbytes, PIECE_BYTES):
            for plane in self._planes(source[start : start + PIECE_BYTES], width):
                length = self._pack_plane(plane, target[done : done + plane.nbytes])
                if done + length > most:
                    return 0
                if length == plane.nbytes:
                    target[done : done + length] = plane
                lengths.append(length)
                done += length
        padded = done + -done % ALIGNMENT
        if padded > most:
            return 0
        into[: _LENGTH.size * len(lengths)] = struct.pack(f"<{len(lengths)}I", *lengths)
        into[done:padded] = bytes(padded - done)
        return padded

    def unpack(self, packed: memoryview, block_bytes: int, width: int, take: Take) -> bool | None:
        """Hand a payload on piece by piece; return whether the bytes were a packed payload of that length.

        No byte beyond `block_bytes` is ever made, whatever the packed ones say. None means that `take` ended it.
        """
        pieces = -(-block_bytes // PIECE_BYTES)
        count = pieces * width
        done = _LENGTH.size * count
        if width not in WIDTHS or block_bytes % width or packed.nbytes < done:
            return False
        lengths = struct.unpack_from(f"<{count}I", packed)
        source = self._numpy.frombuffer(packed, dtype="u1")
        for number in range(pieces):
            start = number * PIECE_BYTES
            size = min(PIECE_BYTES, block_bytes - start)
            piece = self._piece[:size]
            for place, length in enumerate(lengths[number * width : (number + 1) * width]):
                plane_bytes = size // width
                if length > plane_bytes or done + length > packed.nbytes:
                    return False
                plane = source[done : done + length]
                done += length
                if length < plane_bytes:
                    plane = self._plane[:plane_bytes]
                    if not self._unpack_plane(source[done - length : done], plane):
                        return False
                self._put_back(piece, plane, place, width)
            if not take(start, memoryview(piece)):
                return None
        return packed.nbytes == done + -done % ALIGNMENT

    def _planes(self, piece: Any, width: int) -> list[Any]:
        """Return the bytes of each place of the numbers, the first place first."""
        if width != 2:  # noqa: PLR2004 - as below
            return [self._numpy.ascontiguousarray(piece[place::width]) for place in range(width)]
        # Shifts of whole numbers are twice as fast as picking every second byte.
        numbers = piece.view("<u2")
        return [numbers.astype("u1"), (numbers >> 8).astype("u1")]

    def _put_back(self, piece: Any, plane: Any, place: int, width: int) -> None:
        if width != 2:  # noqa: PLR2004 - as above
            piece[place::width] = plane
        elif place == 0:
            piece.view("<u2")[:] = plane
        else:
            numbers = plane.astype("<u2")
            numbers <<= 8
            piece.view("<u2")[:] |= numbers

    def _pack_plane(self, plane: Any, target: Any) -> int:
        """Compress a plane into the target and return the length; the plane's own if that is not worth it."""
        most = int(plane.nbytes * (1 - _PLANE_SAVED))
        if plane.nbytes > 4 * _TRIED_BYTES:
            # A plane that looks random in two places is not compressed as a whole.
            places = (plane.nbytes // 8, plane.nbytes * 5 // 8)
            tried = min(self._compress(plane[place : place + _TRIED_BYTES], target) for place in places)
            if tried >= _TRIED_BYTES * (1 - _PLANE_SAVED):
                return int(plane.nbytes)
        length = self._compress(plane, target)
        return length if length <= most else int(plane.nbytes)

    def _compress(self, source: Any, target: Any) -> int:
        """Return the compressed length, or the source's where it does not fit."""
        if not target.nbytes:
            return int(source.nbytes)
        length = self._library.ZSTD_compress2(
            self._packing, target.ctypes.data, target.nbytes, source.ctypes.data, source.nbytes
        )
        return int(source.nbytes) if self._library.ZSTD_isError(length) else int(length)

    def _unpack_plane(self, source: Any, plane: Any) -> bool:
        """Fill the plane; return whether the source was one of exactly its length."""
        made = self._library.ZSTD_decompressDCtx(
            self._unpacking, plane.ctypes.data, plane.nbytes, source.ctypes.data, source.nbytes
        )
        return not self._library.ZSTD_isError(made) and made == plane.nbytes


TRIAL_BLOCKS = 256
"""After so many blocks it is asked again what compressing them brings."""
_TRIAL_BYTES = 1 << 21
_CLEARLY = 0.99
"""Numbers of another width are worth it where they save at least a hundredth more."""
_LEAST_GAIN = 0.9
"""Largest share of the time of an uncompressed load."""
_CODEC_SHARE = 0.5
"""Share of the processors; the others serve the engine and the volume."""


def pays(  # noqa: PLR0913 - keywords, each a rate
    *, ratio: float, pack_rate: float, unpack_rate: float, read_rate: float, write_rate: float, processors: int
) -> bool:
    """Return whether loads get clearly quicker and stores no slower. Pure.

    Rates are bytes of blocks a second; those of packing are of one processor. A rate of the volume that was not
    measured is 0. `ratio` is the number of compressed bytes for each byte of a block.
    """
    if not (read_rate and write_rate):
        return False
    cores = max(1.0, processors * _CODEC_SHARE)
    load_seconds = max(ratio / read_rate, 1 / (cores * unpack_rate))
    store_seconds = max(ratio / write_rate, 1 / (cores * pack_rate))
    return load_seconds <= _LEAST_GAIN / read_rate and store_seconds <= 1 / write_rate


class Compression:
    """Chooses for each block the width of the numbers with which it is compressed."""

    def __init__(self, mode: str, profile: Callable[[], VolumeProfile]) -> None:
        """Store the settings; `profile` reads the measurements of the volume, and is called at each trial."""
        self.is_considered = mode != engine.COMPRESSION_OFF and is_available()
        """Whether blocks may be compressed at all."""
        self._mode = mode
        self._profile = profile
        self._width = 0
        self._left = 0

    def width_for(self, payload: memoryview, codec_here: Codec, scratch: memoryview) -> int:
        """Return the width, 0 to write the block as it is. The codec is the calling thread's."""
        if self._left > 0:
            self._left -= 1
        else:
            self._left = TRIAL_BLOCKS
            self._width = self._try(payload[:_TRIAL_BYTES], codec_here, scratch[:_TRIAL_BYTES])
        return 0 if self._width and payload.nbytes % self._width else self._width

    def _try(self, sample: memoryview, codec_here: Codec, scratch: memoryview) -> int:
        best, least = 0, sample.nbytes
        # Most caches have numbers of two bytes, which is also the quickest.
        for width in sorted(WIDTHS, key=lambda each: each != 2):  # noqa: PLR2004 - as said
            packed_bytes = 0 if sample.nbytes % width else codec_here.pack(sample, scratch, width)
            if packed_bytes and packed_bytes < least * _CLEARLY:
                best, least = width, packed_bytes
        if not best or self._mode == engine.COMPRESSION_ALWAYS:
            return best
        began = time.thread_time()
        packed_bytes = codec_here.pack(sample, scratch, best)
        between = time.thread_time()
        codec_here.unpack(scratch[:packed_bytes], sample.nbytes, best, lambda _offset, _piece: True)
        ended = time.thread_time()
        profile = self._profile()
        is_worth_it = pays(
            ratio=packed_bytes / sample.nbytes,
            pack_rate=sample.nbytes / max(between - began, 1e-9),
            unpack_rate=sample.nbytes / max(ended - between, 1e-9),
            read_rate=profile.read_bytes_per_second,
            write_rate=profile.write_bytes_per_second,
            processors=len(os.sched_getaffinity(0)),
        )
        return best if is_worth_it else 0
