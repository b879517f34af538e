# SPDX-License-Identifier: Apache-2.0
"""The verb ``report``: packs a support bundle about tiers, and redacts secrets, prompts and names of tenants.

Any value that may be a secret is redacted unless it is known to be harmless. A tenant has the same mark everywhere, so
that its lines can be matched. The functions `redact_…` are pure.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from kvtier_cli import client, doctor, output, status
from kvtier_cli.output import FINE, FOUND
from kvtier_connector.contract.janitor import JANITOR_PORT
from kvtier_operator import __version__, names
from kvtier_operator.errors import OperatorError

REDACTED: Final = "(redacted)"
_LONGEST_HEAD: Final = 40
_PLAIN_VARIABLE: Final = re.compile(
    r"(KVTIER|VLLM|PYTHON|NCCL|CUDA|OMP|HF_HOME|HF_HUB_OFFLINE|TORCH)[A-Z0-9_]*", re.ASCII
)
_SECRET_NAME: Final = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_NAME: Final = (
    r"[a-z0-9_.-]*(?:token(?!s|iz)|(?:api|access|private|encryption)[-_]?key|secret|passw(?:or)?d|passphrase"
    r"|credential|auth(?![a-z])|(?-i:KEY\b))[a-z0-9_.-]*"
)
"""Names of secrets, but not of counts of tokens, nor tokenizers."""
_VALUE: Final = r"""(?:\[[^\]]*\]?|\\+"[^"]*"?|\\+'[^']*'?|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\S+)"""
_SECRET_KEY: Final = re.compile(rf"(?!secretName$){_NAME}", re.IGNORECASE)
_SECRET_FLAG: Final = re.compile(rf"--?{_NAME}", re.IGNORECASE)
_SECRET_WORDS: Final = (
    re.compile(r"\b(authorization|(set-)?cookie)\b\W+.*", re.IGNORECASE),
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bBearer\s+\S+|\bBasic\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]+"),
    re.compile(r"://[^/\s@]+@"),
    re.compile(rf"""--?{_NAME}\\*["']?[\s,=:]+{_VALUE}""", re.IGNORECASE),
    re.compile(rf"""{_NAME}\\*["']?\s*[=:]\s*{_VALUE}""", re.IGNORECASE),
)
_PROMPT: Final = re.compile(
    r"""prompts?\\*['"]?\s*[:=]|prompt_token_ids|prompt_embeds|(received|generated)\s+(request|response)"""
    r"""|(json|request|response)\s+body"""
    r"""|\b(messages|contents?|inputs?|input_(text|value|ids)|outputs?|output_(text|ids)|texts?|token_ids|completion"""
    r"""|documents?|quer(y|ies)|body|suffix|choices|delta|reasoning(_content)?|instructions)\\*['"]?\s*[:=]""",
    re.IGNORECASE,
)
_TENANT_LABEL: Final = re.compile(r'tenant="([^"]*)"')
_TENANT_PATH: Final = re.compile(r"\btenants/([A-Za-z0-9._-]+)")
_BY_TENANT: Final = frozenset({"quotas"})
_MANAGED: Final = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})


def tenant_mark(name: str) -> str:
    """Return the mark that replaces the name of a tenant."""
    if name in {"", "(other)"}:
        return name
    return f"tenant-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def redact_manifest(node: Any) -> Any:
    """Return an object of Kubernetes, or a part of one, redacted."""
    if isinstance(node, Mapping):
        return {key: _field(str(key), value, node) for key, value in node.items() if key not in _MANAGED}
    if isinstance(node, list):
        return _items(node)
    return _document(node) if isinstance(node, str) else node


def _field(key: str, value: Any, parent: Mapping[str, Any]) -> Any:
    if key == "value" and isinstance(parent.get("name"), str):
        name = parent["name"]
        is_plain = _PLAIN_VARIABLE.fullmatch(name) is not None and _SECRET_NAME.search(name) is None
        return redact_manifest(value) if is_plain else REDACTED
    if key in _BY_TENANT and isinstance(value, Mapping):
        return {tenant_mark(str(name)): redact_manifest(each) for name, each in value.items()}
    if key == "tenant" and isinstance(value, str):
        return tenant_mark(value)
    is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if is_text and (_SECRET_KEY.fullmatch(key) or _PROMPT.fullmatch(f"{key}:")):
        return REDACTED
    return redact_manifest(value)


def _document(content: str) -> str:
    """Return a text redacted; JSON, as in ConfigMaps and annotations, is redacted field by field."""
    if content.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return json.dumps(redact_manifest(json.loads(content)))
    return "\n".join(_records(content.split("\n"), is_cut=False))


def _items(items: list[Any]) -> list[Any]:
    """Return the items redacted, with values that follow the flag of a secret."""
    found: list[Any] = []
    follows = False
    for item in items:
        if follows:
            found.append(REDACTED)
        elif isinstance(item, str) and _SECRET_FLAG.match(item) and "=" in item:
            found.append(f"{item.partition('=')[0]}={REDACTED}")
        else:
            found.append(redact_manifest(item))
        follows = not follows and isinstance(item, str) and bool(_SECRET_FLAG.match(item)) and "=" not in item
    return found


def redact_text(lines: str) -> str:
    """Return an exposition, or another text of independent lines, redacted."""
    return "".join(f"{redact_line(each)}\n" for each in lines.splitlines())


def redact_log(lines: str, *, is_cut: bool) -> str:
    """Return a log redacted, also of prompts over several lines; a cut one may begin in the middle of a record."""
    return "".join(f"{each}\n" for each in _records(lines.splitlines(), is_cut=is_cut))


_HEAD: Final = re.compile(
    r"(?:\([^()]*\)\s*)?(?:\[?(?:\d{4}-)?\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:\d\d-\d\d \d\d:\d\d:\d\d\s*)?)\s*(?:\[[^\]]*\])?"
)
"""Beginning of a record of vLLM, of its web server or of ours. vLLM repeats it on each line of a record."""


def _records(lines: Iterable[str], *, is_cut: bool) -> Iterator[str]:
    """Yield lines redacted; a record that may quote a prompt keeps only the beginning of its first line."""
    every = list(lines)
    quoting: str | None = "" if is_cut and any(map(_HEAD.match, every)) else None
    for each in every:
        head = _HEAD.match(each)
        if quoting is not None and (head is None or head[0] == quoting):
            yield REDACTED
            continue
        # A line of JSON is a record by itself.
        is_open = _PROMPT.search(each) is not None and not each.startswith("{")
        quoting = ("" if head is None else head[0]) if is_open else None
        yield redact_line(each)


def redact_line(words: str) -> str:
    """Return one line redacted; a line that may quote a prompt keeps only its beginning."""
    found = _PROMPT.search(words)
    kept = words[: found.start()] if found else words
    for pattern in _SECRET_WORDS:
        kept = pattern.sub(REDACTED, kept)
    kept = _TENANT_LABEL.sub(lambda found: f'tenant="{tenant_mark(found[1])}"', kept)
    kept = _TENANT_PATH.sub(lambda found: f"tenants/{tenant_mark(found[1])}", kept)
    return f"{kept[:_LONGEST_HEAD]}{REDACTED}: the rest may quote a prompt" if found else kept


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
Output of kvtier report. Values of variables, tokens, lines that may quote a prompt and names of tenants were redacted
before anything was written; Secrets were not read. Look through it before you send it.
"""


@click.command(epilog=output.examples("kvtier report llama", "kvtier report -n ai --file ai.tar.gz --no-logs"))
@click.argument("tier", required=False, shell_complete=client.complete_tier)
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="the archive  [default: kvtier-report-TIME.tar.gz here]",
)
@click.option("--logs/--no-logs", default=True, help="also the last lines of the pods' logs")
@output.output_option()
@client.cluster_options
def report(tier: str | None, *, file: Path | None, logs: bool, output_format: str, where: client.Where) -> int:
    """Pack the state of TIER, or of every tier of the namespace, into one redacted archive for support.

    Exit code 1: something could not be read; the archive says what.
    """
    namespace = where.asked_namespace
    bodies = [where.client.tier(namespace, tier)] if tier else where.client.tiers(namespace)
    made = datetime.now(UTC)
    file = file or Path(f"kvtier-report-{made:%Y%m%dT%H%M%SZ}.tar.gz")
    if file.exists():
        raise click.UsageError(f"{file} is there already: name another --file, or remove it")
    pack = Pack(file)
    with contextlib.closing(pack):
        pack.add("README.txt", _READ_ME)
        pack.add("report.json", json.dumps({"kvtier": __version__, "made": made.isoformat(), "namespace": namespace}))
        examined = functools.partial(doctor.examine, where)
        pack.try_to(
            "doctor.json", lambda: json.dumps(redact_manifest([each._asdict() for each in examined()]), indent=2)
        )
        for body in bodies:
            _add_tier(pack, where, body, with_logs=logs)
        pack.add("unread.txt", "\n".join(pack.unread))
    document = {"file": str(file), "tiers": len(bodies), "parts": pack.parts, "unread": pack.unread}
    output.show(document, output_format, lambda: _page(document))
    return FOUND if pack.unread else FINE


def _page(document: dict[str, Any]) -> str:
    lines = [f"{document['file']}: {document['parts']} parts about {document['tiers']} tier(s), redacted"]
    lines += [f"not read: {each}" for each in document["unread"]]
    return "\n".join([*lines, "look through it before you send it"]) + "\n"


class Pack:
    """An archive that its owner alone may read. It redacts everything, and lists in `unread` what it could not add."""

    def __init__(self, file: Path) -> None:
        """Create the archive; the file must not exist."""
        self.unread: list[str] = []
        self.parts = 0
        file.touch(mode=0o600, exist_ok=False)
        self._archive = tarfile.open(file, "w:gz")  # noqa: SIM115  closed when the context is left

    def close(self) -> None:
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
        """Add a text, or list why it could not be read."""
        try:
            self.add(name, make())
        except OperatorError as error:
            self.unread.append(redact_line(f"{name}: {error}"))

    def add_manifests(self, name: str, read: Callable[[], list[Any]]) -> None:
        """Add objects, redacted."""
        self.try_to(name, lambda: output.as_yaml(redact_manifest(read())))


def _add_tier(pack: Pack, where: client.Where, body: names.Manifest, *, with_logs: bool) -> None:
    namespace, tier = body["metadata"]["namespace"], body["metadata"]["name"]
    base = f"{namespace}.{tier}"
    selector = f"{names.LABEL_TIER}={tier}"
    pack.add_manifests(f"{base}/tier.yaml", lambda: [body])
    pack.try_to(f"{base}/status.txt", lambda: _status(where, namespace, tier))
    for version, kind in _KINDS:
        read = functools.partial(where.client.cluster.list, version, kind, namespace=namespace, selector=selector)
        pack.add_manifests(f"{base}/{kind.lower()}s.yaml", read)
    events = functools.partial(where.client.cluster.events, namespace, uid=body["metadata"]["uid"])
    pack.add_manifests(f"{base}/events.yaml", events)
    try:
        pods = where.client.cluster.list("v1", "Pod", namespace=namespace, selector=selector)
    except OperatorError as error:
        pack.unread.append(redact_line(f"{base}: metrics and logs of its pods: {error}"))
        return
    for pod in pods:
        _add_pod(pack, where, pod, base, with_logs=with_logs)


def _status(where: client.Where, namespace: str, tier: str) -> str:
    document = redact_manifest(status.read_tier(where, namespace, tier, asks_pods=True))
    return click.unstyle(status.one(document, is_verbose=True)) + "\n" + json.dumps(document, indent=2) + "\n"


def _add_pod(pack: Pack, where: client.Where, pod: names.Manifest, base: str, *, with_logs: bool) -> None:
    name = pod["metadata"]["name"]
    component = (pod["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT)
    port = {names.COMPONENT_ENGINE: names.HTTP_PORT, names.COMPONENT_JANITOR: JANITOR_PORT}.get(component or "")
    if port and status.is_ready(pod):
        metrics = functools.partial(where.client.fetch, pod, port, "/metrics")
        pack.try_to(f"{base}/{name}/metrics.txt", lambda: redact_text(metrics()))
    if not with_logs:
        return
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        pack.try_to(f"{base}/{name}/{container['name']}.log", functools.partial(_log, where, pod, container["name"]))


def _log(where: client.Where, pod: names.Manifest, container: str) -> str:
    lines = where.client.log(pod, container, lines=_LOG_LINES)
    return redact_log(lines, is_cut=lines.count("\n") >= _LOG_LINES)
