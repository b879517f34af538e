# SPDX-License-Identifier: Apache-2.0
"""Which weights a model has, by its files: the commit of the hub that they are of, or a digest of a directory.

The name of a model does not always say which weights are served: a branch moves, a directory is written anew. A commit
names its bytes for ever; ``main`` and ``/models/llama`` do not. So the engine, which alone has the weights, adds what
it found: one that finds something else later is a stranger to the blocks. Where nothing is found, None says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm.logger import init_logger

logger = init_logger("vllm.kvtier.model_files")

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SAMPLES: Final = 16
"""Places of a file that are read. Training changes weights all over, so a few places show it; a change of one tensor
in a hundred may go unseen, which is why a directory is best never written twice."""
_SAMPLE_BYTES: Final = 4096
_DESCRIPTIONS: Final = ("config.json", "adapter_config.json", "params.json", "quantize_config.json")


def fingerprint(model: str, revision: str) -> str | None:
    """Return the commit of a model of the hub, or a digest of a directory; None where neither can be told.

    Args:
        model: name on the hub, or a directory.
        revision: branch, tag or commit that was asked for.
    """
    try:
        directory = Path(model)
        if directory.is_dir():
            return _sample(directory)
        found = cached_directory(model, revision, _DESCRIPTIONS)
    except OSError as error:
        logger.warning("The weights of %s cannot be told from others by their files: %s", model, error)
        return None
    return None if found is None else found.name


def cached_directory(name: str, revision: str, files: Iterable[str]) -> Path | None:
    """Return where the local cache of the hub has one of these files of a revision; None if it has none."""
    # Here and not above: it reads the environment when it is imported, and takes a while.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - takes a while
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - takes a while

    for file in files:
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _sample(directory: Path) -> str | None:
    """Return a digest of the description, and of the sizes and of parts of the weights; None if there are none."""
    digest = hashlib.sha256()
    has_weights = False
    for path in sorted(each for each in directory.iterdir() if _is_of_model(each)):
        has_weights |= path.suffix in WEIGHT_SUFFIXES
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb", buffering=0) as file:
            for turn in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * turn // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()[:32]}" if has_weights else None


def _is_of_model(path: Path) -> bool:
    return path.suffix in WEIGHT_SUFFIXES or path.name in _DESCRIPTIONS
