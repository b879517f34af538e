# SPDX-License-Identifier: Apache-2.0
"""What ``kvtier status`` shows: pages made from the document of a look. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from kvtier_cli.answers import columns, duration
from kvtier_cli.standing import SOURCES, ready
from kvtier_connector.store.progress import counted, readable_size

Document = Mapping[str, Any]
_COLORS: Final = {"True": "green", "False": "red", "Unknown": "yellow"}
_NEGATIVE: Final = frozenset({"Reconciling", "Stalled", "Paused", "ClaimShared"})
"""Conditions that are well where they are False."""
_WIDTH: Final = 110
_MOST_MESSAGES: Final = 4
_MOST_TENANTS: Final = 5


def many(documents: list[Document], namespace: str) -> str:
    """Return one line for each tier."""
    if not documents:
        where = f"namespace {namespace}" if namespace else "any namespace"
        return f"no tier in {where}: kvtier install samples shows some, kubectl apply makes one\n"
    rows = [("TIER", "READY", "ENGINES", "CPU", "DISK", "REASON")]
    for each in documents:
        engines = f"{sum(pod['ready'] for pod in each['engines'])}/{each['wanted']}"
        use = {tier["name"]: tier for tier in each["tiers"] or ()}
        cpu = (each["sizing"] or {}).get("cpuSize", "-")
        rows.append(
            (each["tier"], ready(each)["status"], engines, cpu, _use(use.get("disk", {})), ready(each)["reason"])
        )
    return columns(rows)


def one(document: Document) -> str:
    """Return a screen about one tier."""
    state = ready(document)
    head = f"{document['tier']}  {document['model']}  Ready={_colored(state['status'], 'Ready')} {state['reason']}\n"
    parts = (
        _conditions(document),
        _engines(document),
        _use_of_tiers(document),
        _hits(document),
    )
    return (
        head
        + "".join(f"\n{title}\n{text}" for title, text in parts if text)
        + "\nNEXT\n"
        + "".join(f"  {line}\n" for line in _next(document))
    )


def _colored(status: str, kind: str) -> str:
    shown = {"True": "False", "False": "True"}.get(status, status) if kind in _NEGATIVE else status
    return click.style(status, fg=_COLORS.get(shown))


def _conditions(document: Document) -> tuple[str, str]:
    rows = [(each["type"], each["status"], each["reason"]) for each in document["conditions"]]
    if not rows:
        return "CONDITIONS", "  none yet: no operator has looked at this tier\n"
    lines = columns(rows, indent=2).splitlines()
    colored = (
        line.replace(f" {status} ", f" {_colored(status, kind)} ", 1)
        for line, (kind, status, _) in zip(lines, rows, strict=True)
    )
    return "CONDITIONS", "".join(f"{line}\n" for line in colored)


def _engines(document: Document) -> tuple[str, str]:
    rows = [
        (each["pod"], "ready" if each["ready"] else each["phase"], counted(each["restarts"], "restart"), each["node"])
        for each in document["engines"]
    ]
    there = sum(each["ready"] for each in document["engines"])
    title = f"ENGINES  {there} of {document['wanted']} ready, mode {document['mode']}"
    return title, columns(rows, indent=2) if rows else ""


def _use(tier: Document) -> str:
    capacity, used = tier.get("capacityBytes"), tier.get("usedBytes")
    if used is None:
        return "-"
    return f"{readable_size(used)} of {readable_size(capacity)}" if capacity else readable_size(used)


def _use_of_tiers(document: Document) -> tuple[str, str]:
    sizing = document["sizing"] or {}
    rows: list[tuple[str, ...]] = []
    if sizing.get("deviceKvTokens"):
        rows.append(("GPU", readable_size(sizing["deviceKvBytes"]), f"{sizing['deviceKvTokens']:,} tokens, estimated"))
    if sizing.get("cpuBytes"):
        rows.append(("CPU", readable_size(sizing["cpuBytes"]), f"{_tokens(sizing, 'cpuTokens')} for each engine"))
    rows += [
        ("disk", _use(tier), ", ".join(filter(None, (_tokens(sizing, "diskTokens"), _blocks(tier)))))
        for tier in document["tiers"] or ()
        if tier["name"] == "disk"
    ]
    usage = document.get("usage") or {}
    rows += [
        ("generation", each["digest"][:16], f"{each.get('role', '')} {_use(each)}, {_blocks(each)}".strip())
        for each in document["generations"] or ()
    ]
    tenants = [each for each in usage.get("tenants", ()) if each["tenant"]]
    largest = sorted(tenants, key=lambda each: -each["used_bytes"])[:_MOST_TENANTS]
    rows += [("tenant", each["tenant"], readable_size(each["used_bytes"])) for each in largest]
    if sizing.get("memoryBytes"):
        rows.append(("pod", readable_size(sizing["memoryBytes"]), "of memory, as request and limit"))
    return "SIZES AND USE", columns(rows, indent=2) if rows else ""


def _tokens(sizing: Document, name: str) -> str:
    return f"{sizing[name]:,} tokens" if sizing.get(name) else ""


def _blocks(tier: Document) -> str:
    return counted(tier["blocks"], "block") if tier.get("blocks") is not None else ""


def _hits(document: Document) -> tuple[str, str]:
    found = document.get("hits")
    if not found:
        return "HITS", ""
    prompt, by_source = found["promptTokens"], found["bySource"]
    rows = [
        (name, f"{by_source.get(source, 0):,} tokens", f"{by_source.get(source, 0) / prompt:.1%}" if prompt else "")
        for source, name in SOURCES.items()
        if source != "p2p" or by_source.get(source)
    ]
    computed = max(0, prompt - sum(by_source.values()))
    rows.append(("computed", f"{computed:,} tokens", f"{computed / prompt:.1%}" if prompt else ""))
    text = columns(rows, indent=2)
    if found["computeTokensPerSecond"]:
        text += (
            f"  measured: computing {found['computeTokensPerSecond']:,.0f} tokens/s, loading "
            f"{found['loadTokensPerSecond']:,.0f} tokens/s; the disk saved {duration(found['prefillSecondsNotSpent'])} "
            "of prefill\n"
        )
    return f"HITS  of {prompt:,} prompt tokens since these engines started", text


def _next(document: Document) -> Iterator[str]:
    """Say what a person would do now, the most pressing first."""
    shown = 0
    for each in document["conditions"]:
        is_well = each["status"] == ("False" if each["type"] in _NEGATIVE else "True")
        if is_well or each["type"] == "Ready" or not each["message"] or each["reason"] == "NotChecked":
            continue
        shown += 1
        if shown <= _MOST_MESSAGES:
            text = f"{each['type']}: {each['message']}"
            yield from textwrap.wrap(text, _WIDTH, subsequent_indent="    ")
    for problem in (document.get("usage") or {}).get("problems", ()):
        yield from textwrap.wrap(f"janitor: {problem}", _WIDTH, subsequent_indent="    ")
    for problem in document.get("silent", ()):
        yield from textwrap.wrap(f"not asked: {problem}", _WIDTH, subsequent_indent="    ")
    if not document["conditions"]:
        yield "kvtier doctor says whether an operator runs, and what it lacks"
    elif not shown:
        yield "nothing: it is well"
