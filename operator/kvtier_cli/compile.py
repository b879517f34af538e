# SPDX-License-Identifier: Apache-2.0
"""The verb ``compile``: a Job compiles what engines compile at their start, and puts it on the tier's volume."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import click

from kvtier_cli import answers, parameters, targets
from kvtier_cli.exits import FINE, FOUND
from kvtier_operator import names
from kvtier_operator.errors import ClusterUnavailable, KindMissing
from kvtier_operator.parts import compiled

_LOOK_SECONDS: Final = 1.0


@click.command(name="compile")
@click.argument("tier")
@click.option("--timeout", type=parameters.SECONDS, default="1h", show_default=True, help="for the engine of the Job")
@click.option("--set", "is_set", is_flag=True, help="write the digest into the tier, which replaces its engines")
@answers.output_option()
@targets.cluster_options
def compile_(tier: str, *, timeout: float, is_set: bool, output: str, **cluster: str) -> int:
    """Start one more engine of TIER in a Job, and keep what it compiles on the volume, for engines to start with.

    It needs the devices of an engine until it serves. Engines use the cache whose digest spec.engine.compileCache has,
    and no other. Compile anew after a change of the image, the model or the flags. Exit code 1: it did not serve.
    """
    where = targets.Where(**cluster)
    namespace = where.asked_namespace
    person = where.person
    body = person.tier(namespace, tier)
    kind = (body["spec"].get("connector") or {}).get("type", "Bundled")
    if kind != "Bundled":
        raise ClusterUnavailable(
            f"tier {tier} has spec.connector.type {kind}: engines start with what was compiled with Bundled only, "
            "which keeps it on its volume"
        )
    ref = names.tier_ref(body)
    try:
        found = person.ask(
            f"/apis/apps/v1/namespaces/{namespace}/deployments/{names.engine(ref)}", f"read the engines of {tier}"
        )
    except KindMissing as error:
        raise ClusterUnavailable(f"tier {tier} has no engines yet; kvtier status says why") from error
    root = ((body.get("status") or {}).get("generation") or {}).get("root", "")
    if not root:
        raise ClusterUnavailable(f"tier {tier} has no generation yet; kvtier status says why")
    name = f"{ref.name}-compile-{int(time.time())}"
    job = compiled.job(ref, found["spec"]["template"], name=name, root=root, deadline_seconds=int(timeout))
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    person.post(jobs, job, f"create Job {name}")
    try:
        document = _follow(person, namespace, name, seconds=timeout + 180)
    finally:
        person.cluster.request("DELETE", f"{jobs}/{name}?propagationPolicy=Background", what=f"delete Job {name}")
    if is_set and "digest" in document:
        cache = {"compileCache": {"digest": document["digest"]}}
        person.change(namespace, tier, {"spec": {"engine": cache}})
    answers.show(document, output, lambda: page(document, tier, namespace, is_set=is_set))
    return FOUND if "problem" in document else FINE


def page(document: dict[str, Any], tier: str, namespace: str, *, is_set: bool) -> str:
    """Say for a person what came of it."""
    if "problem" in document:
        return f"{document['problem']}\n"
    text = f"{document['files']} files, {document['bytes']} bytes, by an engine that served after "
    text += f"{document['seconds']} s\ndigest: {document['digest']}\n"
    if is_set:
        return f"{text}engines of {tier} are replaced, and start with it\n"
    patch = json.dumps({"spec": {"engine": {"compileCache": {"digest": document["digest"]}}}})
    return f"{text}kubectl patch kvt {tier} -n {namespace} --type=merge -p '{patch}'\n"


def _follow(person: Any, namespace: str, name: str, *, seconds: float) -> dict[str, Any]:
    """Look until the Job's pod has ended, and return its last words."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for pod in person.cluster.list("v1", "Pod", namespace=namespace, selector=f"job-name={name}"):
            for status in pod.get("status", {}).get("containerStatuses") or ():
                ended = (status.get("state") or {}).get("terminated")
                if ended is not None:
                    return _words(ended, pod["metadata"]["name"])
        time.sleep(_LOOK_SECONDS)
    raise ClusterUnavailable(
        f"Job {name} has not ended within {seconds:.0f} s: no node may have room for one engine more"
    )


def _words(ended: dict[str, Any], pod: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(ended.get("message", ""))
    except ValueError:
        return {"problem": f"pod {pod} ended with {ended.get('exitCode')}: {ended.get('message', '')[-500:]}"}
    return found
