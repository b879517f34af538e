# SPDX-License-Identifier: Apache-2.0
"""Texts about a plan: every size by its name in the status, and the page of ``kvtier plan``. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtier_operator import quantity
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.api.status_schema import Capacity, PodSizing
from kvtier_operator.plan import TierPlan, diff, nodes
from kvtier_operator.plan.sizing import GIB, LOAD_BYTES_PER_SECOND, PIN_BYTES_PER_SECOND, SCRATCH_BYTES
from kvtier_operator.quantity import show_bytes
from kvtier_operator.snapshot import Nodes

_WIDTH: Final = 100
_UNKNOWN: Final = "unknown"

Row = tuple[str, str, str, str]
"""A name, its amount, the same in tokens, and how it comes about."""


def describe(plan: TierPlan, capacity: Capacity, *, fits: str | None, warning: str, found: Nodes | None) -> str:
    """Return the page of one tier; `fits` tells whether nodes have room, where they are known."""
    spec = plan.spec
    replicas = "1 replica" if spec.replicas == 1 else f"{spec.replicas} replicas"
    rows: list[Row] = [
        ("MODEL", "", "TOKENS", ""),
        ("KV of one token", _bytes_or_unknown(capacity.kv_bytes_per_token), "1", capacity.kv_formula or ""),
        ("one file on the volume", _bytes_or_unknown(capacity.chunk_bytes), *_chunk(plan, capacity)),
        ("", "", "", ""),
        ("TIER", "", "TOKENS", ""),
        *_tiers(plan, capacity, found),
        ("", "", "", ""),
        ("POD", "", "", ""),
        *_pod(plan),
    ]
    notes = [*capacity.notes, *(() if fits is None else (f"nodes: {fits}",)), *filter(None, (warning,))]
    head = f"{plan.tier}: {spec.model.name}, {replicas}, generation {plan.generation.digest}"
    return "\n".join([head, "", *_table(rows), *_notes(notes)]) + "\n"


def describe_diff(tier: str, found: diff.Diff) -> str:
    """Return what an edit of one tier does, field by field and in sum."""
    if not found.changes and not found.restarted_pods:
        return f"{tier}: nothing changes\n"
    rows: list[Row] = [("FIELD", "BEFORE", "AFTER", "ALONE")]
    for change in found.changes:
        found_of = (("empty cache", change.is_new_generation), ("restart", change.is_restart))
        effects = "refused" if change.refusal else ", ".join(text for text, holds in found_of if holds) or "no restart"
        rows.append((change.field, _short(change.before), _short(change.after), effects))
    before, after = found.replicas
    notes = list(diff.warnings(found))
    is_refused = any(change.refusal for change in found.changes)
    if not found.discards_cache and not is_refused:
        notes.append(f"keeps the cache: generation {found.generation} stays")
    if not found.restarted_pods and not is_refused:
        notes.append("restarts no engine" if before == after else f"only {_pods(before, after)}")
    return "\n".join([tier, "", *_table(rows, left=4), *_notes(notes)]) + "\n"


def _pods(before: int, after: int) -> str:
    count = abs(after - before)
    return f"{'adds' if after > before else 'removes'} {count} engine pod{'' if count == 1 else 's'}"


def _short(value: object) -> str:
    if value is None:
        return "-"
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


_LONGEST_VALUE: Final = 32


def _bytes_or_unknown(count: int | None) -> str:
    return _UNKNOWN if count is None else show_bytes(count)


def _tokens(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count:,}"


def _chunk(plan: TierPlan, capacity: Capacity) -> tuple[str, str]:
    chunking, groups = plan.decisions.chunking, capacity.kv_groups or 1
    if chunking.tokens is not None:
        said = "spec.disk.blockTokens"
    else:
        blocks = chunking.blocks or 1
        said = "1 block of vLLM" if blocks == 1 else f"{blocks} blocks of vLLM"
    several = "" if groups == 1 else f", in {groups} files: one for each group of layers"
    return _tokens(chunking.tokens if capacity.chunk_tokens is None else capacity.chunk_tokens), said + several


def _tiers(plan: TierPlan, capacity: Capacity, found: Nodes | None) -> Iterable[Row]:
    spec, sizing = plan.spec, plan.sizing
    missing = ["the size of the weights"] if plan.decisions.weight_bytes is None else []
    if nodes.device_memory(spec, found) is None:
        missing.append("spec.engine.accelerator.memory, or nodes that say it")
    if spec.engine.accelerator.resource != NO_ACCELERATOR:
        yield (
            "accelerators, estimated",
            _bytes_or_unknown(capacity.device_kv_bytes),
            _tokens(capacity.device_kv_tokens),
            capacity.device_formula or f"needs {' and '.join(missing) or 'the KV of one token'}",
        )
    share = f"{spec.cpu.fraction} of {show_bytes(plan.decisions.node_bytes)}" if plan.decisions.node_bytes else ""
    each = f" for each of {sizing.engines_per_pod} engine cores" if sizing.engines_per_pod > 1 else ""
    said = f"spec.cpu.fraction: {share}" if share else "spec.cpu.size"
    where = "file on the node's disk" if spec.connector.is_on_node_disk else "host memory of one engine"
    yield where, show_bytes(plan.decisions.cpu_bytes), _tokens(capacity.cpu_tokens), said + each
    if not spec.connector.uses_volume:
        return
    budget = "spec.disk.budget.maxBytes" if spec.disk.budget.max_bytes is not None else "size of the claim"
    yield "volume, shared by all", _bytes_or_unknown(capacity.disk_bytes), _tokens(capacity.disk_tokens), budget


def _pod(plan: TierPlan) -> Iterable[Row]:
    spec, sizing = plan.spec, plan.sizing
    engines = sizing.engines_per_pod
    is_in_shm = spec.connector.kind.is_in_shm
    tier = f"{show_bytes(sizing.cpu_bytes)} CPU tier + " if is_in_shm else ""
    shared = f"{tier}{show_bytes(sizing.shm_overhead_bytes // engines)} of vLLM"
    starting = (
        f"{sizing.startup_base_seconds} s + {sizing.startup_pin_seconds} s ({show_bytes(engines * sizing.cpu_bytes)} "
        f"pinned at {PIN_BYTES_PER_SECOND // GIB} GiB/s) + {sizing.startup_load_seconds} s ({_weights(plan)} loaded at "
        f"{LOAD_BYTES_PER_SECOND / GIB:g} GiB/s)"
    )
    yield "shared memory", show_bytes(sizing.shm_bytes), "", shared if engines == 1 else f"{engines} x ({shared})"
    pinned = "" if is_in_shm else f"+ {show_bytes(engines * sizing.cpu_bytes)} CPU tier "
    memory = (
        f"{show_bytes(sizing.engine_memory_bytes)} spec.engine.memory + {show_bytes(sizing.shm_bytes)} shared memory "
        f"{pinned}+ {show_bytes(sizing.io_worker_bytes)} to move blocks"
    )
    yield "memory, request = limit", show_bytes(sizing.memory_bytes), "", memory
    yield _storage(plan)
    yield "startup, at most", f"{sizing.startup_seconds} s", "", starting
    resource = spec.engine.accelerator.resource
    if resource != NO_ACCELERATOR:
        yield "devices", str(spec.engine.accelerator.per_pod), "", resource


def _weights(plan: TierPlan) -> str:
    guess = "" if plan.decisions.weight_bytes is not None else "up to "
    return f"{guess}{show_bytes(plan.sizing.weight_bytes)}"


def _storage(plan: TierPlan) -> Row:
    asked = plan.spec.engine.ephemeral_bytes
    if asked is not None:
        return "node's disk, limit", show_bytes(asked), "", "spec.engine.ephemeralStorage"
    files = plan.sizing.engines_per_pod * plan.spec.connector.file_bytes(plan.decisions.cpu_bytes)
    weights = "" if plan.sizing.ephemeral_bytes == SCRATCH_BYTES + files else f" + {_weights(plan)} of weights"
    blocks = f" + {show_bytes(files)} of blocks" if files else ""
    return (
        "node's disk, request",
        show_bytes(plan.sizing.ephemeral_bytes),
        "",
        f"{show_bytes(SCRATCH_BYTES)} caches and logs{weights}{blocks}",
    )


def _table(rows: Sequence[Row], *, left: int = 1) -> list[str]:
    """Align columns: the first `left` to the left, the last as it is, and amounts between them to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row[:3], widths, strict=True))
        ]
        lines.append("  ".join((*cells, row[3])).rstrip())
    return lines


def _notes(notes: Iterable[str]) -> list[str]:
    wrapped = [textwrap.fill(note, _WIDTH, initial_indent="- ", subsequent_indent="  ") for note in notes]
    return ["", *wrapped] if wrapped else []


def terms(sizing: PodSizing, capacity: Capacity | None, *, node_bytes: int | None) -> dict[str, Any]:
    """Return every term that is known, by its name in ``status.sizing``."""
    found: dict[str, Any] = {"nodeBytes": node_bytes, "cpuSize": quantity.format_bytes(sizing.cpu_bytes)}
    for model in filter(None, (sizing, capacity)):
        found |= model.model_dump(mode="json", by_alias=True)
    # Beyond what a field of 64 bits can hold, the API server would refuse the whole status.
    return {
        term: min(value, quantity.LARGEST) if isinstance(value, int) else value
        for term, value in found.items()
        if value not in (None, [])
    }
