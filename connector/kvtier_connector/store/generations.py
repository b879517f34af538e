# SPDX-License-Identifier: Apache-2.0
"""Finds the generations below a directory: the directory may be one itself, a tier, or the root of a volume.

Reads names only. No thread lives here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.layout import BESIDE_GENERATIONS, BLOCKS, TIER_FILE

MOST_LEVELS = 6
"""A path inside the claim, the tier and the digest; deeper directories belong to somebody else."""

_OF_VLLM = re.compile(r"(.+_[0-9a-f]{12})_r[0-9]+")
"""Directory of vLLM's fs tier for one rank, beside one that describes it: hundreds of thousands may lie below."""


def find_generations(directory: Path, *, fs: FileSystem = LOCAL) -> list[Path]:
    """Return every directory at or below this one that has a ``tier.json`` or blocks, in the order of their paths.

    Raises:
        StoreUnavailable: a directory cannot be looked at.
    """
    try:
        return sorted(_find(fs, directory, MOST_LEVELS))
    except OSError as error:
        raise StoreUnavailable(f"{directory}: cannot be walked: {error}") from error


def is_new_tier(directory: Path, *, fs: FileSystem = LOCAL) -> bool:
    """Return whether the directory can be a tier without generations: absent, empty, or with kvtier's own files only.

    Raises:
        StoreUnavailable: it cannot be looked at.
    """
    try:
        names = {entry.name for entry in fs.scandir(str(directory))}
    except FileNotFoundError:
        return True
    except OSError as error:
        raise StoreUnavailable(f"{directory}: cannot be walked: {error}") from error
    return all(name in BESIDE_GENERATIONS or name.startswith(".") for name in names)


def _find(fs: FileSystem, directory: Path, levels: int) -> Iterator[Path]:
    try:
        entries = fs.scandir(str(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    names = {entry.name for entry in entries}
    if {TIER_FILE, BLOCKS} & names:
        # A generation holds no other: its thousands of directories need not be looked at.
        yield directory
        return
    for entry in entries:
        rank = _OF_VLLM.fullmatch(entry.name)
        if rank is not None and rank[1] in names:
            continue
        if levels > 1 and entry.is_dir(follow_symlinks=False):
            yield from _find(fs, directory / entry.name, levels - 1)
