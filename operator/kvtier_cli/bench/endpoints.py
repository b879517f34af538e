# SPDX-License-Identifier: Apache-2.0
"""Who is asked: a tier by its name, or an endpoint by its address; and what their engines count."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from kvtier_cli import status
from kvtier_cli.bench.client import Endpoint
from kvtier_cli.client import Where
from kvtier_operator import names
from kvtier_operator.api.routing_spec import CLIENT_IP, ROUTER
from kvtier_operator.errors import OperatorError

_SECONDS: Final = 10.0
_MOST_FORWARDED: Final = 16
"""Engines of a tier that are asked: each takes a process of kubectl."""
_FORWARDING: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
COUNTED: Final = "vllm:prompt_tokens_total"
"""A metric that every vLLM has."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One of those that are compared."""

    name: str
    endpoint: Endpoint
    longest: int | None = None
    """Tokens of prompt and answer together; None where the endpoint does not say."""
    read_metrics: Callable[[], Sequence[str]] | None = None
    """Returns the metrics of its engines; None where nobody wants them."""
    anew: Callable[[], Target] | None = None
    """Reaches the pods that there are now; None where it was named by its address."""

    def counts(self) -> Mapping[str, Any]:
        """Return what the engines have counted since they started."""
        return {} if self.read_metrics is None else status.hits(list(self.read_metrics()))


@contextlib.contextmanager
def opened(word: str, where: Where, *, wants_metrics: bool, metrics: Mapping[str, str], **ask: Any) -> Iterator[Target]:
    """Reach a target; ends what was begun for it afterwards.

    Args:
        word: ``URL``, ``NAME=URL``, or the name of a tier.
        where: which cluster the tier is in.
        wants_metrics: whether hits are to be counted.
        metrics: addresses of metrics by name of the target, where they are not beside ``/v1``.
        ask: what `Endpoint` has beside the address; the model may be empty.

    Raises:
        UsageError: it cannot be used; the message says which option to change.
    """
    name, _, address = word.partition("=") if "=" in word.partition("://")[0] else ("", "", word)
    if "://" in address:
        url = address.rstrip("/").removesuffix("/v1")
        name = name or url.partition("://")[2]
        target = _target(name, url, None, **ask)
        read = _metrics_reader(name, metrics.get(name, f"{url}/metrics")) if wants_metrics else None
        yield replace(target, read_metrics=read)
        return
    with contextlib.ExitStack() as stack:
        turn = itertools.count()

        def reach() -> Target:
            stack.close()
            urls, pods = stack.enter_context(_forwarded(word, where))

            def fetch() -> list[str]:
                return [where.person.fetch(pod, names.HTTP_PORT, "/metrics") for pod in pods]

            target = _target(word, urls[0], fetch if wants_metrics else None, **ask)
            # It goes on where it was: an odd number of prompts comes to other engines when it is asked again.
            in_turn = (urls[number % len(urls)] for number in turn)
            return replace(target, endpoint=replace(target.endpoint, turns=in_turn), anew=reach)

        yield reach()


def _target(name: str, url: str, read: Callable[[], Sequence[str]] | None, **ask: Any) -> Target:
    key = ask.get("key", "")
    try:
        models = json.loads(_fetch(f"{url}/v1/models", key))["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.UsageError(
            f"{name}: {url}/v1/models does not answer as an OpenAI endpoint ({error}): correct the address, or set the "
            "variable of --key-variable if it asks for a key"
        ) from error
    served = {each["id"]: each for each in models}
    model = ask.pop("model") or next(iter(served), "")
    if model not in served:
        raise click.UsageError(f"{name}: serves no model {model!r}: set --model to {' or '.join(served) or 'one'}")
    return Target(
        name=name,
        endpoint=Endpoint(url=url, model=model, **ask),
        longest=served[model].get("max_model_len"),
        read_metrics=read,
    )


def _metrics_reader(name: str, address: str) -> Callable[[], Sequence[str]]:
    def read() -> Sequence[str]:
        return [_fetch(address, "")]

    try:
        text = read()[0]
        problem = "" if COUNTED in text else f"has no {COUNTED}"
    except OSError as error:
        problem = f"does not answer ({error})"
    if problem:
        raise click.UsageError(
            f"{name}: {address} {problem}, so nobody can say where hits came from: give the engine's address with "
            f"--metrics {name}=URL, or do without with --no-metrics"
        )
    return read


def _fetch(url: str, key: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310  the person's own address
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310  the person's own address
        text: str = answer.read().decode(errors="replace")
        return text


@contextlib.contextmanager
def _forwarded(tier: str, where: Where) -> Iterator[tuple[list[str], list[names.Manifest]]]:
    """Bring a tier to this machine: its router, or each of its engines, since a port is forwarded to one pod."""
    namespace = where.asked_namespace
    try:
        body = where.person.tier(namespace, tier)
        pods = [each for each in where.person.pods(namespace, tier, names.COMPONENT_ENGINE) if _serves(each)]
    except OperatorError as error:
        raise click.UsageError(f"{tier}: {error}; an endpoint is named by its address, http://…") from error
    if not pods:
        raise click.UsageError(f"{tier}: none of its engines serves: kubectl kvtier status {tier} -n {namespace}")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise click.UsageError(f"{tier}: needs kubectl to forward its port: install it, or name the address, http://…")
    options = [f"--context={where.context}"] if where.context else []
    options += [f"--kubeconfig={where.kubeconfig}"] if where.kubeconfig else []
    command = [kubectl, *options, "port-forward", f"--namespace={namespace}"]
    with contextlib.ExitStack() as stack:
        asked = _asked(body, pods)
        yield [stack.enter_context(_forward(tier, [*command, each, f":{names.HTTP_PORT}"])) for each in asked], pods


def _serves(pod: names.Manifest) -> bool:
    return status.is_ready(pod) and "deletionTimestamp" not in pod["metadata"]


def _asked(body: names.Manifest, pods: list[names.Manifest]) -> list[str]:
    """Return whom this client's requests would come to, as ``spec.routing`` has them."""
    routing, ref = (body["spec"].get("routing") or {}).get("type"), names.tier_ref(body)
    if routing == ROUTER:
        return [f"service/{names.router(ref)}"]
    found = sorted(f"pod/{each['metadata']['name']}" for each in pods)
    return found[:1] if routing == CLIENT_IP else found[:_MOST_FORWARDED]


@contextlib.contextmanager
def _forward(tier: str, command: list[str]) -> Iterator[str]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if match := _FORWARDING.search(line):
                    # A line for each connection follows, and a pipe that nobody reads holds them all up.
                    reader = threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True)
                    reader.start()
                    try:
                        yield f"http://127.0.0.1:{match[1]}"
                    finally:
                        process.terminate()
                        reader.join()
                    return
            raise click.UsageError(f"{tier}: its port cannot be forwarded: {said.strip()}; name the address, http://…")
        finally:
            process.terminate()
