# SPDX-License-Identifier: Apache-2.0
"""What compressing blocks saves and costs one core: ``python -m e2e.bench.compression KV.bin [--chunk-mib 6]``.

The file has the bytes of chunks, such as `real_kv.py` makes. Processor time is measured, the median of the chunks;
every chunk is compared with what comes back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from kvtier_connector.store.codec import Codec
from kvtier_connector.store.format import WIDTHS


def measure(chunks: list[memoryview], width: int) -> tuple[float, float, float]:
    """Return compressed bytes for each byte, and the bytes a second of compressing and decompressing."""
    here, size = Codec(), chunks[0].nbytes
    into, back = memoryview(bytearray(size)), bytearray(size)
    packed_bytes, packing, unpacking = 0, [], []

    def take(offset: int, piece: memoryview) -> bool:
        back[offset : offset + piece.nbytes] = piece
        return True

    for chunk in chunks:
        began = time.thread_time()
        length = here.pack(chunk, into, width)
        packing.append(time.thread_time() - began)
        packed_bytes += length or size
        if length:
            began = time.thread_time()
            assert here.unpack(into[:length], size, width, take)
            unpacking.append(time.thread_time() - began)
            assert back == chunk
    rates = [size / statistics.median(seconds) if seconds else 0.0 for seconds in (packing, unpacking)]
    return packed_bytes / size / len(chunks), rates[0], rates[1]


def main() -> None:
    """Measure and print a row for each width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--chunk-mib", type=int, default=6)
    options = parser.parse_args()
    content, size = memoryview(options.file.read_bytes()), options.chunk_mib << 20
    chunks = [content[start : start + size] for start in range(0, content.nbytes - size + 1, size)]
    print("| bytes of a number | compressed | compress, GB/s | decompress, GB/s |\n|---|---|---|---|")
    for width in WIDTHS:
        ratio, pack_rate, unpack_rate = measure(chunks, width)
        print(f"| {width} | {ratio:.1%} | {pack_rate / 1e9:.2f} | {unpack_rate / 1e9:.2f} |")


if __name__ == "__main__":
    main()
