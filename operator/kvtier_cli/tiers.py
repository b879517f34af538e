# SPDX-License-Identifier: Apache-2.0
"""The verbs that tell the operator what to do with a tier: pause, mode, restart."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import click

from kvtier_cli import client
from kvtier_cli import output as answers
from kvtier_cli.output import FINE, FOUND
from kvtier_connector.contract import engine
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_operator import names
from kvtier_operator.names import ObjectKey

MODES: Final = ("ReadWrite", "ReadOnly", "Bypass")
_TIER = click.argument("tier")


def _answer(tier: str, output: str, page: str, **document: Any) -> int:
    answers.show({"tier": tier, **document}, output, lambda: page)
    return FOUND if document.get("waits") else FINE


def _waits(tier: str, body: Mapping[str, Any]) -> str:
    """Return until when the operator does nothing about a tier; empty where it works on it."""
    if body["spec"].get("paused") is True:
        return "spec.paused is false"
    asked = (body["metadata"].get("annotations") or {}).get(names.ANNOTATION_PAUSED, "")
    return f"kvtier pause {tier} --off" if str(asked).lower() == "true" else ""


@click.command
@_TIER
@click.option("--off", is_flag=True, help="let the operator work again")
@answers.output_option()
@client.cluster_options
def pause(tier: str, *, off: bool, output: str, **cluster: str) -> int:
    """Let the operator change nothing about TIER, until --off; engines go on, and its status is still reported.

    It is an annotation, so whoever keeps the spec in git need not touch it.
    """
    where = client.Where(**cluster)
    namespace = where.asked_namespace
    body = where.person.tier(namespace, tier)
    if off and (body["spec"].get("paused") is True):
        raise click.UsageError(f"spec.paused of {tier} is true: set it to false where its spec is kept")
    annotations = {names.ANNOTATION_PAUSED: None if off else "true"}
    where.person.change(namespace, tier, {"metadata": {"annotations": annotations}})
    page = f"{tier}: the operator {'works on it again' if off else 'changes nothing any more; --off ends that'}\n"
    return _answer(tier, output, page, paused=not off)


@click.command
@_TIER
@click.argument("mode", type=click.Choice(MODES), required=False)
@answers.output_option()
@client.cluster_options
def mode(tier: str, mode: str | None, *, output: str, **cluster: str) -> int:
    """Show what engines of TIER do with the volume, or set it; they follow within a minute or two, without a restart.

    ReadWrite loads and stores, ReadOnly loads alone, Bypass does not touch the volume. Exit code 1: the tier is paused,
    or the operator has not passed the mode on to the engines within 20 seconds.
    """
    where = client.Where(**cluster)
    namespace = where.asked_namespace
    body = where.person.tier(namespace, tier)
    before, waits = _mode(body), _waits(tier, body)
    if mode is None:
        return _answer(tier, output, f"{tier}: {before}\n", mode=before)
    if mode != before:
        where.person.change(namespace, tier, {"spec": {"disk": {"mode": mode}}})
    follows = f"paused: no engine follows until {waits}" if waits else "engines follow within two minutes"
    if not waits and (waits := _not_passed_on(where, namespace, tier, mode)):
        follows = f"no engine follows yet: {waits}"
    return _answer(tier, output, f"{tier}: {mode}, was {before}; {follows}\n", mode=mode, waits=waits)


def _not_passed_on(where: client.Where, namespace: str, tier: str, mode: str) -> str:
    """Wait until the file that engines follow has the mode; return why it has not, or nothing."""
    name = names.config(names.TierRef(namespace=namespace, name=tier, uid=""))
    key = ObjectKey(api_version="v1", kind="ConfigMap", name=name)
    deadline = time.monotonic() + FOLLOW_SECONDS
    while True:
        found = where.person.cluster.get(key, namespace)
        try:
            if found is not None and engine.decode_live(found["data"][engine.LIVE_FILE]).mode == mode:
                return ""
        except (LookupError, ConfigInvalid):
            pass  # the operator repairs it
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    conditions = (where.person.tier(namespace, tier).get("status") or {}).get("conditions", ())
    ready = next((f"{each['reason']}: {each['message']}" for each in conditions if each["type"] == "Ready"), "")
    what = f"the operator has not made {key}" if found is None else f"the operator has not changed {key}"
    return f"{what}; {ready or 'the tier has no status: `kvtier doctor` says whether an operator runs'}"


FOLLOW_SECONDS: Final = 20.0
"""How long the operator may take to pass a mode on."""


def _mode(body: Mapping[str, Any]) -> str:
    found: str = (body["spec"].get("disk") or {}).get("mode", MODES[0])
    return found


@click.command
@_TIER
@answers.yes_option("replace them")
@answers.output_option()
@client.cluster_options
def restart(tier: str, *, yes: bool, output: str, **cluster: str) -> int:
    """Replace the engines of TIER, one at a time, with what this release of the operator renders.

    What lies on the volume stays; what only their memory holds is computed or loaded again. Without --yes it only says
    which pods would go. Exit code 1: the tier is paused, so none goes yet.
    """
    where = client.Where(**cluster)
    namespace = where.asked_namespace
    body = where.person.tier(namespace, tier)
    waits = _waits(tier, body) if yes else ""
    pods = sorted(each["metadata"]["name"] for each in where.person.pods(namespace, tier, names.COMPONENT_ENGINE))
    if yes:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        patch = {"metadata": {"annotations": {names.ANNOTATION_RESTART: now}}}
        where.person.change(namespace, tier, patch)
    listed = ", ".join(pods) or "no engine: there is none"
    page = f"replaces {listed}, one at a time\n" if yes else f"would replace {listed}\nnothing was done; add --yes\n"
    if waits:
        page = f"paused: nothing is replaced until {waits}; then {listed}, one at a time\n"
    return _answer(tier, output, page, dryRun=not yes, engines=pods, waits=waits)
