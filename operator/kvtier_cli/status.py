# SPDX-License-Identifier: Apache-2.0
"""How a tier stands: what the operator says of it, and what its engines and its janitor answer when they are asked.

What ``kvtier status`` shows: pages made from the document of a look. Pure.

The verb ``status``: one screen about a tier, or one line about each.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import click

from kvtier_cli import client
from kvtier_cli import output as answers
from kvtier_cli.client import Where
from kvtier_cli.output import FINE, FOUND, columns, duration
from kvtier_connector.contract.janitor import JANITOR_PORT
from kvtier_connector.contract.usage import USAGE_PATH
from kvtier_connector.store.scan import counted, readable_size
from kvtier_operator import names
from kvtier_operator.errors import ClusterError, OperatorError

Document = dict[str, Any]
SOURCES: Final = {"device": "GPU", "host": "CPU", "disk": "disk", "p2p": "peers"}
"""Where vLLM says cached tokens came from, and what people call it."""
_MOST_ASKED: Final = 8
_LINE: Final = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$")
_SOURCE: Final = re.compile(r'source="(\w+)"')
_PROMPT: Final = "vllm:prompt_tokens_total"
_CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"
_SAVED: Final = "vllm:kvtier_disk_saved_seconds_total"
_COMPUTE_RATE: Final = "vllm:kvtier_disk_compute_tokens_per_second"
_LOAD_RATE: Final = "vllm:kvtier_disk_load_tokens_per_second"


def read_tier(where: Where, namespace: str, tier: str, *, asks_pods: bool) -> Document:
    """Return how one tier stands.

    Args:
        where: the cluster.
        namespace: of the tier.
        tier: its name.
        asks_pods: whether engines and janitor are asked, too.

    Raises:
        ClusterError: there is none, or it cannot be read.
    """
    body = where.person.tier(namespace, tier)
    status = body.get("status") or {}
    pods = where.person.pods(namespace, tier, names.COMPONENT_ENGINE)
    document: Document = {
        "tier": f"{namespace}/{tier}",
        "model": (body["spec"].get("model") or {}).get("name", ""),
        "mode": (body["spec"].get("disk") or {}).get("mode", "ReadWrite"),
        "engines": [_engine(each) for each in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))],
        "wanted": body["spec"].get("replicas", 1),
        "conditions": [
            {name: each.get(name, "") for name in ("type", "status", "reason", "message")}
            for each in status.get("conditions", ())
        ],
        **{name: status.get(name) for name in ("sizing", "storage", "generation", "generations", "tiers")},
    }
    if asks_pods:
        document |= _ask(where, namespace, tier, pods)
    return document


def _engine(pod: names.Manifest) -> Document:
    status = pod.get("status", {})
    containers = status.get("containerStatuses") or ()
    return {
        "pod": pod["metadata"]["name"],
        "node": pod.get("spec", {}).get("nodeName", ""),
        "phase": "Terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Unknown"),
        "ready": is_ready(pod),
        "started": status.get("startTime", ""),
        "restarts": sum(int(each.get("restartCount", 0)) for each in containers),
    }


def is_ready(pod: names.Manifest) -> bool:
    """Tell whether a pod gets requests."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any((each.get("type"), each.get("status")) == ("Ready", "True") for each in conditions)


def _ask(where: Where, namespace: str, tier: str, pods: list[names.Manifest]) -> Document:
    """Ask the pods that serve; who does not answer is named, and counts for nothing."""
    asked = [pod for pod in pods if is_ready(pod)][:_MOST_ASKED]
    janitors = [pod for pod in where.person.pods(namespace, tier, names.COMPONENT_JANITOR) if is_ready(pod)][:1]
    pages = [(pod, names.HTTP_PORT, "/metrics") for pod in asked]
    pages += [(pod, JANITOR_PORT, USAGE_PATH) for pod in janitors]
    silent: list[str] = []

    def fetch(page: tuple[names.Manifest, int, str]) -> str:
        try:
            text: str = where.person.fetch(*page)
        except OperatorError as error:
            silent.append(str(error))
            return ""
        return text

    with ThreadPoolExecutor(max_workers=_MOST_ASKED + 1) as pool:
        texts = list(pool.map(fetch, pages))
    usage = json.loads(texts[-1]) if janitors and texts[-1] else None
    return {"hits": hits(texts[: len(asked)]), "usage": usage, "silent": silent}


def hits(expositions: list[str]) -> Document:
    """Add up what engines say of prompt tokens since they started; empty where none says anything."""
    totals: dict[str, float] = {}
    rates: dict[str, list[float]] = {_COMPUTE_RATE: [], _LOAD_RATE: []}
    prompt, seconds = 0.0, 0.0
    for text in expositions:
        cached, rate, counted = 0.0, 0.0, 0.0
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name, labels, value = match[1], match[2] or "", float(match[3])
            if name == _PROMPT:
                prompt += value
            elif name == _CACHED and (source := _SOURCE.search(labels)):
                totals[source[1]] = totals.get(source[1], 0.0) + value
                cached += value if source[1] == "disk" else 0.0
            elif name == _SAVED:
                counted += value
            elif name in rates and value > 0:
                rates[name].append(value)
                rate = max(rate, value) if name == _COMPUTE_RATE else rate
        # An engine with an earlier connector counts no seconds.
        seconds += counted or (cached / rate if rate else 0.0)
    if not expositions:
        return {}
    return {
        "promptTokens": round(prompt),
        "bySource": {source: round(count) for source, count in totals.items() if count},
        "computeTokensPerSecond": _mean(rates[_COMPUTE_RATE]),
        "loadTokensPerSecond": _mean(rates[_LOAD_RATE]),
        "prefillSecondsNotSpent": round(seconds, 1),
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 1) if values else 0.0


def ready(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the condition that sums the others up."""
    return next(
        (each for each in document["conditions"] if each["type"] == "Ready"),
        {"type": "Ready", "status": "Unknown", "reason": "NoOperator", "message": ""},
    )


TierDocument = Mapping[str, Any]
_COLORS: Final = {"True": "green", "False": "red", "Unknown": "yellow"}
_NEGATIVE: Final = frozenset({"Reconciling", "Stalled", "Paused", "ClaimShared"})
"""Conditions that are well where they are False."""
_WIDTH: Final = 110
_MOST_MESSAGES: Final = 4
_MOST_TENANTS: Final = 5


def many(documents: list[TierDocument], namespace: str) -> str:
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


def one(document: TierDocument) -> str:
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


def _conditions(document: TierDocument) -> tuple[str, str]:
    rows = [(each["type"], each["status"], each["reason"]) for each in document["conditions"]]
    if not rows:
        return "CONDITIONS", "  none yet: no operator has looked at this tier\n"
    lines = columns(rows, indent=2).splitlines()
    colored = (
        line.replace(f" {status} ", f" {_colored(status, kind)} ", 1)
        for line, (kind, status, _) in zip(lines, rows, strict=True)
    )
    return "CONDITIONS", "".join(f"{line}\n" for line in colored)


def _engines(document: TierDocument) -> tuple[str, str]:
    rows = [
        (each["pod"], "ready" if each["ready"] else each["phase"], counted(each["restarts"], "restart"), each["node"])
        for each in document["engines"]
    ]
    there = sum(each["ready"] for each in document["engines"])
    title = f"ENGINES  {there} of {document['wanted']} ready, mode {document['mode']}"
    return title, columns(rows, indent=2) if rows else ""


def _use(tier: TierDocument) -> str:
    capacity, used = tier.get("capacityBytes"), tier.get("usedBytes")
    if used is None:
        return "-"
    return f"{readable_size(used)} of {readable_size(capacity)}" if capacity else readable_size(used)


def _use_of_tiers(document: TierDocument) -> tuple[str, str]:
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


def _tokens(sizing: TierDocument, name: str) -> str:
    return f"{sizing[name]:,} tokens" if sizing.get(name) else ""


def _blocks(tier: TierDocument) -> str:
    return counted(tier["blocks"], "block") if tier.get("blocks") is not None else ""


def _hits(document: TierDocument) -> tuple[str, str]:
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


def _next(document: TierDocument) -> Iterator[str]:
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


_CLEAR: Final = "\x1b[H\x1b[2J"


@click.command
@click.argument("tier", required=False)
@click.option("-A", "--all-namespaces", is_flag=True, help="tiers of every namespace")
@click.option("-w", "--watch", is_flag=True, help="show it anew until Ctrl-C")
@click.option(
    "--interval", type=click.IntRange(1, 3600), default=5, show_default=True, help="seconds between two looks"
)
@click.option("--ask/--no-ask", default=True, help="ask engines and janitor for hits and use (takes the right to exec)")
@answers.output_option()
@client.cluster_options
def status(  # noqa: PLR0913 - options
    tier: str | None,
    *,
    all_namespaces: bool,
    watch: bool,
    interval: int,
    ask: bool,
    output: str,
    **cluster: str,
) -> int:
    """Show how TIER stands: conditions, sizes, use, hits by tier, and what to do next; without TIER, all of them.

    Exit code 1: a tier is not Ready.
    """
    where = client.Where(**cluster)
    if tier and all_namespaces:
        raise click.UsageError("-A is for all tiers: leave TIER out, or name its namespace with -n")
    namespace = "" if all_namespaces else where.asked_namespace

    def look() -> Any:
        if tier:
            return read_tier(where, namespace, tier, asks_pods=ask)
        bodies = where.person.tiers(namespace)
        return [
            read_tier(where, each["metadata"]["namespace"], each["metadata"]["name"], asks_pods=False)
            for each in bodies
        ]

    def page(found: Any) -> str:
        return one(found) if tier else many(found, namespace)

    if watch:
        return _watch(look, page, interval, output)
    found = look()
    answers.show(found, output, lambda: page(found))
    return _judge(found)


def _judge(found: Any) -> int:
    documents: list[Mapping[str, Any]] = found if isinstance(found, list) else [found]
    return FINE if all(ready(each)["status"] == "True" for each in documents) else FOUND


def _watch(look: Callable[[], Any], page: Callable[[Any], str], interval: int, output: str) -> int:
    code = FINE
    try:
        while True:
            try:
                found = look()
            except ClusterError as error:
                # An API server that is away for a moment is what one watches for.
                click.echo(f"{error}; asked again in {interval} s", err=True)
            else:
                code = _judge(found)
                if sys.stdout.isatty() and output == "table":
                    click.echo(_CLEAR, nl=False)
                answers.show(found, output, functools.partial(page, found))
            time.sleep(interval)
    except KeyboardInterrupt:
        return code
