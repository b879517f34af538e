# SPDX-License-Identifier: Apache-2.0
"""The verb ``doctor``: checks a cluster for everything that kvtier needs, with a remedy for each thing that lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

import click

from kvtier_cli import client, install, output
from kvtier_cli.output import FINE, FOUND
from kvtier_operator import __version__, names
from kvtier_operator.errors import ClusterError, ClusterForbidden, KindMissing

OLDEST_MINOR: Final = 29
SHARED: Final = re.compile(
    r"cephfs|nfs|efs|filestore|lustre|fsx|azurefile|file\.csi\.azure|glusterfs|weka|vast|beegfs|gpfs|spectrumscale|juicefs",
    re.IGNORECASE,
)
"""Names of provisioners whose volumes several nodes can mount."""
_INSTALL: Final = "kvtier install generate | kubectl apply --server-side -f - (--help: images of your own)"
_ACCELERATORS: Final = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe", "gpu.intel.com/i915")
_COLORS: Final = {"ok": "green", "warning": "yellow", "missing": "red", "unknown": "cyan"}
_RIGHTS: Final = (
    (names.GROUP, names.PLURAL, "", "create", "apply tiers"),
    (names.GROUP, names.PLURAL, "", "patch", "pause, mode and restart"),
    ("", "pods", "exec", "create", "verbs on the volume of a tier, and bench"),
    ("", "pods", "log", "get", "report"),
)


class Finding(NamedTuple):
    """Result of one check."""

    what: str
    state: Literal["ok", "warning", "missing", "unknown"]
    message: str
    remedy: str = ""


@click.command(epilog=output.examples("kvtier doctor", "kvtier doctor -n ai -o json"))
@output.output_option()
@client.cluster_options
def doctor(*, output_format: str, where: client.Where) -> int:
    """Check a cluster for what kvtier needs: version, CRD, operator, storage, nodes, your rights. Changes nothing.

    Exit code 1: something is missing.
    """
    found = examine(where)
    output.show([each._asdict() for each in found], output_format, lambda: _page(found))
    return FOUND if any(each.state == "missing" for each in found) else FINE


def examine(where: client.Where) -> list[Finding]:
    """Return the findings of all checks; raises ClusterError if there is no cluster at all."""
    version = where.client.ask("/version", "ask for the cluster's version")
    looks: tuple[tuple[str, Callable[[client.Where], Iterator[Finding]]], ...] = (
        ("definition", _definition),
        ("operator", _operators),
        ("storage", _storage),
        ("nodes", _nodes),
        ("rights", _rights),
    )
    found = [_version(version)]
    for what, look in looks:
        try:
            found += list(look(where))
        except ClusterForbidden as error:
            found.append(Finding(what, "unknown", str(error), "ask who may"))
        except ClusterError as error:
            found.append(Finding(what, "unknown", str(error)))
    return found


def _version(version: names.Manifest) -> Finding:
    minor = int(re.sub(r"\D", "", str(version["minor"])) or 0)
    text = f"Kubernetes {version['gitVersion']}"
    if minor < OLDEST_MINOR:
        return Finding("cluster", "missing", f"{text} is older than 1.{OLDEST_MINOR}", "upgrade the cluster")
    return Finding("cluster", "ok", text)


def _definition(where: client.Where) -> Iterator[Finding]:
    import yaml  # noqa: PLC0415  takes a while

    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
    try:
        live = where.client.ask(path, f"read the definition of {names.KIND}")
    except KindMissing:
        yield Finding("definition", "missing", f"the cluster does not know {names.KIND}", _INSTALL)
        return
    if _fields(live) == _fields(yaml.safe_load(install.carried_file(install.CRD).read_text())):
        yield Finding("definition", "ok", f"{names.KIND} is that of kvtier {__version__}")
    else:
        message = f"{names.KIND} is of another release than this command ({__version__})"
        yield Finding("definition", "warning", message, _INSTALL)


def _fields(node: Any) -> Any:
    """Return the names of all fields: the API server changes other parts of a schema, and these not."""
    return {each["name"]: _names(each["schema"]["openAPIV3Schema"]) for each in node["spec"]["versions"]}


def _names(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return None
    below = {name: _names(each) for name, each in (schema.get("properties") or {}).items()}
    return {**below, **({"[]": _names(schema["items"])} if "items" in schema else {})}


def _operators(where: client.Where) -> Iterator[Finding]:
    selector = "app.kubernetes.io/component=operator,app.kubernetes.io/part-of=kvtier"
    found = where.client.cluster.list("apps/v1", "Deployment", namespace="", selector=selector)
    for each in found:
        name = f"{each['metadata']['namespace']}/{each['metadata']['name']}"
        ready = each.get("status", {}).get("readyReplicas", 0)
        image = each["spec"]["template"]["spec"]["containers"][0]["image"]
        if not ready:
            remedy = f"kubectl logs -n {each['metadata']['namespace']} deploy/{each['metadata']['name']}"
            yield Finding("operator", "missing", f"{name} is not ready", remedy)
        elif _release(each, image) != __version__:
            message = f"{name} runs {image}, this command is {__version__}"
            remedy = "use the command of the operator's release where verbs act by a tier's name"
            yield Finding("operator", "warning", message, remedy)
        else:
            yield Finding("operator", "ok", f"{name} {__version__} is ready")
    if not found:
        yield from _outside(where)


def _release(deployment: names.Manifest, image: str) -> str:
    """Return the tag of an image, or the label of its Deployment if the image is named by its digest."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    said: str = (deployment["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "")
    return tag or said


def _outside(where: client.Where) -> Iterator[Finding]:
    """Report on an operator outside the cluster, as ``kvtier run``: the tiers of the namespace show its work."""
    namespace = where.asked_namespace
    tiers = where.client.tiers(namespace)
    seen = sum((each.get("status") or {}).get("observedGeneration") == each["metadata"]["generation"] for each in tiers)
    if seen:
        message = f"none is installed; one outside the cluster has looked at {seen} of {len(tiers)} tiers there"
        yield Finding("operator", "warning", message, "see that kvtier run still runs")
        return
    message = f"none is installed, and none outside the cluster has looked at a tier of {namespace}"
    yield Finding("operator", "missing", message, f"helm install, or kvtier run, or {_INSTALL}")


def _storage(where: client.Where) -> Iterator[Finding]:
    found = where.client.ask("/apis/storage.k8s.io/v1/storageclasses", "list storage classes")["items"]
    shared = [each["metadata"]["name"] for each in found if SHARED.search(each.get("provisioner", ""))]
    if shared:
        message = f"{', '.join(shared)}: shared by nodes, by their names; a Job tests each volume before engines use it"
        yield Finding("storage", "ok", message)
    elif found:
        listed = ", ".join(each["metadata"]["name"] for each in found)
        message = f"{listed}: none is known to be shared by nodes (ReadWriteMany)"
        remedy = "replicas of one node work with ReadWriteOnce; for more, install CephFS, NFS, Filestore, EFS or FSx"
        yield Finding("storage", "warning", message, remedy)
    else:
        remedy = "install one, or name a claim of yours in spec.volume.existingClaim"
        yield Finding("storage", "warning", "no storage class", remedy)
    annotations = [each["metadata"].get("annotations") or {} for each in found]
    if found and not any(each.get("storageclass.kubernetes.io/is-default-class") == "true" for each in annotations):
        remedy = "set spec.volume.claim.storageClassName"
        yield Finding("storage", "warning", "no storage class is the default one", remedy)


def _nodes(where: client.Where) -> Iterator[Finding]:
    nodes = where.client.ask("/api/v1/nodes", "list nodes")["items"]
    allocatable = [node.get("status", {}).get("allocatable") or {} for node in nodes]
    counts = {resource: sum(int(each.get(resource, 0)) for each in allocatable) for resource in sorted(_ACCELERATORS)}
    if listed := ", ".join(f"{count} {resource}" for resource, count in counts.items() if count):
        yield Finding("nodes", "ok", f"{len(nodes)} with {listed}")
    else:
        remedy = "a device plugin makes them known; accelerator: {resource: none} runs vLLM's CPU build"
        yield Finding("nodes", "warning", f"{len(nodes)}, none with an accelerator that is known", remedy)


def _rights(where: client.Where) -> Iterator[Finding]:
    for group, resource, subresource, verb, purpose in _RIGHTS:
        attributes = {"group": group, "resource": resource, "subresource": subresource, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**attributes, "namespace": where.asked_namespace}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = where.client.cluster.request("POST", path, body=review, what="ask for your own rights")
        full = f"{verb} {resource}{f'/{subresource}' if subresource else ''}"
        if answer["status"]["allowed"]:
            yield Finding("rights", "ok", f"you may {full}: {purpose}")
        else:
            yield Finding("rights", "warning", f"you may not {full}", f"without it: no {purpose}")


def _page(found: list[Finding]) -> str:
    width = max(len(each.what) for each in found)
    lines = []
    for each in found:
        state = click.style(f"{each.state:7}", fg=_COLORS[each.state])
        lines.append(f"{state}  {each.what:{width}}  {each.message}")
        if each.remedy:
            lines.append(f"{'':7}  {'':{width}}  -> {each.remedy}")
    return "\n".join(lines) + "\n"
