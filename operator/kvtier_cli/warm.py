# SPDX-License-Identifier: Apache-2.0
"""The verb ``warm``: a Job beside the engines sends them prompts, and looks whether each block came to the volume."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from kvtier_cli import answers, parameters, targets
from kvtier_cli.exits import FINE, FOUND
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor import prompts
from kvtier_connector.store.progress import Tell, counted, readable_size
from kvtier_operator import names
from kvtier_operator.api.volume_spec import SHARED
from kvtier_operator.errors import ClusterError, ClusterForbidden, ClusterUnavailable, KindMissing
from kvtier_operator.parts import warm_job

_MOST_BYTES: Final = 700_000
"""Of a Secret, which may have 1 MiB with its frame in base64."""
_FILE: Final = "prompts.jsonl.gz"
_LOOK_SECONDS: Final = 0.5
_LAST_LOOKS: Final = 10
"""At the log of a Job that has ended, for it may not be read at once."""
_ENDED: Final = frozenset({"Complete", "Failed"})


@click.command
@click.argument("tier")
@click.option(
    "-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="prompts, one JSON value a line"
)
@click.option("--claim", help="PersistentVolumeClaim with the prompts, for more than a Secret holds")
@click.option("--path", "path_", default="prompts.jsonl", show_default=True, help="of the file in --claim")
@click.option("--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="prompts at once")
@click.option(
    "--patience", type=parameters.SECONDS, default="2m", show_default=True, help="for the blocks of one prompt"
)
@click.option("--timeout", type=parameters.SECONDS, default="6h", show_default=True, help="for all of it")
@answers.output_option()
@targets.cluster_options
def warm(  # noqa: PLR0913 - options
    tier: str,
    *,
    file: Path | None,
    claim: str | None,
    path_: str,
    concurrency: int,
    patience: float,
    timeout: float,
    output: str,
    **cluster: str,
) -> int:
    """Send prompts to the engines of TIER, with one token of answer each, until all their blocks are on the volume.

    A line of the file is {"messages": [...]}, {"prompt": "..."}, a text in quotes, or a line of an OpenAI batch file.
    The prompts lie in a Secret while it runs. Exit code 1: blocks did not come, or an engine did not take a prompt.
    """
    if (file is None) == (claim is None):
        raise click.UsageError("say where the prompts are: -f FILE, or --claim NAME")
    where = targets.Where(**cluster)
    content = None if file is None else _read(file)
    namespace = where.asked_namespace
    run = _Run(where, namespace, tier)
    source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    wanted = warm_job.Prompts(volume=source, file=path_, concurrency=concurrency, patience_seconds=patience)
    with answers.progress() as tell:
        document = run.do(content, wanted, timeout=timeout, tell=tell)
    answers.show(document, output, lambda: page(document))
    return FINE if not (document.get("problem") or document.get("missing") or document.get("failed")) else FOUND


def _read(file: Path) -> bytes:
    """Return the prompts, packed; each line is looked at first, so that none is refused after an hour."""
    try:
        count = sum(1 for _ in prompts.read(file))
    except ConfigInvalid as error:
        raise click.UsageError(f"{file}: {error}") from error
    if not count:
        raise click.UsageError(f"{file}: holds no prompt")
    text = file.read_bytes()
    packed = text if file.suffix == ".gz" else gzip.compress(text, mtime=0)
    if len(packed) > _MOST_BYTES:
        raise click.UsageError(
            f"{file}: takes {readable_size(len(packed))} packed, and a Secret holds {readable_size(_MOST_BYTES)}: put "
            "it on a volume, and name its claim with --claim, or send it in parts"
        )
    return packed


def page(document: dict[str, Any]) -> str:
    """Say for a person what came of it."""
    if "prompts" not in document:
        return f"{document['problem']}\n"
    there = f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])} on the volume"
    lines = [f"{document['warm']} of {counted(document['prompts'], 'prompt')} are warm: {there}"]
    if document["short"]:
        lines.append(f"{document['short']} are shorter than one block, and are always computed")
    if document["missing"]:
        lines.append(f"{counted(document['missing'], 'block')} did not come to the volume")
    if document["failed"]:
        lines.append(f"{counted(document['failed'], 'prompt')} were not taken by an engine")
    if document["problem"]:
        lines.append(f"first problem: {document['problem']}")
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have what ends a process end it as Ctrl-C does, so that it cleans up; what is ignored (nohup) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not ours to handle
        return
    wanted = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {each: signal.getsignal(each) for each in wanted if signal.getsignal(each) is not signal.SIG_IGN}

    def interrupt(*_: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not end the cleaning up
        raise KeyboardInterrupt

    try:
        for each in before:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Run:
    """One Job, from its beginning to its end; both it and its Secret are removed, whatever happens.

    The Secret is the Job's, and the Job has a time to live: where this process is killed, the cluster removes both.
    """

    def __init__(self, where: targets.Where, namespace: str, tier: str) -> None:
        self._person = where.person
        self._namespace = namespace
        self._tier = names.tier_ref(self._person.tier(namespace, tier))

    def do(self, content: bytes | None, wanted: warm_job.Prompts, *, timeout: float, tell: Tell) -> dict[str, Any]:
        """Run it and return what it found; `content` are the prompts, if they are on no volume."""
        template, host = self._engines()
        claims = [each for each in template["spec"]["volumes"] if each["name"] == "blocks"]
        token = hashlib.sha256((content or wanted.file.encode()) + str(time.time_ns()).encode()).hexdigest()[:8]
        name = f"{names.warm(self._tier)}-{token}"
        if content is not None:
            secret = {"secret": {"secretName": name, "defaultMode": 0o440}}
            wanted = replace(wanted, volume=secret, file=_FILE)
        job = warm_job.job(
            self._tier,
            template,
            wanted,
            name=name,
            host=host,
            deadline_seconds=int(timeout),
            is_on_one_node=any(self._is_on_one_node(each) for each in claims),
        )
        with _interrupted_by_signals():
            try:
                # The pod waits for the Secret, which is the Job's from its first moment on.
                made = self._create("batch/v1", "jobs", job)
                if content is not None:
                    self._create("v1", "secrets", self._secret(made, content))
                return self._follow(name, tell, timeout)
            finally:
                self._remove(f"/api/v1/namespaces/{self._namespace}/secrets/{name}", exists=content is not None)
                self._remove(f"/apis/batch/v1/namespaces/{self._namespace}/jobs/{name}")

    def _engines(self) -> tuple[names.Manifest, str]:
        """Return the pod template of the engines, and the address of their Service."""
        name = names.engine(self._tier)
        what = f"read what serves tier {self._tier.name}"
        try:
            base = f"namespaces/{self._namespace}"
            found = self._person.ask(f"/apis/apps/v1/{base}/deployments/{name}", what)
            service = self._person.ask(f"/api/v1/{base}/services/{name}", what)
        except KindMissing as error:
            raise ClusterUnavailable(f"tier {self._tier.name} has no engines yet; kvtier status says why") from error
        address = service["spec"].get("clusterIP", "None")
        host = f"{name}.{self._namespace}.svc" if address in {"", "None"} else address
        return found["spec"]["template"], host

    def _is_on_one_node(self, volume: names.Manifest) -> bool:
        """Tell whether only one node can mount the tier's volume; False where a person may not know."""
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        path = f"/api/v1/namespaces/{self._namespace}/persistentvolumeclaims/{claim}"
        try:
            found = self._person.ask(path, f"read claim {claim}")
        except (ClusterForbidden, KindMissing):
            return False
        return SHARED not in found["spec"].get("accessModes", [SHARED])

    def _secret(self, job: names.Manifest, content: bytes) -> names.Manifest:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
        metadata = names.metadata(self._tier, name, component=names.COMPONENT_WARM)
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            # The Job's alone: an object goes when the last of its owners has gone.
            "metadata": {**metadata, "ownerReferences": [owner]},
            "data": {_FILE: base64.b64encode(content).decode()},
        }

    def _create(self, version: str, plural: str, body: names.Manifest) -> names.Manifest:
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        path = f"{root}/namespaces/{self._namespace}/{plural}"
        made: names.Manifest = self._person.post(path, body, f"create {body['kind']} {body['metadata']['name']}")
        return made

    def _remove(self, path: str, *, exists: bool = True) -> None:
        """Remove one object, whatever became of the others; say so where it stays."""
        if not exists:
            return
        try:
            self._person.cluster.request("DELETE", f"{path}?propagationPolicy=Background", what=f"delete {path}")
        except KindMissing:
            return  # it never came to be, or somebody was first
        except ClusterError as error:
            kind, name = path.split("/")[-2:]
            click.echo(f"kvtier: {error}; remove it: kubectl delete -n {self._namespace} {kind} {name}", err=True)

    def _follow(self, name: str, tell: Tell, timeout: float) -> dict[str, Any]:
        """Look until the Job has ended; it goes on where nobody answers a look."""
        end, looks_left = time.monotonic() + timeout + 60, _LAST_LOOKS
        while time.monotonic() < end:
            try:
                ended, told = self._ended(name), self._last_line(name)
            except KindMissing as error:
                raise ClusterUnavailable(f"Job {name} was deleted before it had ended: run this again") from error
            except ClusterUnavailable:
                time.sleep(_LOOK_SECONDS)
                continue
            if "progress" in told:
                tell(*told["progress"])
            if ended is not None and told.get("document"):
                found: dict[str, Any] = told["document"]
                return found
            looks_left -= ended is not None
            if ended is not None and not looks_left:
                return {"problem": f"Job {name} ended without a word: {ended.get('message', '')}"}
            time.sleep(_LOOK_SECONDS)
        raise ClusterUnavailable(f"Job {name} has not ended within {timeout:.0f} s")

    def _ended(self, name: str) -> names.Manifest | None:
        """Return the condition by which the Job says that it has ended."""
        path = f"/apis/batch/v1/namespaces/{self._namespace}/jobs/{name}"
        conditions = self._person.ask(path, f"read Job {name}").get("status", {}).get("conditions", ())
        return next((each for each in conditions if each["status"] == "True" and each["type"] in _ENDED), None)

    def _last_line(self, name: str) -> dict[str, Any]:
        """Return the last thing that the newest pod of the Job has said."""
        pods = self._person.cluster.list("v1", "Pod", namespace=self._namespace, selector=f"job-name={name}")
        begun = [each for each in pods if each.get("status", {}).get("containerStatuses")]
        if not begun:
            return {}
        pod = max(begun, key=lambda each: str(each["metadata"].get("creationTimestamp", "")))
        try:
            lines = self._person.log(pod, names.WARM_CONTAINER, lines=1).strip().splitlines()
            found = json.loads(lines[-1]) if lines else {}
        except (ClusterUnavailable, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
