# SPDX-License-Identifier: Apache-2.0
"""What people ask for with annotations on the resource: a restart, a pause. Pure.

Annotations and not fields, because they are of the moment: whoever keeps the spec in git need not touch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.errors import SpecInvalid

LONGEST_RESTART: Final = 253


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the annotations ask for."""

    restart: str = ""
    """Any text; another one rolls the engines once."""
    is_paused: bool = False


def read_annotations(body: Mapping[str, Any]) -> Asked:
    """Read the annotations of a KVCacheTier body.

    Raises:
        SpecInvalid: names the annotation that cannot be honoured.
    """
    metadata = body.get("metadata")
    found = (metadata.get("annotations") if isinstance(metadata, Mapping) else None) or {}
    restart, paused = (str(found.get(key, "")) for key in (names.ANNOTATION_RESTART, names.ANNOTATION_PAUSED))
    if len(restart) > LONGEST_RESTART:
        raise SpecInvalid(
            f"metadata.annotations[{names.ANNOTATION_RESTART}]", f"must be at most {LONGEST_RESTART} characters"
        )
    if paused.lower() not in {"", "true", "false"}:
        raise SpecInvalid(
            f"metadata.annotations[{names.ANNOTATION_PAUSED}]", f'must be "true" or "false", found {paused!r}'
        )
    return Asked(restart=restart, is_paused=paused.lower() == "true")
