# SPDX-License-Identifier: Apache-2.0
"""What pods say about the volume, reduced to what is worth writing down. Pure.

Sizes are rounded down to eight significant bits (at most 0.8 % off) and times to the hour, so that a tier on which
nothing much happens has one and the same status all day.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from kvtier_connector import contract_usage
from kvtier_connector.contract_usage import Usage
from kvtier_operator.snapshot import EngineReport

_SIGNIFICANT_BITS: Final = 8
_HOUR: Final = 3600
_REFUSED: Final = re.compile(rb"^vllm:kvtier_disk_refused\{([^}]*)\} (\S+)", re.MULTILINE)
_KEY_MISSING: Final = re.compile(rb"^vllm:kvtier_disk_key_missing\{[^}]*\} 1(\.0*)?\s*$", re.MULTILINE)
_INACTIVE: Final = re.compile(rb"^vllm:kvtier_disk_active\{[^}]*\} 0(\.0*)?\s*$", re.MULTILINE)
_BYPASSED: Final = re.compile(rb"^vllm:kvtier_disk_mode\{[^}]*\} 2(\.0*)?\s*$", re.MULTILINE)
_FIELD: Final = re.compile(rb'(?:^|,)field="([^"\\]*)"')
_MOST_WORDS: Final = 200
"""Characters of a field's name or a problem that a message repeats."""


def read_usage(body: bytes) -> Usage:
    """Read a janitor's answer; raises ValueError for what is none."""
    found = contract_usage.decode(body)
    return replace(
        found,
        used_bytes=rounded(found.used_bytes),
        blocks=rounded(found.blocks),
        volume_bytes=rounded(found.volume_bytes),
        volume_free_bytes=rounded(found.volume_free_bytes),
        oldest=_to_hour(found.oldest),
        # Grows all the time; the janitor's own metrics have it.
        evicted_blocks=0,
        quarantined=rounded(found.quarantined),
        generations=tuple(
            replace(
                each,
                used_bytes=rounded(each.used_bytes),
                blocks=rounded(each.blocks),
                last_used=_to_hour(each.last_used),
            )
            for each in sorted(found.generations, key=lambda each: each.digest)
        ),
        tenants=(),
        problems=tuple(problem[:_MOST_WORDS] for problem in found.problems[:3]),
    )


def read_metrics(body: bytes) -> EngineReport:
    """Read what matters here from an engine's metrics."""
    refused = set()
    for labels, value in _REFUSED.findall(body):
        field = _FIELD.search(labels)
        if field is not None and float(value) > 0:
            refused.add(field[1][:_MOST_WORDS].decode(errors="replace"))
    is_inactive = _INACTIVE.search(body) is not None and _BYPASSED.search(body) is None
    return EngineReport(
        refused=tuple(sorted(refused)),
        is_key_missing=_KEY_MISSING.search(body) is not None,
        is_detached=is_inactive and not refused,
    )


def rounded(number: int) -> int:
    """Return a number rounded down to eight significant bits."""
    shift = max(0, number.bit_length() - _SIGNIFICANT_BITS)
    return number >> shift << shift


def _to_hour(seconds: float) -> float:
    return float(seconds // _HOUR * _HOUR)
