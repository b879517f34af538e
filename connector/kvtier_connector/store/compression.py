# SPDX-License-Identifier: Apache-2.0
"""Decides whether blocks are written compressed: where the volume is slower than the processors that would do it.

What the volume does was measured when it was tried, what the codec does is measured on the blocks themselves, now and
then. Any thread may ask; what two find at the same time is as good.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvtier_connector import contract
from kvtier_connector.store import codec
from kvtier_connector.store.choices import Choices
from kvtier_connector.store.codec import Codec
from kvtier_connector.store.format import WIDTHS

TRIAL_BLOCKS = 256
"""After so many blocks it is asked again what compressing them brings."""
_TRIAL_BYTES = 1 << 21
_CLEARLY = 0.99
"""Numbers of another width are worth it where they save at least a hundredth more."""
_LEAST_GAIN = 0.9
"""Of the time that a load takes without, what it may take at most."""
_CODEC_SHARE = 0.5
"""Of the processors: the others serve the engine and the volume."""


def pays(  # noqa: PLR0913 - keywords, each a rate
    *,
    ratio: float,
    pack_rate: float,
    unpack_rate: float,
    read_rate: float,
    write_rate: float,
    processors: int,
) -> bool:
    """Say whether loads get clearly quicker and stores no slower. Pure.

    Args:
        ratio: Compressed bytes for each byte of a block.
        pack_rate: Bytes a second of blocks that one processor compresses.
        unpack_rate: The same of decompressing.
        read_rate: Bytes a second that the volume gives a node; 0 where nobody measured it.
        write_rate: The same of writing.
        processors: That this process may use.
    """
    if not (read_rate and write_rate):
        return False
    cores = max(1.0, processors * _CODEC_SHARE)
    load_seconds = max(ratio / read_rate, 1 / (cores * unpack_rate))
    store_seconds = max(ratio / write_rate, 1 / (cores * pack_rate))
    return load_seconds <= _LEAST_GAIN / read_rate and store_seconds <= 1 / write_rate


class Compression:
    """Says of each block with numbers of which width it is to be compressed."""

    def __init__(self, mode: str, choices: Callable[[], Choices], *, processors: int = 0) -> None:
        """Store the settings.

        Args:
            mode: One of `contract.COMPRESSIONS`.
            choices: Reads what trying the volume has shown; asked at each trial.
            processors: That this process may use; 0 asks the system.
        """
        self._mode = mode
        self._choices = choices
        self._processors = processors or len(os.sched_getaffinity(0))
        self._width = 0
        self._left = 0

    @property
    def is_considered(self) -> bool:
        """Whether blocks may be compressed at all."""
        return self._mode != contract.COMPRESSION_OFF and codec.is_available()

    def width_for(self, payload: memoryview, codec_here: Codec, scratch: memoryview) -> int:
        """Return the width, 0 to write the block as it is.

        Args:
            payload: The block.
            codec_here: The calling thread's.
            scratch: Writable memory of the block's length.
        """
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
        if not best or self._mode == contract.COMPRESSION_ALWAYS:
            return best
        began = time.thread_time()
        packed_bytes = codec_here.pack(sample, scratch, best)
        between = time.thread_time()
        codec_here.unpack(scratch[:packed_bytes], sample.nbytes, best, lambda _offset, _piece: True)
        ended = time.thread_time()
        choices = self._choices()
        is_worth_it = pays(
            ratio=packed_bytes / sample.nbytes,
            pack_rate=sample.nbytes / max(between - began, 1e-9),
            unpack_rate=sample.nbytes / max(ended - between, 1e-9),
            read_rate=choices.read_bytes_per_second,
            write_rate=choices.write_bytes_per_second,
            processors=self._processors,
        )
        return best if is_worth_it else 0
