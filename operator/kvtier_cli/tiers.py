# SPDX-License-Identifier: Apache-2.0
"""The verbs that change a tier through the operator: pause, mode, restart."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import click

from kvtier_cli import client, output
from kvtier_cli.output import FINE, FOUND
from kvtier_connector.contract import engine
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_operator import names
from kvtier_operator.names import ObjectKey

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
    if off and (body["spec"].get("paused") is True):
        raise click.UsageError(f"spec.paused of {tier} is true: set it to false where its spec is kept")
    annotations = {names.ANNOTATION_PAUSED: None if off else "true"}
    where.client.change(namespace, tier, {"metadata": {"annotations": annotations}})
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
    name = names.config(names.TierRef(namespace=namespace, name=tier, uid=""))
    key = ObjectKey(api_version="v1", kind="ConfigMap", name=name)
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
    pods = sorted(each["metadata"]["name"] for each in where.client.pods(namespace, tier, names.COMPONENT_ENGINE))
    if yes:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        patch = {"metadata": {"annotations": {names.ANNOTATION_RESTART: now}}}
        where.client.change(namespace, tier, patch)
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
