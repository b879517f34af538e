# SPDX-License-Identifier: Apache-2.0
"""Reports of pods, reduced to the numbers that the operator uses. Pure.

An engine's ``/metrics`` has a thousand lines and more, and twenty are read: no library parses the rest.

Sizes are rounded down to eight significant bits (at most 0.8 % off), and times to the hour. So the status of a quiet
tier stays the same all day.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvtier_connector.contract import usage
from kvtier_connector.contract.engine import SUPPORTED_VLLM
from kvtier_connector.contract.usage import Usage
from kvtier_operator.api.generations_spec import COMPARED
from kvtier_operator.snapshot import EngineReport

_LINE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? ([-+.\deE]+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Numbers of one pod, summed over its engine cores; 0 where it has none yet."""

    disk_tokens: float = 0.0
    """Prompt tokens that came from the volume."""
    written_blocks: float = 0.0
    """Blocks written, or found to be there already."""
    queued_jobs: float = 0.0
    verdicts: float = 0.0
    """Requests that found blocks on the volume, whatever was decided."""
    computed_hits: float = 0.0
    """Of those, the ones that computed them again because that was quicker."""
    finished_requests: float = 0.0
    unfinished_requests: float = 0.0
    """Running and waiting."""
    load_rate: float = 0.0
    compute_rate: float = 0.0
    block_tokens: int = 0


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each sample of vLLM's; a line that cannot be read is left out."""
    for line in text.splitlines():
        match = _LINE.match(line) if line.startswith("vllm:") else None
        if match is not None:
            with contextlib.suppress(ValueError):
                yield match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])


def read_counters(text: str) -> EngineCounters:
    """Return the numbers; a line that cannot be read is left out."""
    found = defaultdict[str, float](float)
    block_tokens = 0
    for name, labels, value in samples(text):
        if name == "vllm:cache_config_info":
            size = labels.get("block_size", "")
            block_tokens = int(size) if size.isdigit() else 0
        field = _FIELDS.get(name)
        if field is None or (field == "disk_tokens" and labels.get("source") != "disk"):
            continue
        found[field] = max(found[field], value) if field in _RATES else found[field] + value
        if field == "verdicts" and labels.get("verdict") == "compute":
            found["computed_hits"] += value
    return EngineCounters(**found, block_tokens=block_tokens)


_RATES: Final = frozenset({"load_rate", "compute_rate"})
"""Fields whose greatest value counts."""

_FIELDS = {
    "vllm:prompt_tokens_cached_by_source_total": "disk_tokens",
    "vllm:kvtier_disk_written_blocks_total": "written_blocks",
    "vllm:kvtier_disk_present_blocks_total": "written_blocks",
    "vllm:kvtier_disk_queued_jobs": "queued_jobs",
    "vllm:kvtier_disk_verdicts_total": "verdicts",
    "vllm:request_success_total": "finished_requests",
    "vllm:num_requests_running": "unfinished_requests",
    "vllm:num_requests_waiting": "unfinished_requests",
    "vllm:kvtier_disk_load_tokens_per_second": "load_rate",
    "vllm:kvtier_disk_compute_tokens_per_second": "compute_rate",
}


_SIGNIFICANT_BITS: Final = 8
_HOUR: Final = 3600
_REFUSED: Final = re.compile(rb"^vllm:kvtier_disk_refused\{([^}]*)\} (\S+)", re.MULTILINE)
_KEY_MISSING: Final = re.compile(rb"^vllm:kvtier_disk_key_missing\{[^}]*\} 1(\.0*)?\s*$", re.MULTILINE)
_INACTIVE: Final = re.compile(rb"^vllm:kvtier_disk_active\{[^}]*\} 0(\.0*)?\s*$", re.MULTILINE)
_BYPASSED: Final = re.compile(rb"^vllm:kvtier_disk_mode\{[^}]*\} 2(\.0*)?\s*$", re.MULTILINE)
_RELEASE: Final = re.compile(rb"^vllm:kvtier_disk_release\{[^}]*\} ([0-2])(?:\.0*)?\s*$", re.MULTILINE)
_VLLM: Final = re.compile(rb"^vllm:kvtier_vllm_release\{([^}]*)\} 1(?:\.0*)?\s*$", re.MULTILINE)
_SIZES: Final = re.compile(
    rb"^vllm:kvtier_(token_bytes|chunk_bytes)\{[^}]*\} (\d+(?:\.\d+)?(?:e\+\d+)?)\s*$", re.MULTILINE
)
_MOST_BYTES: Final = 1 << 50
_FIELD: Final = re.compile(rb'(?:^|,)field="([^"\\]*)"')
_MOST_WORDS: Final = 200
"""Characters of a field's name or a problem that a message repeats."""


def read_usage(body: bytes) -> Usage:
    """Read a janitor's answer; raises ValueError for what is none."""
    found = usage.decode(body)
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
    release = max(map(int, _RELEASE.findall(body)), default=0)
    vllm = (dict(_LABEL.findall(labels.decode(errors="replace"))) for labels in _VLLM.findall(body))
    is_inactive = _INACTIVE.search(body) is not None and _BYPASSED.search(body) is None
    return EngineReport(
        refused=tuple(sorted(refused)),
        is_key_missing=_KEY_MISSING.search(body) is not None,
        release=release,
        unsupported=next(filter(None, map(why_unsupported, vllm)), ""),
        is_detached=is_inactive and not refused and release != COMPARED,
        **{name.decode(): int(size) for name, text in _SIZES.findall(body) if (size := float(text)) < _MOST_BYTES},
    )


def why_unsupported(release: Mapping[str, str]) -> str:
    """Return why the connector takes no part in an engine, by version and support; empty where it does."""
    version, support = (release.get(label, "")[:_MOST_WORDS] for label in ("version", "support"))
    why = f"and this release of kvtier supports {' and '.join(SUPPORTED_VLLM)}: set spec.engine.image to one of these"
    if support == "no_prefix_caching":
        why = "with prefix caching off: remove --no-enable-prefix-caching; its log says where the model needs it off"
    elif support == "unsupported" and version in SUPPORTED_VLLM:
        return f"the connector cannot be imported with this build of vLLM {version}: see the engine's log"
    return "" if support in {"", "supported"} else f"its vLLM is {version}, {why}"


def rounded(number: int) -> int:
    """Return a number rounded down to eight significant bits."""
    shift = max(0, number.bit_length() - _SIGNIFICANT_BITS)
    return number >> shift << shift


def _to_hour(seconds: float) -> float:
    return float(seconds // _HOUR * _HOUR)
