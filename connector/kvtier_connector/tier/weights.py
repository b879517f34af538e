# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine serves, when their name does not say: a branch that moved, a directory written anew.

The operator's digest covers what the user named. A commit names its bytes for ever; ``main`` and ``/models/llama`` do
not. So the engine, which alone has the weights, adds what it found to the identity in ``tier.json``: one that finds
something else later is a stranger to the blocks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from vllm.logger import init_logger

logger = init_logger("vllm.kvtier.weights")

_SAMPLES: Final = 16
"""Places of a file that are read. Training changes weights all over, so a few places show it; a change of one tensor
in a hundred may go unseen, which is why a directory is best never written twice."""
_SAMPLE_BYTES: Final = 4096
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_DESCRIPTIONS: Final = ("config.json", "adapter_config.json", "params.json", "quantize_config.json")


def fingerprint(model: str, revision: str) -> str:
    """Return the commit of a model of the hub, or a digest of a directory; empty where neither can be told.

    Args:
        model: name on the hub, or a directory.
        revision: branch, tag or commit that was asked for.
    """
    try:
        directory = Path(model)
        return _sample(directory) if directory.is_dir() else _commit(model, revision)
    except OSError as error:
        # Every engine of the tier reads the same files: one that cannot is refused by the others' tier.json.
        logger.warning("The weights of %s cannot be told from others: %s", model, error)
        return ""


def _sample(directory: Path) -> str:
    """Return a digest of the description, and of the sizes and of parts of the weights."""
    digest = hashlib.sha256()
    for path in sorted(each for each in directory.iterdir() if each.suffix in _WEIGHTS or each.name in _DESCRIPTIONS):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb", buffering=0) as file:
            for turn in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * turn // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()[:32]}"


def _commit(model: str, revision: str) -> str:
    """Return the commit that the local cache of the hub has for the revision."""
    # Here and not above: it reads the environment when it is imported, and takes a while.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - takes a while
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - takes a while

    for description in _DESCRIPTIONS:
        try:
            found = try_to_load_from_cache(model, description, revision=revision)
        except HFValidationError:
            return ""
        if isinstance(found, str):
            return Path(found).parent.name
    return ""
