# SPDX-License-Identifier: Apache-2.0
"""What a verb works on: a tier by name, through the pod that has its volume, or a directory that is mounted here.

A command gives the same document either way. A word with a slash, or that is a directory here, is a directory; with
``-n`` every word is a tier's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.contract.janitor import JANITOR_CONFIG_FILE
from kvtier_connector.janitor import commands
from kvtier_connector.janitor.commands import CommandResult
from kvtier_connector.store.scan import Tell
from kvtier_operator import names
from kvtier_operator.errors import ClusterUnavailable

Function = TypeVar("Function", bound=Callable[..., Any])
_MODULE: Final = "kvtier_connector.janitor.commands"
CONFIG: Final = f"{names.JANITOR_CONFIG_MOUNT}/{JANITOR_CONFIG_FILE}"
"""The janitor's document, in its pod."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which cluster and namespace a person named, if any."""

    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""

    @cached_property
    def person(self) -> Any:
        """Return the connection; made when it is first asked for."""
        # The client takes a second to import, which what needs no cluster does without.
        from kvtier_operator.kube.cli_client import CliClient  # noqa: PLC0415  takes a second

        person = CliClient(kubeconfig=self.kubeconfig or None, context=self.context or None)
        click.get_current_context().call_on_close(person.close)
        return person

    @property
    def asked_namespace(self) -> str:
        """Return the namespace that was named, or that of the context."""
        namespace: str = self.namespace or self.person.namespace
        return namespace


def cluster_options(function: Function) -> Function:
    """Give a verb ``-n``, ``--context`` and ``--kubeconfig``, as kubectl has them."""
    options = (
        click.option("-n", "--namespace", default="", help="namespace of the tier (default: that of the context)"),
        click.option("--context", default="", help="context of the kubeconfig"),
        click.option("--kubeconfig", default="", type=click.Path(), help="file to use instead of $KUBECONFIG"),
    )
    for option in reversed(options):
        function = option(function)
    return function


def is_directory(target: str, where: Where) -> bool:
    """Return whether a word means a directory and not a tier.

    Raises:
        UsageError: it looks like a directory, and there is none.
    """
    if where.namespace:
        return False
    if Path(target).is_dir():
        return True
    if "/" in target or target == ".":
        raise click.UsageError(f"{target} is no directory; a tier is named without a slash, and its namespace by -n")
    return False


def do(verb: str, target: str, where: Where, options: Mapping[str, Any], tell: Tell) -> CommandResult:
    """Run a command on a tier or a directory.

    Raises:
        ConnectorError: it cannot be done.
        ClusterError: the tier, or its janitor, cannot be reached.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if is_directory(target, where):
        return commands.do(verb, Path(target), options, tell)
    if verb == "gc":
        # A tier's own limits, which are those of its janitor.
        options = {"config": CONFIG, **options}
    return _do_in_pod(target, where, {"verb": verb, "config": CONFIG, "options": options}, tell)


def _do_in_pod(tier: str, where: Where, request: Mapping[str, Any], tell: Tell) -> CommandResult:
    pod = janitor_pod(tier, where, str(request["verb"]))
    answers = Answers(tell)
    command = ["python3", "-m", _MODULE, json.dumps(request)]
    code, complaint = where.person.execute(pod, names.JANITOR_CONTAINER, command, answers.hear)
    return answers.outcome(f"the janitor of {tier} ({pod['metadata']['name']})", code, complaint)


class Answers:
    """What a command in a pod says, line by line: how far it is, and what came of it."""

    def __init__(self, tell: Tell) -> None:
        """Have heard nothing yet; `tell` is told how far it is."""
        self._tell = tell
        self._answers: list[dict[str, Any]] = []
        self._stray: list[str] = []

    def hear(self, line: str) -> None:
        """Take a line."""
        try:
            answer = json.loads(line)
        except ValueError:
            self._stray.append(line)
            return
        if "progress" in answer:
            self._tell(*answer["progress"])
        else:
            self._answers.append(answer)

    def outcome(self, who: str, code: int, complaint: str = "") -> CommandResult:
        """Return what came of it.

        Raises:
            ClusterUnavailable: it ended and did not say.
            ConfigInvalid: it could not be done.
        """
        if not self._answers:
            said = " ".join([*self._stray, complaint]).strip()[-500:] or "nothing"
            raise ClusterUnavailable(
                f"{who} ended with {code} and said {said}; an image of another release may not know this verb, and one "
                "that was killed may need more memory: spec.janitor.resources"
            )
        answer = self._answers[-1]
        if "error" in answer:
            raise ConfigInvalid(answer["error"])
        return CommandResult(answer["status"], answer["document"])


_FOR_USE: Final = frozenset({"gc"})
"""Commands that make sense only on blocks that engines use."""


def _why_not(body: names.Manifest, verb: str) -> str | None:
    """Return why a command cannot be done on a tier, going by its connector; None where it may be."""
    connector = body["spec"].get("connector") or {}
    kind, nixl = connector.get("type", "Bundled"), (connector.get("hybrid") or {}).get("nixl")
    if kind == "VLLMTiering":
        # What kvtier's connector wrote before it was changed is still there, and nobody else removes it.
        if verb not in _FOR_USE:
            return None
        return (
            f"spec.connector.type {kind} has files of vLLM's own on the volume, of which {verb} knows nothing; the "
            "janitor keeps them within spec.disk.budget, and inspect, check and purge take what kvtier's "
            "connector has left there"
        )
    if kind != "Bundled" and nixl is None:
        return f"spec.connector.type {kind} keeps nothing on a shared volume"
    if nixl is not None and nixl.get("blocksOf"):
        return f"its blocks are those of tier {nixl['blocksOf']} (spec.connector.hybrid.nixl.blocksOf): name that one"
    return None


def janitor_pod(tier: str, where: Where, verb: str) -> names.Manifest:
    """Return the running janitor of a tier, for a command.

    Raises:
        ClusterError: there is no such tier, it has none, or the command is none for its connector.
    """
    try:
        namespace = where.asked_namespace
    except ClusterUnavailable as error:
        raise ClusterUnavailable(
            f"{tier} is no directory here, and as the name of a tier it takes a cluster: {error}"
        ) from error
    body = where.person.tier(namespace, tier)
    if (why := _why_not(body, verb)) is not None:
        raise ClusterUnavailable(f"tier {tier}: {why}")
    for pod in where.person.pods(namespace, tier, names.COMPONENT_JANITOR):
        is_running = pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        if is_running:
            found: names.Manifest = pod
            return found
    if not (body["spec"].get("janitor") or {}).get("enabled", True):
        raise ClusterUnavailable(
            f"tier {tier} has no janitor (spec.janitor.enabled: false), through whose pod its volume is reached: run "
            "this on a directory, where the volume is mounted"
        )
    raise ClusterUnavailable(
        f"the janitor of tier {tier}, through whose pod its volume is reached, does not run now: kubectl get pods -n "
        f"{namespace} -l {names.LABEL_TIER}={tier}"
    )
