# SPDX-License-Identifier: Apache-2.0
"""The verbs about a tier: status shows it; pause, mode and restart change it through the operator.

The document of `status` joins what the operator writes with the answers of engines and janitor.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import click

from kvtier_cli import client, output
from kvtier_cli.client import Where
from kvtier_cli.engines.look import engine_page, look_at, metrics_page
from kvtier_cli.output import FINE, FOUND, columns, counted, duration
from kvtier_connector.contract import engine
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.contract.janitor import JANITOR_PORT
from kvtier_connector.contract.usage import USAGE_PATH
from kvtier_operator import names
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import OperatorError
from kvtier_operator.names import ObjectKey
from kvtier_operator.observe import engine_view
from kvtier_operator.parts.external.pods import attached_pods, external_of
from kvtier_operator.plan.reported import REPORTED
from kvtier_operator.quantity import show_bytes

Document = dict[str, Any]
_MOST_ASKED: Final = 8


def read_tier(where: Where, namespace: str, tier: str, *, asks_pods: bool) -> Document:
    """Return the document of one tier, with the answers of engines and janitor if they are asked.

    Raises:
        ClusterError: the tier does not exist, or cannot be read.
    """
    body = where.client.tier(namespace, tier)
    status = body.get("status") or {}
    pods = where.client.pods(namespace, tier, names.COMPONENT_ENGINE)
    if external := external_of(body):
        pods = attached_pods(where.client.cluster, namespace, external)
    document: Document = {
        "tier": f"{namespace}/{tier}",
        "model": (body["spec"].get("model") or {}).get("name", ""),
        "mode": (body["spec"].get("disk") or {}).get("mode", "ReadWrite"),
        "engines": [_engine(each) for each in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))],
        "wanted": len(pods) if external else body["spec"].get("replicas", 1),
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
    return {
        "pod": pod["metadata"]["name"],
        "node": pod.get("spec", {}).get("nodeName", ""),
        "phase": "Terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Unknown"),
        "ready": is_ready(pod),
        "started": status.get("startTime", ""),
        "restarts": sum(int(each.get("restartCount", 0)) for each in (status.get("containerStatuses") or ())),
    }


def is_ready(pod: names.Manifest) -> bool:
    """True if the pod receives requests."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any((each.get("type"), each.get("status")) == ("Ready", "True") for each in conditions)


def _ask(where: Where, namespace: str, tier: str, pods: list[names.Manifest]) -> Document:
    """Ask the ready pods; those that do not answer are listed in `silent`."""
    asked = [pod for pod in pods if is_ready(pod)][:_MOST_ASKED]
    janitors = [pod for pod in where.client.pods(namespace, tier, names.COMPONENT_JANITOR) if is_ready(pod)][:1]
    pages = [(pod, *metrics_page(pod)) for pod in asked]
    pages += [(pod, JANITOR_PORT, USAGE_PATH, names.JANITOR_CONTAINER) for pod in janitors]
    silent: list[str] = []

    def fetch(page: tuple[names.Manifest, int, str, str]) -> str:
        try:
            return str(where.client.fetch(*page))
        except OperatorError as error:
            silent.append(str(error))
            return ""

    with ThreadPoolExecutor(max_workers=_MOST_ASKED + 1) as pool:
        texts = list(pool.map(fetch, pages))
    usage = json.loads(texts[-1]) if janitors and texts[-1] else None
    return {"hits": engine_view.hits(texts[: len(asked)]), "usage": usage, "silent": silent}


def ready(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the condition Ready, which summarises the others."""
    return next(
        (each for each in document["conditions"] if each["type"] == "Ready"),
        {"type": "Ready", "status": "Unknown", "reason": "NoOperator", "message": ""},
    )


TierDocument = Mapping[str, Any]
_COLORS: Final = {"True": "green", "False": "red", "Unknown": "yellow"}
_NEGATIVE: Final = frozenset({"Reconciling", "Stalled", "Paused", "ClaimShared"})
"""Conditions whose good value is False."""
_SILENT_REASONS: Final = frozenset({"NotChecked", "NotApplicable"})
"""Reasons of conditions that say nothing about the tier."""
_WIDTH: Final = 110
_MOST_MESSAGES: Final = 4
_MOST_TENANTS: Final = 5


def many(documents: Sequence[TierDocument], namespace: str) -> str:
    """Return one line for each tier."""
    if not documents:
        where = f"namespace {namespace}" if namespace else "any namespace"
        return f"no tier in {where}: kvtier install samples shows some, kubectl apply makes one\n"
    rows = [("TIER", "READY", "ENGINES", "CPU", "DISK", "REASON")]
    for each in documents:
        engines = f"{sum(pod['ready'] for pod in each['engines'])}/{each['wanted']}"
        use = {tier["name"]: tier for tier in each["tiers"] or ()}
        cpu = (each["sizing"] or {}).get("cpuSize", "-")
        state = ready(each)
        rows.append((each["tier"], _colored(state), engines, cpu, _use(use.get("disk", {})), state["reason"]))
    return columns(rows)


def one(document: TierDocument, *, is_verbose: bool = False) -> str:
    """Return a screen about one tier: problems, then engines, use and hits, then the next steps."""
    state = ready(document)
    head = f"{document['tier']}  {document['model']}  Ready={_colored(state)} {state['reason']}\n"
    parts = (_conditions(document, is_verbose=is_verbose), _engines(document), _use_of_tiers(document), _hits(document))
    shown = "".join(f"\n{title}\n{text}" for title, text in parts if text)
    return "".join([head, shown, "\nNEXT\n", *(f"  {line}\n" for line in _next(document))])


def _severity(condition: TierDocument) -> int:
    """Return 0 for a problem, 1 for a condition that is not known yet, 2 for a good one."""
    status = condition["status"]
    if status == "Unknown":
        return 2 if condition["reason"] in _SILENT_REASONS else 1
    good = "False" if condition["type"] in _NEGATIVE else "True"
    return 2 if status == good or condition["reason"] == Reason.BUDGETS_FIT.value else 0


def _colored(condition: TierDocument) -> str:
    status: str = condition["status"]
    color = {0: "red", 1: "yellow"}.get(_severity(condition), "green" if status != "Unknown" else None)
    return click.style(status, fg=color) if color else status


def _conditions(document: TierDocument, *, is_verbose: bool) -> tuple[str, str]:
    """Return the conditions, problems first; good ones are only counted, unless all are asked for."""
    found = sorted(document["conditions"], key=_severity)
    if not found:
        return "CONDITIONS", "  none yet: no operator has looked at this tier\n"
    shown = [each for each in found if is_verbose or _severity(each) < 2]  # noqa: PLR2004 - good, as above
    text = columns([(each["type"], _colored(each), each["reason"]) for each in shown], indent=2) if shown else ""
    if hidden := len(found) - len(shown):
        text += f"  {hidden} without a problem: -v shows them\n"
    return "CONDITIONS", text


def _engines(document: TierDocument) -> tuple[str, str]:
    rows = [
        (
            each["pod"],
            click.style("ready", fg="green") if each["ready"] else click.style(each["phase"], fg="yellow"),
            counted(each["restarts"], "restart"),
            each["node"],
        )
        for each in document["engines"]
    ]
    there = sum(each["ready"] for each in document["engines"])
    title = f"ENGINES  {there} of {document['wanted']} ready, mode {document['mode']}"
    return title, columns(rows, indent=2) if rows else ""


def _use(tier: TierDocument) -> str:
    capacity, used = tier.get("capacityBytes"), tier.get("usedBytes")
    if used is None:
        return "-"
    return f"{show_bytes(used)} of {show_bytes(capacity)}" if capacity else show_bytes(used)


def _use_of_tiers(document: TierDocument) -> tuple[str, str]:
    sizing = document["sizing"] or {}
    rows: list[tuple[str, ...]] = []
    if sizing.get("kvBytesPerToken"):
        source = sizing["kvFormula"] if sizing.get("kvFormula", "").startswith(REPORTED) else ""
        rows.append(("KV", show_bytes(sizing["kvBytesPerToken"]), f"for each token {source}".strip()))
    if sizing.get("deviceKvTokens"):
        rows.append(("GPU", show_bytes(sizing["deviceKvBytes"]), f"{sizing['deviceKvTokens']:,} tokens, estimated"))
    if sizing.get("cpuBytes"):
        rows.append(("CPU", show_bytes(sizing["cpuBytes"]), f"{_tokens(sizing, 'cpuTokens')} for each engine"))
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
    rows += [("tenant", each["tenant"], show_bytes(each["used_bytes"])) for each in largest]
    if sizing.get("memoryBytes"):
        rows.append(("pod", show_bytes(sizing["memoryBytes"]), "of memory, as request and limit"))
    return "SIZES AND USE", columns(rows, indent=2) if rows else ""


def _tokens(sizing: TierDocument, name: str) -> str:
    return f"{sizing[name]:,} tokens" if sizing.get(name) else ""


def _blocks(tier: TierDocument) -> str:
    return counted(tier["blocks"], "block") if tier.get("blocks") is not None else ""


def _hits(document: TierDocument) -> tuple[str, str]:
    found = document.get("hits")
    if not found:
        return "HITS", ""
    text = columns([(name, f"{count:,} tokens", share) for name, count, share in engine_view.shares(found)], indent=2)
    if found["computeTokensPerSecond"]:
        rates = (f"{found[name]:,.0f} tokens/s" for name in ("computeTokensPerSecond", "loadTokensPerSecond"))
        saved = f"the disk saved {duration(found['prefillSecondsNotSpent'])} of prefill"
        text += f"  measured: computing {', loading '.join(rates)}; {saved}\n"
    return f"HITS  of {found['promptTokens']:,} prompt tokens since these engines started", text


def _next(document: TierDocument) -> Iterator[str]:
    """Yield the next steps, those of problems first."""
    found = [each for each in document["conditions"] if each["type"] != "Ready" and each["message"]]
    problems = [each for severity in (0, 1) for each in found if _severity(each) == severity]
    lines = [f"{each['type']}: {each['message']}" for each in problems[:_MOST_MESSAGES]]
    lines += [f"janitor: {problem}" for problem in (document.get("usage") or {}).get("problems", ())]
    lines += [f"no answer: {problem}" for problem in document.get("silent", ())]
    for line in lines:
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent="    ")
    if not document["conditions"]:
        yield "kvtier doctor says whether an operator runs, and what it lacks"
    elif not lines:
        yield "nothing: no problem is known"


@click.command(epilog=output.examples("kvtier status llama -v", "kvtier status --engine llama-engine-7d9f8c6b5-x2x4q"))
@click.argument("tier", required=False, shell_complete=client.complete_tier)
@click.option("-A", "--all-namespaces", is_flag=True, help="tiers of every namespace")
@click.option("--engine", "pod", metavar="POD", help="what one engine is doing, from its metrics and its log")
@click.option("-v", "--verbose", is_flag=True, help="also conditions without a problem")
@click.option("--ask/--no-ask", default=True, help="ask engines and janitor for hits and use (takes the right to exec)")
@output.output_option()
@client.cluster_options
def status(  # noqa: PLR0913 - options
    tier: str | None,
    *,
    all_namespaces: bool,
    pod: str | None,
    verbose: bool,
    ask: bool,
    output_format: str,
    where: client.Where,
) -> int:
    """Show problems, sizes, use and hits of TIER, and the next steps; without TIER, one line for each tier.

    Exit code 1: a tier is not Ready, or the engine serves without the volume although it may use it.
    """
    if (tier and (pod or all_namespaces)) or (pod and all_namespaces):
        raise click.UsageError("TIER, --engine and -A exclude each other: use one, and -n for the namespace")
    if pod:
        seen = look_at(where, where.asked_namespace, pod)
        output.show(seen, output_format, lambda: engine_page(seen))
        return FOUND if engine_view.is_without_volume(seen) else FINE
    namespace = "" if all_namespaces else where.asked_namespace

    if tier:
        document = read_tier(where, namespace, tier, asks_pods=ask)
        output.show(document, output_format, lambda: one(document, is_verbose=verbose))
        found = [document]
    else:
        keys = [(each["metadata"]["namespace"], each["metadata"]["name"]) for each in where.client.tiers(namespace)]
        found = [read_tier(where, *key, asks_pods=False) for key in keys]
        output.show(found, output_format, lambda: many(found, namespace))
    return FINE if all(ready(each)["status"] == "True" for each in found) else FOUND


MODES: Final = ("ReadWrite", "ReadOnly", "Bypass")


def _answer(tier: str, output_format: str, page: str, **document: Any) -> int:
    output.show({"tier": tier, **document}, output_format, lambda: page)
    return FOUND if document.get("waits") else FINE


def _waits(tier: str, body: Mapping[str, Any]) -> str:
    """Return what ends the pause of a tier; empty if it is not paused."""
    if body["spec"].get("paused") is True:
        return "spec.paused is false"
    asked = (body["metadata"].get("annotations") or {}).get(names.ANNOTATION_PAUSED, "")
    return f"kvtier pause {tier} --off" if str(asked).lower() == "true" else ""


@click.command(epilog=output.examples("kvtier pause llama", "kvtier pause llama --off"))
@client.tier_argument
@click.option("--off", is_flag=True, help="let the operator work again")
@output.output_option()
@client.cluster_options
def pause(tier: str, *, off: bool, output_format: str, where: client.Where) -> int:
    """Stop the operator from changing TIER, until --off. Engines go on, and the status is still reported.

    The pause is an annotation, so a spec that is kept in git stays as it is.
    """
    namespace = where.asked_namespace
    body = where.client.tier(namespace, tier)
    if off and body["spec"].get("paused") is True:
        raise click.UsageError(f"spec.paused of {tier} is true: set it to false where its spec is kept")
    patch = {"metadata": {"annotations": {names.ANNOTATION_PAUSED: None if off else "true"}}}
    where.client.change(namespace, tier, patch)
    page = f"{tier}: the operator {'works on it again' if off else 'changes nothing any more; --off ends that'}\n"
    return _answer(tier, output_format, page, paused=not off)


@click.command(epilog=output.examples("kvtier mode llama", "kvtier mode llama Bypass"))
@client.tier_argument
@click.argument("mode", type=click.Choice(MODES, case_sensitive=False), required=False)
@output.output_option()
@client.cluster_options
def mode(tier: str, mode: str | None, *, output_format: str, where: client.Where) -> int:
    """Show whether engines of TIER use the volume, or set it. They follow within two minutes, without a restart.

    ReadWrite loads and stores, ReadOnly only loads, Bypass does not touch the volume. Exit code 1: the tier is paused,
    or the operator has not passed the mode on within 20 seconds.
    """
    namespace = where.asked_namespace
    body = where.client.tier(namespace, tier)
    before, waits = (body["spec"].get("disk") or {}).get("mode", MODES[0]), _waits(tier, body)
    if mode is None:
        return _answer(tier, output_format, f"{tier}: {before}\n", mode=before)
    if mode != before:
        where.client.change(namespace, tier, {"spec": {"disk": {"mode": mode}}})
    follows = f"paused: no engine follows until {waits}" if waits else "engines follow within two minutes"
    if not waits and (waits := _not_passed_on(where, namespace, tier, mode)):
        follows = f"no engine follows yet: {waits}"
    return _answer(tier, output_format, f"{tier}: {mode}, was {before}; {follows}\n", mode=mode, waits=waits)


def _not_passed_on(where: client.Where, namespace: str, tier: str, mode: str) -> str:
    """Wait until the file that engines follow has the mode; return why it does not have it, or nothing."""
    ref = names.TierRef(namespace=namespace, name=tier, uid="")
    key = ObjectKey(api_version="v1", kind="ConfigMap", name=names.config(ref))
    deadline = time.monotonic() + FOLLOW_SECONDS
    while True:
        found = where.client.cluster.get(key, namespace)
        try:
            if found is not None and engine.decode_live(found["data"][engine.LIVE_FILE]).mode == mode:
                return ""
        except (LookupError, ConfigInvalid):
            pass  # the operator repairs it
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    conditions = (where.client.tier(namespace, tier).get("status") or {}).get("conditions", ())
    ready = next((f"{each['reason']}: {each['message']}" for each in conditions if each["type"] == "Ready"), "")
    what = f"the operator has not made {key}" if found is None else f"the operator has not changed {key}"
    return f"{what}; {ready or 'the tier has no status: `kvtier doctor` says whether an operator runs'}"


FOLLOW_SECONDS: Final = 20.0
"""Time for the operator to pass a mode on."""


@click.command(epilog=output.examples("kvtier restart llama", "kvtier restart llama --yes"))
@client.tier_argument
@output.yes_option("replace them")
@output.output_option()
@client.cluster_options
def restart(tier: str, *, yes: bool, output_format: str, where: client.Where) -> int:
    """Replace the engines of TIER, one at a time, by pods that this release of the operator renders.

    Blocks on the volume stay; blocks in memory are loaded or computed again. Without --yes the pods are only listed.
    Exit code 1: the tier is paused, so no pod goes yet.
    """
    namespace = where.asked_namespace
    body = where.client.tier(namespace, tier)
    waits = _waits(tier, body) if yes else ""
    if external_of(body):
        remedy = "restart the object that makes them, as with `kubectl rollout restart`"
        raise click.UsageError(f"engines of {tier} are those of another owner, which kvtier does not replace: {remedy}")
    pods = sorted(each["metadata"]["name"] for each in where.client.pods(namespace, tier, names.COMPONENT_ENGINE))
    if yes:
        annotations = {names.ANNOTATION_RESTART: datetime.now(UTC).isoformat(timespec="seconds")}
        where.client.change(namespace, tier, {"metadata": {"annotations": annotations}})
    listed = ", ".join(pods)
    if not pods:
        page = f"{tier} has no engine: nothing to replace\n"
    elif waits:
        page = f"paused: nothing is replaced until {waits}; then {listed}, one at a time\n"
    elif yes:
        page = f"replaces {listed}, one at a time\n"
    else:
        page = f"would replace {listed}, one at a time\nnothing was done; add --yes\n"
    return _answer(tier, output_format, page, dryRun=not yes, engines=pods, waits=waits)
