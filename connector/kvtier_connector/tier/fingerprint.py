# SPDX-License-Identifier: Apache-2.0
"""Tells one set of weights from another by reading a little of each file, for models that have no revision.

A model in a directory can be replaced under the same path, and blocks of the old weights would be served to the new
ones. A fine-tuned model has files of the same names, sizes and tensors as its base, so the bytes themselves count: 16
samples of 64 KiB, spread over each file. A change that misses every sample goes unnoticed; training misses none.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SAMPLES = 16
SAMPLE_BYTES = 1 << 16

_WHOLE = {".json", ".py"}
_SAMPLED = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
_NOT_OF_THE_MODEL = ("tokenizer", "generation_config", "special_tokens", "vocab", "preprocessor", "added_tokens")
"""They decide which tokens a text has; which blocks tokens have, they do not."""


def fingerprint(directory: Path) -> str:
    """Return what changes with the weights, the configuration or the code of a model in a directory.

    Raises:
        OSError: the directory, or a file in it, cannot be read.
    """
    digest = hashlib.sha256(b"kvtier model fingerprint 1\0")
    for path in sorted(directory.iterdir()):
        if path.name.startswith((".", *_NOT_OF_THE_MODEL)) or path.suffix not in _WHOLE | _SAMPLED:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for start in _starts(size, is_whole=path.suffix in _WHOLE):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()


def _starts(size: int, *, is_whole: bool) -> list[int]:
    """Return where the samples begin: the first at the start, the last at the end."""
    if is_whole or size <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [(size - SAMPLE_BYTES) * number // (SAMPLES - 1) for number in range(SAMPLES)]
