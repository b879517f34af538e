# SPDX-License-Identifier: Apache-2.0
"""Tells pictures, sounds and videos of prompts apart by what they hold: vLLM's block hashes cover an identifier only.

A client may choose that identifier (``uuid``), also as the hash that vLLM computes for other content. So the name of a
block on the volume covers a digest of the processed content as well, as far as the block's prefix has any. Within an
engine vLLM's caches (processor, encoder, GPU) go by the identifier. So one that was seen with two contents, or with one
that cannot be read, keeps all requests that use it off the volume. The scheduler's thread only.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from kvtier_connector.cascade.memory import keep_last
from kvtier_connector.vllm_adapter.fingerprint import add_value

REMEMBERED: Final = 1 << 18
"""Identifiers used last whose content is remembered; about 100 MB."""


class _Known(NamedTuple):
    digest: bytes | None
    """None if the identifier stands for several contents, or for one that cannot be read."""
    item: weakref.ref[Any] | None
    """The content that was digested: a picture that comes again is not read again while vLLM keeps it."""


class KnownMedia:
    """The content of each identifier, as this engine has seen it."""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        """Start with none; the `remembered` used last are kept."""
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._remembered = remembered

    def note(self, feature: MultiModalFeatureSpec) -> bytes | None:
        """Take in that a request has this content, and return its digest; None if there is not one alone."""
        name, item = feature.identifier, feature.data
        known = self._known.get(name)
        if known is None or (known.digest is not None and (known.item is None or known.item() is not item)):
            found = digest_of(item)
            is_one = found is not None and (known is None or known.digest == found)
            known = _Known(found if is_one else None, None if item is None else weakref.ref(item))
        keep_last(self._known, name, known, most=self._remembered)
        return known.digest

    def is_mixed(self, name: str) -> bool:
        """Say whether an identifier does not stand for one known content."""
        known = self._known.get(name)
        return known is not None and known.digest is None


class Media:
    """The pictures, sounds and videos of one prompt."""

    def __init__(self, features: Sequence[MultiModalFeatureSpec], known: KnownMedia) -> None:
        """Read what the request has now; vLLM appends to `features` when a session goes on."""
        self._features, self._known = features, known
        self._digests: list[tuple[int, bytes]] = []
        """For each content its first token, and a digest of it and all before it."""
        self._is_unknown = False

    @property
    def is_mixed(self) -> bool:
        """Whether blocks of the same hash may have been computed with other content."""
        self._read_on()
        return self._is_unknown or any(self._known.is_mixed(each.identifier) for each in self._features)

    def hash_of(self, block_hash: bytes, end: int | None) -> bytes:
        """Return the hash for the volume of a block that ends at this token; None takes it for the end of the prompt.

        It is `block_hash` itself where no content begins before `end`.
        """
        self._read_on()
        begun = (digest for first, digest in reversed(self._digests) if end is None or first < end)
        digest = next(begun, None)
        if digest is None:
            return block_hash
        return hashlib.sha256(b"kvtier media block\0" + digest + block_hash).digest()

    def _read_on(self) -> None:
        for feature in self._features[len(self._digests) :]:
            digest = self._known.note(feature)
            self._is_unknown |= digest is None
            before = self._digests[-1][1] if self._digests else b""
            self._digests.append((feature.mm_position.offset, hashlib.sha256(before + (digest or b"?")).digest()))


def digest_of(item: Mapping[str, Any] | None) -> bytes | None:
    """Return a digest of processed content; None if it is elsewhere or of a kind that cannot be read."""
    if item is None:
        return None
    total = hashlib.sha256()
    try:
        # vLLM's cache in shared memory puts an address, which is a number, in the place of each tensor.
        if not any(_has_tensor(each.data) for each in item.values()):
            return None
        for name in sorted(item):
            add_value(total, name, item[name].data)
    except (TypeError, AttributeError, RuntimeError):
        return None
    return total.digest()


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)
