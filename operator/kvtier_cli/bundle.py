# SPDX-License-Identifier: Apache-2.0
"""The verb ``report``: a support bundle with what is known of tiers, and nothing that is secret."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from kvtier_cli import answers, doctor, redaction, standing, status_page, targets
from kvtier_cli.exits import FINE, FOUND
from kvtier_connector.contract_janitor import JANITOR_PORT
from kvtier_operator import __version__, names
from kvtier_operator.errors import OperatorError

_LOG_LINES: Final = 2000
_KINDS: Final = (
    ("apps/v1", "Deployment"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Pod"),
    ("v1", "Service"),
    ("batch/v1", "Job"),
)
_READ_ME: Final = """\
What kvtier report found. Values of variables, tokens, lines that may quote a prompt and names of tenants were taken
out before anything was written; Secrets were not read. Look through it before you send it.
"""


@click.command
@click.argument("tier", required=False)
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="where to write it  [default: kvtier-report-TIME.tar.gz here]",
)
@click.option("--logs/--no-logs", default=True, help="the last lines of what pods logged, too")
@answers.output_option()
@targets.cluster_options
def report(tier: str | None, *, file: Path | None, logs: bool, output: str, **cluster: str) -> int:
    """Pack what support needs to see of TIER, or of every tier of the namespace, into one archive, redacted.

    Exit code 1: something could not be read; the archive says what.
    """
    where = targets.Where(**cluster)
    namespace = where.asked_namespace
    bodies = [where.person.tier(namespace, tier)] if tier else where.person.tiers(namespace)
    made = datetime.now(UTC)
    file = file or Path(f"kvtier-report-{made:%Y%m%dT%H%M%SZ}.tar.gz")
    if file.exists():
        raise click.UsageError(f"{file} is there already: name another --file, or remove it")
    pack = Pack(file)
    with pack:
        pack.add("README.txt", _READ_ME)
        pack.add("report.json", json.dumps({"kvtier": __version__, "made": made.isoformat(), "namespace": namespace}))
        pack.try_to("doctor.json", lambda: _doctor(where))
        for body in bodies:
            _add_tier(pack, where, body, with_logs=logs)
        pack.add("unread.txt", "\n".join(pack.unread))
    document = {"file": str(file), "tiers": len(bodies), "parts": pack.parts, "unread": pack.unread}
    answers.show(document, output, lambda: _page(document))
    return FOUND if pack.unread else FINE


def _doctor(where: targets.Where) -> str:
    return json.dumps(redaction.manifest([asdict(each) for each in doctor.examine(where)]), indent=2)


def _page(document: dict[str, Any]) -> str:
    lines = [f"{document['file']}: {document['parts']} parts about {document['tiers']} tier(s), redacted"]
    lines += [f"not read: {each}" for each in document["unread"]]
    return "\n".join([*lines, "look through it before you send it"]) + "\n"


class Pack:
    """An archive that whoever made it may read alone; what cannot be added is listed. Everything is redacted here."""

    def __init__(self, file: Path) -> None:
        """Make the archive; it must not be there."""
        self.unread: list[str] = []
        self.parts = 0
        file.touch(mode=0o600, exist_ok=False)
        self._archive = tarfile.open(file, "w:gz")  # noqa: SIM115  closed when the context is left

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """Write the end of the archive."""
        self._archive.close()

    def add(self, name: str, content: str) -> None:
        """Add a text."""
        entry = tarfile.TarInfo(f"kvtier-report/{name}")
        data = content.encode()
        entry.size, entry.mode = len(data), 0o600
        self._archive.addfile(entry, io.BytesIO(data))
        self.parts += 1

    def try_to(self, name: str, make: Callable[[], str]) -> None:
        """Add what can be read, or say why it cannot."""
        try:
            content = make()
        except OperatorError as error:
            self.unread.append(redaction.line(f"{name}: {error}"))
            return
        self.add(name, content)

    def add_manifests(self, name: str, read: Callable[[], list[Any]]) -> None:
        """Add objects, redacted."""
        self.try_to(name, lambda: answers.as_yaml(redaction.manifest(read())))

    def add_metrics(self, name: str, read: Callable[[], str]) -> None:
        """Add an exposition, redacted."""
        self.try_to(name, lambda: redaction.text(read()))

    def add_log(self, name: str, read: Callable[[], str]) -> None:
        """Add the last lines of a log, redacted."""

        def redacted() -> str:
            lines = read()
            return redaction.log(lines, is_cut=lines.count("\n") >= _LOG_LINES)

        self.try_to(name, redacted)


def _add_tier(pack: Pack, where: targets.Where, body: names.Manifest, *, with_logs: bool) -> None:
    namespace, tier = body["metadata"]["namespace"], body["metadata"]["name"]
    base = f"{namespace}.{tier}"
    selector = f"{names.LABEL_TIER}={tier}"
    pack.add_manifests(f"{base}/tier.yaml", lambda: [body])
    pack.try_to(f"{base}/status.txt", lambda: _status(where, namespace, tier))
    for version, kind in _KINDS:
        read = functools.partial(where.person.cluster.list, version, kind, namespace=namespace, selector=selector)
        pack.add_manifests(f"{base}/{kind.lower()}s.yaml", read)
    pack.add_manifests(
        f"{base}/events.yaml", lambda: where.person.cluster.events(namespace, uid=body["metadata"]["uid"])
    )
    try:
        pods = where.person.cluster.list("v1", "Pod", namespace=namespace, selector=selector)
    except OperatorError as error:
        pack.unread.append(redaction.line(f"{base}: metrics and logs of its pods: {error}"))
        return
    for pod in pods:
        _add_pod(pack, where, pod, base, with_logs=with_logs)


def _status(where: targets.Where, namespace: str, tier: str) -> str:
    document = redaction.manifest(standing.look(where, namespace, tier, asks_pods=True))
    return click.unstyle(status_page.one(document)) + "\n" + json.dumps(document, indent=2) + "\n"


def _add_pod(pack: Pack, where: targets.Where, pod: names.Manifest, base: str, *, with_logs: bool) -> None:
    name = pod["metadata"]["name"]
    component = (pod["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT)
    port = {names.COMPONENT_ENGINE: names.HTTP_PORT, names.COMPONENT_JANITOR: JANITOR_PORT}.get(component or "")
    if port and standing.is_ready(pod):
        pack.add_metrics(f"{base}/{name}/metrics.txt", lambda: str(where.person.fetch(pod, port, "/metrics")))
    if not with_logs:
        return
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        read = functools.partial(where.person.log, pod, container["name"], lines=_LOG_LINES)
        pack.add_log(f"{base}/{name}/{container['name']}.log", read)
