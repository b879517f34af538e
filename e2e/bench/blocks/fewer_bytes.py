# SPDX-License-Identifier: Apache-2.0
"""Lossless compression of real KV, and what it gives to the first token of a split hit.

``python -m e2e.bench.blocks.fewer_bytes MODEL.gguf TEXT...``. A small trained model reads the texts. Its keys and
values are cut into chunks of 256 tokens, layer by layer as blocks hold them, and compressed with one core.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier_connector.store.compression import Codec

_LZ4: Any = importlib.import_module("lz4.block")
_ZSTANDARD: Any = importlib.import_module("zstandard")
TOKENS, CHUNK = 4096, 256
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Method = tuple[Callable[[Bytes], list[bytes]], Callable[[list[bytes]], Any]]


def read_kv(model_path: Path, texts: Sequence[Path]) -> torch.Tensor:
    """Return keys and values in bfloat16: layer, keys or values, token, head, place."""
    folder, name = str(model_path.parent), model_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16).eval()
    found = []
    for text in texts:
        tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :TOKENS]
        with torch.no_grad():
            out = model(tokens, use_cache=True, labels=tokens)
        print(f"{text.name}: {tokens.shape[1]} tokens, perplexity {math.exp(out.loss):.1f}", flush=True)
        pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in out.past_key_values.layers]
        found.append(torch.stack(pairs).transpose(2, 3))
    return torch.cat(found, dim=2)


def zstd(level: int) -> Method:
    """Compress the bytes as they are."""
    pack, unpack = _ZSTANDARD.ZstdCompressor(level=level), _ZSTANDARD.ZstdDecompressor()
    return lambda data: [pack.compress(data.tobytes())], lambda parts: [unpack.decompress(part) for part in parts]


def exponents(row: int) -> Method:
    """Compress the exponents of bfloat16 by themselves; of a row's numbers, as the difference to the token before."""
    coder, decoder = zstd(1)

    def pack(data: Bytes) -> list[bytes]:
        numbers = data.view("<u2")
        high, low = (numbers >> 7).astype("u1"), ((numbers & 0x7F) | (numbers >> 8 & 0x80)).astype("u1")
        if row:
            high = np.diff(high.reshape(-1, CHUNK, row), axis=1, prepend=np.uint8(0)).reshape(-1)
        return [*coder(high), low.tobytes()]

    def unpack(parts: list[bytes]) -> object:
        high, low = np.frombuffer(decoder(parts[:1])[0], "u1"), np.frombuffer(parts[1], "u1").astype("<u2")
        if row:
            high = np.cumsum(high.reshape(-1, CHUNK, row), axis=1, dtype="u1").reshape(-1)
        return (high.astype("<u2") << 7) | (low & 0x7F) | ((low & 0x80) << 8)

    return pack, unpack


def kvtier(width: int, size: int) -> Method:
    """Compress as the store does."""
    codec, into = Codec(), memoryview(bytearray(size))

    def pack(data: Bytes) -> list[bytes]:
        return [bytes(into[: codec.pack(memoryview(data.data), into, width) or size])]

    return pack, lambda parts: codec.unpack(memoryview(parts[0]), size, width, lambda *_: True)


class Figures(NamedTuple):
    """Result of one method for all chunks."""

    ratio: float
    pack_rate: float
    unpack_rate: float


def measure(method: Method, chunks: Sequence[Bytes]) -> Figures:
    """Compress and decompress each chunk; rates are bytes of chunks a second of a processor."""
    pack, unpack = method
    packed_bytes, seconds = 0, [0.0, 0.0]
    for chunk in chunks:
        marks = [time.thread_time()]
        parts = pack(chunk)
        marks.append(time.thread_time())
        unpack(parts)
        marks.append(time.thread_time())
        packed_bytes += sum(map(len, parts))
        seconds = [total + end - start for total, (start, end) in zip(seconds, itertools.pairwise(marks), strict=True)]
    size = sum(chunk.nbytes for chunk in chunks)
    return Figures(packed_bytes / size, size / seconds[0], size / seconds[1])


CURVE: Final = (2.18e-5, 4.68e-10)
"""Seconds to compute x tokens of an 8B shape with one H200: linear and square terms (facts of split hits)."""
VERIFY_RATE: Final = 2.5e9
"""At which one core verifies and copies, bytes a second."""


def first_token(tokens: int, token_bytes: int, line: float, figures: Figures | None, cores: int) -> float:
    """Return the seconds until a head that is computed and a tail that is loaded meet."""
    per_byte = 1 / VERIFY_RATE if figures is None else 1 / figures.unpack_rate + 1 / VERIFY_RATE
    rate = min(line / (1 if figures is None else figures.ratio), cores / per_byte) / token_bytes
    linear, square = CURVE
    b = linear + 1 / rate
    x = (math.sqrt(b * b + 4 * square * tokens / rate) - b) / (2 * square)
    return (tokens - x) / rate


def main() -> None:
    """Measure, and print tables."""
    torch.set_num_threads(1)
    values = read_kv(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
    row = values.shape[3] * values.shape[4]
    for name, dtype, width in (("bfloat16", torch.int16, 2), ("float8_e4m3", torch.uint8, 1)):
        kept = values if name == "bfloat16" else values.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        chunks = [part.contiguous().view(dtype).numpy().reshape(-1).view("u1") for part in kept.split(CHUNK, dim=2)]
        lz4 = (lambda data: [_LZ4.compress(data.tobytes())], lambda parts: _LZ4.decompress(parts[0]))
        methods = {"zstd 1": zstd(1), "zstd 3": zstd(3), "lz4": lz4}
        if name == "bfloat16":
            methods |= {"exponents apart, zstd 1": exponents(0), "their difference to the token before": exponents(row)}
        methods["kvtier: bytes of each place, Huffman codes"] = kvtier(width, chunks[0].nbytes)
        print(f"\n| {name} | bytes left | compress, MB/s | decompress, MB/s |\n|---|---|---|---|")
        for title, method in methods.items():
            found = measure(method, chunks)
            print(f"| {title} | {found[0]:.1%} | {found[1] / 1e6:.0f} | {found[2] / 1e6:.0f} |", flush=True)
        print("\n| tokens | Gbit/s | plain, s | 2 cores | 8 cores | 16 cores |\n|---|---|---|---|---|---|")
        for tokens, gigabits in itertools.product((8192, 32768, 122880), (1, 2.5, 5, 10, 25)):
            size, line = 65536 * width, gigabits / 8 * 1e9
            bare = {cores: first_token(tokens, size, line, None, cores) for cores in (2, 8, 16)}
            shares = [first_token(tokens, size, line, found, cores) / bare[cores] - 1 for cores in bare]
            print(f"| {tokens} | {gigabits:g} | {bare[8]:.2f} | {' | '.join(f'{share:+.0%}' for share in shares)} |")


if __name__ == "__main__":
    main()
