# SPDX-License-Identifier: Apache-2.0
"""Objects of other owners that have engines: where each kind keeps its pods, and how an engine is put in or out. Pure.

The object itself notes, among the annotations of its pods, every change that was made to it. So what was put in is
taken out again exactly, also after the owner has changed other things; and attaching begins with taking out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.parts.external.attach import (
    VARIABLE,
    AttachRefused,
    Path,
    Target,
    attach,
    copy_of,
    find_engine,
    put,
    step_into,
    variable_of,
    write_path,
)
from kvtier_operator.plan import TierPlan

ANNOTATION: Final = f"{names.GROUP}/attached"
"""The tier, and the changes that were made for it."""
PORT: Final = f"{names.GROUP}/port"
"""Port of an attached pod's metrics; the chart's PodMonitor reads it."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of objects that have pods of engines."""

    api_versions: tuple[str, ...]
    """The preferred one first; all have the fields that matter here."""
    plural: str
    short: str
    pod: Path = ("spec", "template", "spec")
    metadata: Path = ("spec", "template", "metadata")
    """Where labels and annotations of the pods are."""
    is_known_to_kustomize: bool = False
    """Whether kustomize merges its lists item by item; otherwise a patch has whole lists."""


_WORKERS: Final = ("spec", "leaderWorkerTemplate", "workerTemplate")
KINDS: Final[Mapping[str, Kind]] = {
    "Deployment": Kind(api_versions=("apps/v1",), plural="deployments", short="deploy", is_known_to_kustomize=True),
    "StatefulSet": Kind(api_versions=("apps/v1",), plural="statefulsets", short="sts", is_known_to_kustomize=True),
    "LeaderWorkerSet": Kind(
        api_versions=("leaderworkerset.x-k8s.io/v1",),
        plural="leaderworkersets",
        short="lws",
        pod=(*_WORKERS, "spec"),
        metadata=(*_WORKERS, "metadata"),
    ),
    "InferenceService": Kind(
        api_versions=("serving.kserve.io/v1beta1",),
        plural="inferenceservices",
        short="isvc",
        pod=("spec", "predictor"),
        metadata=("spec", "predictor"),
    ),
    "LLMInferenceService": Kind(
        api_versions=("serving.kserve.io/v1alpha2", "serving.kserve.io/v1alpha1"),
        plural="llminferenceservices",
        short="llmisvc",
        pod=("spec", "template"),
        metadata=("spec",),
    ),
}

_SEVERAL_NODES: Final[Mapping[str, tuple[Path, ...]]] = {
    "InferenceService": (("spec", "predictor", "workerSpec"),),
    "LLMInferenceService": (("spec", "worker"), ("spec", "prefill")),
}
_OFFLOADING: Final = ("spec", "kvCacheOffloading")
"""Field of an LLMInferenceService from which KServe renders vLLM's own connector."""
_ONE_POD: Final = "spreads an engine, or its two halves, over several pods: only engines of one pod can be attached"
_SERVING: Final = ("servingEngineSpec", "modelSpec")
"""Models of a values file of vLLM's production-stack."""


def is_values(document: Mapping[str, Any]) -> bool:
    """Return whether a document is a values file of production-stack."""
    return isinstance(step_into(document, _SERVING), list)


def is_attachable(document: Mapping[str, Any]) -> bool:
    """Return whether a document has pods that can be engines."""
    return document.get("kind") in KINDS or is_values(document)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a document has its engine."""

    target: Target
    pod: Path
    annotations: Path
    labels: Path


def _locate(document: Mapping[str, Any], container: str | None) -> _Place:
    if is_values(document):
        return _locate_values(document, container)
    kind = KINDS[document["kind"]]
    pod_path, metadata = kind.pod, kind.metadata
    for path in _SEVERAL_NODES.get(document["kind"], ()):
        if step_into(document, path):
            raise AttachRefused([(write_path(path), _ONE_POD)])
    if document["kind"] == "LLMInferenceService" and step_into(document, _OFFLOADING):
        text = "makes KServe render another connector: remove it; spec.cpu.size of the tier sets the CPU tier"
        raise AttachRefused([(write_path(_OFFLOADING), text)])
    if document["kind"] == "LeaderWorkerSet":
        size = step_into(document, ("spec", "leaderWorkerTemplate", "size"))
        if size not in {None, 1}:
            raise AttachRefused([("spec.leaderWorkerTemplate.size", f"is {size}, which {_ONE_POD}")])
        leader = ("spec", "leaderWorkerTemplate", "leaderTemplate")
        if step_into(document, leader):
            pod_path, metadata = (*leader, "spec"), (*leader, "metadata")
    pod = copy_of(step_into(document, pod_path) or {})
    target = _target(document, pod, write_path(pod_path), container)
    return _Place(target=target, pod=pod_path, annotations=(*metadata, "annotations"), labels=(*metadata, "labels"))


def _target(document: Mapping[str, Any], pod: Manifest, prefix: str, container: str | None) -> Target:
    spec = document["spec"]
    if document["kind"] == "InferenceService" and pod.get("model"):
        return Target(
            pod=pod,
            container=("model",),
            prefix=prefix,
            is_partial=True,
            model=_of_hub(step_into(spec, ("predictor", "model", "storageUri"))),
        )
    if document["kind"] == "LLMInferenceService":
        container = container or "main"
        pod["containers"] = pod.get("containers") or [{"name": container}]
    engine = find_engine(pod, container)
    if engine is None:
        there = ", ".join(str(each.get("name")) for each in pod.get("containers") or ()) or "none"
        text = f"there is {there}, and which of them runs vLLM cannot be told: name it with --container"
        raise AttachRefused([(f"{prefix}.containers", text)])
    is_laid_over = document["kind"] == "LLMInferenceService" and not engine.get("command")
    return Target(
        pod=pod,
        container=("containers", ("name", engine["name"])),
        prefix=prefix,
        is_partial=is_laid_over,
        variable=VARIABLE if is_laid_over else variable_of(engine),
        model=_of_hub(step_into(spec, ("model", "uri"))),
        tensor_parallel=step_into(spec, ("parallelism", "tensor")),
    )


def _of_hub(uri: object) -> str | None:
    return str(uri).removeprefix("hf://") if str(uri).startswith("hf://") else None


def _locate_values(document: Mapping[str, Any], name: str | None) -> _Place:
    models = step_into(document, _SERVING)
    chosen = [each for each in models if name in {None, each["name"]}]
    if len(chosen) != 1:
        there = ", ".join(each["name"] for each in models)
        raise AttachRefused([(write_path(_SERVING), f"has {there}: name one with --container")])
    model, path = chosen[0], (*_SERVING, ("name", chosen[0]["name"]))
    if (model.get("lmcacheConfig") or {}).get("enabled"):
        text = "is another connector: set enabled to false, or leave it out"
        raise AttachRefused([(f"{write_path(path)}.lmcacheConfig", text)])
    if "raySpec" in model:
        raise AttachRefused([(f"{write_path(path)}.raySpec", _ONE_POD)])
    target = Target(
        pod=_pod_of_values(document, model),
        container=("containers", ("name", "vllm")),
        prefix=write_path(path),
        words=_WORDS,
    )
    return _Place(target=target, pod=path, annotations=(*path, "podAnnotations"), labels=(*path, "podLabels"))


_VALUES: Final = {"env": "env", "extraVolumeMounts": "volumeMounts"}
"""Field of a model among the values, and field of the container that the chart makes of it."""
_WORDS: Final = {
    "containers[vllm].args.--model": "modelURL",
    "containers[vllm].args.--max-model-len": "vllmConfig.maxModelLen",
    "containers[vllm].args.--dtype": "vllmConfig.dtype",
    "containers[vllm].args.--tensor-parallel-size": "vllmConfig.tensorParallelSize",
    "containers[vllm].args": "vllmConfig.extraArgs",
    "containers[vllm].image": "tag",
    "containers[vllm].env": "env",
    "containers[vllm].volumeMounts": "extraVolumeMounts",
    "containers[vllm].resources.limits.memory": "limitMemory",
    "volumes": "extraVolumes",
    "initContainers": "initContainer",
}
"""Field of the pod, and field of a model among the values; the first that begins a name counts."""
_SECURITY: Final = ("servingEngineSpec", "securityContext")
"""Of the pods of all models."""
_CHART_PROBE: Final = {"initialDelaySeconds": 15, "periodSeconds": 10, "failureThreshold": 60}
"""Startup probe of the chart, of all models, where the values say nothing."""
_PROBE: Final = ("servingEngineSpec", "startupProbe")


def _pod_of_values(document: Mapping[str, Any], model: Mapping[str, Any]) -> Manifest:
    """Return the pod that production-stack's chart makes of a model, as far as it matters here."""
    vllm = model.get("vllmConfig") or {}
    flags = {"maxModelLen": "--max-model-len", "dtype": "--dtype", "tensorParallelSize": "--tensor-parallel-size"}
    words = [f"{flag}={vllm[name]}" for name, flag in flags.items() if name in vllm]
    if "modelRevision" in model:
        words.append(f"--revision={model['modelRevision']}")
    resources = model.get("resources") or {
        "requests": {"memory": model.get("requestMemory")},
        "limits": {
            "memory": model.get("limitMemory"),
            model.get("requestGPUType", "nvidia.com/gpu"): model.get("requestGPU"),
        },
    }
    container: Manifest = {
        "name": "vllm",
        "image": f"{model.get('repository')}:{model.get('tag')}",
        "command": ["vllm", "serve", model.get("modelURL"), *words],
        "args": list(vllm.get("extraArgs") or ()),
        "resources": {
            kind: {key: value for key, value in each.items() if value not in {None, 0, "0"}}
            for kind, each in resources.items()
        },
        "startupProbe": {**_CHART_PROBE, **(step_into(document, _PROBE) or {})},
        **{field: list(model.get(name) or ()) for name, field in _VALUES.items()},
    }
    pod: Manifest = {
        "containers": [container],
        "volumes": list(model.get("extraVolumes") or ()),
        "securityContext": step_into(document, _SECURITY) or {},
    }
    if "tensorParallelSize" in vllm:
        memory = {"medium": "Memory", "sizeLimit": model.get("shmSize", "20Gi")}
        pod["volumes"].append({"name": "shm", "emptyDir": memory})
        container["volumeMounts"].append({"name": "shm", "mountPath": names.SHM_MOUNT})
    if model.get("initContainer"):
        # The chart takes one: it is in the way of ours.
        pod["initContainers"] = [{**model["initContainer"], "name": names.INSTALL_CONTAINER}]
    return copy_of(pod)  # type: ignore[no-any-return]  # JSON


def _put_into_values(document: Manifest, path: Path, pod: Mapping[str, Any]) -> None:
    """Change values so that the chart makes this pod of a model."""
    engine, (init,), model = pod["containers"][0], pod["initContainers"], step_into(document, path)
    for name, field in (*_VALUES.items(), ("extraVolumes", None)):
        items = pod["volumes"] if field is None else engine[field]
        model[name] = [each for each in items if each["name"] != "shm"]
    made = {field: init[field] for field in ("name", "image", "command", "args", "resources")}
    model["initContainer"] = {**made, "extraVolumeMounts": init["volumeMounts"]}
    # Left out, it makes the chart turn prefix caching off.
    model["vllmConfig"] = {**(model.get("vllmConfig") or {}), "enablePrefixCaching": True, "extraArgs": engine["args"]}
    if model.get("resources"):
        model["resources"] = engine["resources"]
    else:
        model["requestMemory"] = engine["resources"]["requests"]["memory"]
    for name in ("fsGroup", "fsGroupChangePolicy"):
        if name in pod["securityContext"]:
            put(document, (*_SECURITY, name), pod["securityContext"][name])
    shm = step_into(pod, ("volumes", ("name", "shm"), "emptyDir", "sizeLimit"))
    if shm is not None and shm != model.get("shmSize", "20Gi"):
        model["shmSize"] = shm
    allowed = engine["startupProbe"]["failureThreshold"]
    if allowed != (step_into(document, _PROBE) or _CHART_PROBE).get("failureThreshold"):
        put(document, (*_PROBE, "failureThreshold"), allowed)


def attach_document(
    document: Manifest, plan: TierPlan, *, container: str | None = None
) -> tuple[Manifest, Manifest, tuple[str, ...]]:
    """Return an object as its owner made it, the same with what an engine of the tier needs, and notes about it.

    Raises:
        AttachRefused: its pods cannot become engines of the tier.
    """
    before = detach_document(document, plan, container=container)
    place = _locate(before, container)
    made = attach(plan, place.target)
    pod, after = made.put_into(place.target), copy_of(before)
    if is_values(before):
        _put_into_values(after, place.pod, pod)
    else:
        put(after, place.pod, pod)
    put(after, (*place.annotations, PORT), str(made.port))
    put(after, (*place.annotations, ANNOTATION), "")
    put(after, (*place.labels, names.LABEL_TIER), plan.tier.name)
    record = {"tier": str(plan.tier), "changes": list(_differences(before, after, ()))}
    put(after, (*place.annotations, ANNOTATION), json.dumps(record, sort_keys=True, separators=(",", ":")))
    return before, after, made.notes


def detach_document(document: Manifest, plan: TierPlan | None = None, *, container: str | None = None) -> Manifest:
    """Return an object without what was put in; the object itself where nothing was.

    Args:
        document: the object, or values.
        plan: that of the tier to which it is attached, if that is to be checked.
        container: among values, the only model that is detached.

    Raises:
        AttachRefused: it is attached to another tier than that of the plan.
    """
    models = [document]
    if is_values(document):
        models = [each for each in step_into(document, _SERVING) if container in {None, each["name"]}]
    found = [json.loads(record) for model in models for record in _records(model)]
    if not found:
        return document
    after: Manifest = copy_of(document)
    for record in reversed(found):
        if plan is not None and record["tier"] != str(plan.tier):
            text = f"names tier {record['tier']}: take that out first, with `kvtier attach --remove`"
            raise AttachRefused([(f"annotations[{ANNOTATION}]", text)])
        for operation, path, *more in reversed(record["changes"]):
            steps = tuple(step if isinstance(step, str) else (step[0], step[1]) for step in path)
            _undo(after, operation, steps, *more)
    return after


def _records(tree: Any) -> Iterator[str]:
    """Yield what objects note, wherever the annotations of their pods are."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == ANNOTATION:
                yield str(value)
            yield from _records(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from _records(each)


_KEYS: Final = {"volumeMounts": "mountPath", "extraVolumeMounts": "mountPath"}
_WHOLE: Final = frozenset({"startupProbe", "initContainer"})
"""Objects that nothing of the owner's is put into later; the API server adds defaults to them."""
_NAMED: Final = frozenset({"containers", "initContainers", "volumes", "env", "modelSpec", "extraVolumes"})


def _differences(before: Any, after: Any, path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield each change: an operation, where, and what takes it back."""
    if isinstance(after, Mapping):
        for key, value in after.items():
            old = before.get(key)
            if old is None and (key in _WHOLE or not isinstance(value, (Mapping, list))):
                yield "add", (*path, key), *(() if isinstance(value, Mapping) or not value else (value,))
                continue
            if old is None and value:
                yield "new", (*path, key)
                old = type(value)()
            if old != value:
                yield from _differences(old, value, (*path, key))
    elif isinstance(after, list) and path[-1] in {*_KEYS, *_NAMED}:
        key = _KEYS.get(str(path[-1]), "name")
        for item in after:
            step = (key, item[key])
            old = step_into(before, (step,))
            yield from [("add", (*path, step))] if old is None else _differences(old, item, (*path, step))
    elif before != after:
        yield _change(before, after, path)


def _change(before: Any, after: Any, path: Path) -> tuple[Any, ...]:
    is_longer = type(before) is type(after) and isinstance(after, (str, list))
    if is_longer and after[: len(before)] == before:
        return "end", path, after[len(before) :]
    if isinstance(after, str) and isinstance(before, str) and after.endswith(before):
        return "begin", path, after.removesuffix(before)
    return "set", path, before, after


def _undo(tree: Any, operation: str, path: Path, kept: Any = None, made: Any = None) -> None:
    """Take a change back, unless the owner has written another value since."""
    parent, value = step_into(tree, path[:-1]), step_into(tree, path)
    if value is None or (operation == "set" and value != made) or (operation == "add" and kept not in (None, value)):
        return
    if operation == "set":
        put(tree, path, kept)
    elif operation == "begin":
        put(tree, path, str(value).removeprefix(kept))
    elif operation == "end" and isinstance(value, str):
        put(tree, path, value.removesuffix(kept))
    elif operation == "end":
        for word in kept:
            if word in value:
                value.remove(word)
    elif operation == "add" or not value:
        parent.pop(path[-1]) if isinstance(parent, dict) else parent.remove(value)


def make_patch(before: Manifest, after: Manifest) -> Manifest:
    """Return the strategic merge patch from one object to the other."""
    kind = KINDS[before["kind"]]
    metadata = {"name": before["metadata"]["name"]}
    patch: Manifest = {"apiVersion": before["apiVersion"], "kind": before["kind"], "metadata": metadata}
    for operation, path, *_ in _differences(before, after, ()):
        lists = (place for place, step in enumerate(path) if not isinstance(step, str))
        shown = path if kind.is_known_to_kustomize else path[: next(lists, len(path))]
        if operation != "new":
            put(patch, shown, copy_of(step_into(after, shown)))
    return patch
