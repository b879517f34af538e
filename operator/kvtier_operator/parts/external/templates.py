# SPDX-License-Identifier: Apache-2.0
"""Objects of other owners that have engines: where each kind keeps its pods, and how an engine is put in or out. Pure.

The object itself notes, among the annotations of its pods, every change that was made to it. So what was put in is
taken out again exactly, also after the owner has changed other things; and attaching begins with taking out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.parts.external.attach import (
    MODULES,
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


class Kind(NamedTuple):
    """A kind of objects that have pods of engines."""

    api_versions: tuple[str, ...]
    """The preferred one first; all have the fields that matter here."""
    plural: str
    short: str
    pod: Path = ("spec", "template", "spec")
    metadata: Path = ("spec", "template", "metadata")
    """Where labels and annotations of the pods are."""

    @property
    def is_known_to_kustomize(self) -> bool:
        """Return whether kustomize merges its lists item by item; otherwise a patch has whole lists."""
        return self.api_versions == ("apps/v1",)


_WORKERS: Final = ("spec", "leaderWorkerTemplate", "workerTemplate")
_LWS, _KSERVE = "leaderworkerset.x-k8s.io/v1", "serving.kserve.io"
_PREDICTOR: Final = ("spec", "predictor")
KINDS: Final[Mapping[str, Kind]] = {
    "Deployment": Kind(("apps/v1",), "deployments", "deploy"),
    "StatefulSet": Kind(("apps/v1",), "statefulsets", "sts"),
    "LeaderWorkerSet": Kind((_LWS,), "leaderworkersets", "lws", (*_WORKERS, "spec"), (*_WORKERS, "metadata")),
    "InferenceService": Kind((f"{_KSERVE}/v1beta1",), "inferenceservices", "isvc", _PREDICTOR, _PREDICTOR),
    "LLMInferenceService": Kind(
        (f"{_KSERVE}/v1alpha2", f"{_KSERVE}/v1alpha1"),
        "llminferenceservices",
        "llmisvc",
        ("spec", "template"),
        ("spec",),
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


class _Place(NamedTuple):
    """Where a document has its engine."""

    target: Target
    pod: Path
    annotations: Path
    labels: Path


def _locate(document: Mapping[str, Any], container: str | None) -> _Place:
    if is_values(document):
        return _locate_values(document, container)
    *_, pod_path, metadata = KINDS[document["kind"]]
    for path in _SEVERAL_NODES.get(document["kind"], ()):
        if step_into(document, path):
            raise AttachRefused([(write_path(path), _ONE_POD)])
    if document["kind"] == "LLMInferenceService" and step_into(document, _OFFLOADING):
        text = "makes KServe render another connector: remove it; spec.cpu.size of the tier sets the CPU tier"
        raise AttachRefused([(write_path(_OFFLOADING), text)])
    if (size := step_into(document, (*_WORKERS[:-1], "size"))) not in {None, 1}:
        raise AttachRefused([("spec.leaderWorkerTemplate.size", f"is {size}, which {_ONE_POD}")])
    leader = (*_WORKERS[:-1], "leaderTemplate")
    if step_into(document, leader):
        pod_path, metadata = (*leader, "spec"), (*leader, "metadata")
    target = _target(document, copy_of(step_into(document, pod_path) or {}), write_path(pod_path), container)
    return _Place(target=target, pod=pod_path, annotations=(*metadata, "annotations"), labels=(*metadata, "labels"))


def _target(document: Mapping[str, Any], pod: Manifest, prefix: str, container: str | None) -> Target:
    spec = document["spec"]
    if document["kind"] == "InferenceService" and pod.get("model"):
        model = _of_hub(step_into(spec, ("predictor", "model", "storageUri")))
        return Target(pod=pod, container=("model",), prefix=prefix, is_partial=True, model=model)
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
    chosen = _models(document, name)
    if len(chosen) != 1:
        there = ", ".join(each["name"] for each in _models(document))
        raise AttachRefused([(write_path(_SERVING), f"has {there}: name one with --container")])
    model, path = chosen[0], (*_SERVING, ("name", chosen[0]["name"]))
    if (model.get("lmcacheConfig") or {}).get("enabled"):
        text = "is another connector: set enabled to false, or leave it out"
        raise AttachRefused([(f"{write_path(path)}.lmcacheConfig", text)])
    if "raySpec" in model:
        raise AttachRefused([(f"{write_path(path)}.raySpec", _ONE_POD)])
    pod, container = _pod_of_values(document, model), ("containers", ("name", "vllm"))
    target = Target(pod=pod, container=container, prefix=write_path(path), words=_WORDS)
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
    "securityContext": "/servingEngineSpec.securityContext",
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
    gpus = {model.get("requestGPUType", "nvidia.com/gpu"): model.get("requestGPU")}
    limits = {"memory": model.get("limitMemory"), **gpus}
    resources = model.get("resources") or {"requests": {"memory": model.get("requestMemory")}, "limits": limits}
    container: Manifest = {
        "name": "vllm",
        "image": f"{model.get('repository')}:{model.get('tag')}",
        "command": ["vllm", "serve", model.get("modelURL"), *words],
        "args": list(vllm.get("extraArgs") or ()),
        "resources": {
            kind: {key: value for key, value in (each or {}).items() if value not in {None, 0, "0"}}
            for kind, each in resources.items()
        },
        "startupProbe": {**_CHART_PROBE, **(step_into(document, _PROBE) or {})},
        **{field: list(model.get(name) or ()) for name, field in _VALUES.items()},
    }
    volumes, security = list(model.get("extraVolumes") or ()), step_into(document, _SECURITY) or {}
    pod: Manifest = {"containers": [container], "volumes": volumes, "securityContext": security}
    if "tensorParallelSize" in vllm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model.get("shmSize", "20Gi")}})
        container["volumeMounts"].append({"name": "shm", "mountPath": names.SHM_MOUNT})
    if model.get("initContainer"):
        # The chart takes one: it is in the way of ours.
        pod["initContainers"] = [{**model["initContainer"], "name": names.INSTALL_CONTAINER}]
    return copy_of(pod)  # type: ignore[no-any-return]  # JSON


def _put_into_values(document: Manifest, path: Path, pod: Mapping[str, Any]) -> None:
    """Change values so that the chart makes this pod of a model."""
    engine, (init,), model = pod["containers"][0], pod["initContainers"], step_into(document, path)
    # With this the chart makes the volume, which is none of the values then.
    made_by_chart = {"shm"} if "tensorParallelSize" in (model.get("vllmConfig") or {}) else set[str]()
    for name, items in (*((name, engine[field]) for name, field in _VALUES.items()), ("extraVolumes", pod["volumes"])):
        model[name] = [each for each in items if each["name"] not in made_by_chart]
    made = {field: init[field] for field in ("name", "image", "command", "args", "resources")}
    model["initContainer"] = {**made, "extraVolumeMounts": init["volumeMounts"]}
    # Left out, it makes the chart turn prefix caching off.
    model["vllmConfig"] = {**(model.get("vllmConfig") or {}), "enablePrefixCaching": True, "extraArgs": engine["args"]}
    memory: Path = ("resources", "requests", "memory")
    if (asked := step_into(engine, memory)) is not None:
        put(model, memory if model.get("resources") else ("requestMemory",), asked)
    for name, value in pod["securityContext"].items():
        put(document, (*_SECURITY, name), value)
    shm = step_into(pod, ("volumes", ("name", "shm"), "emptyDir", "sizeLimit"))
    if made_by_chart and shm != model.get("shmSize", "20Gi"):
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
    namespace, ours = step_into(document, ("metadata", "namespace")), plan.tier.namespace
    if namespace not in {None, "", ours}:
        text = f"is {namespace}, and the tier's is {ours}, whose claim no other has: make the two equal"
        raise AttachRefused([("metadata.namespace", text)])
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
    found = [*_shared(_models(before)), *_differences(before, after, ())]
    # The API server answers in another order, which must not make another text.
    changes = sorted(found, key=lambda each: (tuple(each[1][:2]) == _SERVING, [str(step) for step in each[1]]))
    record = {"tier": str(plan.tier), "changes": changes}
    put(after, (*place.annotations, ANNOTATION), json.dumps(record, sort_keys=True, separators=(",", ":")))
    return before, after, made.notes


def detach_document(document: Manifest, plan: TierPlan | None = None, *, container: str | None = None) -> Manifest:
    """Return an object without what was put in; the object itself where nothing was.

    Args:
        document: the object, or values.
        plan: that of the tier to which it is attached, if that is to be checked.
        container: among values, the only model that is detached.

    Raises:
        AttachRefused: it is attached to another tier than that of the plan, or a flag was changed since.
    """
    models = _models(document, container)
    found = _records(models)
    if not found:
        return document
    after: Manifest = copy_of(document)
    shared = _shared(each for each in _models(document) if each not in models)
    for record in reversed(found):
        if plan is not None and record["tier"] != str(plan.tier):
            text = f"names tier {record['tier']}: take that out first, with `kvtier attach --remove`"
            raise AttachRefused([(f"annotations[{ANNOTATION}]", text)])
        for operation, path, *more in reversed([each for each in record["changes"] if each not in shared]):
            steps = tuple(step if isinstance(step, str) else (step[0], step[1]) for step in path)
            _undo(after, operation, steps, *more)
    text = "has flags that attach put in, changed since: take them out by hand, then repeat the command"
    left = (path for each in _models(after, container) for path, value in _leaves(each) if MODULES in str(value))
    if problems := [(write_path(path), text) for path in left if "annotations" not in path]:
        raise AttachRefused(problems)
    return after


def _models(document: Mapping[str, Any], name: str | None = None) -> list[Any]:
    """Return the models of values, or the one of a name; of anything else the object itself."""
    models = step_into(document, _SERVING) if is_values(document) else [document]
    return [each for each in models if name is None or each is document or each["name"] == name]


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each value that is no object and no list, after its path."""
    if not isinstance(tree, (Mapping, list)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from _leaves(value, (*path, str(key) if isinstance(tree, Mapping) else ("name", str(key))))


def _records(models: Iterable[Manifest]) -> list[Manifest]:
    """Return what objects note, wherever the annotations of their pods are."""
    return [json.loads(text) for each in models for path, text in _leaves(each) if path[-1] == ANNOTATION]


def _shared(models: Iterable[Manifest]) -> list[Any]:
    """Return the changes to fields of all models; each record has them, so that the last one takes them back."""
    found = {str(change): change for record in _records(models) for change in record["changes"]}
    return [change for change in found.values() if tuple(change[1][:2]) != _SERVING]


_KEYS: Final = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "modelSpec", "extraVolumes"), "name"),
    **dict.fromkeys(("volumeMounts", "extraVolumeMounts"), "mountPath"),
}
"""Lists that are merged item by item, and the field that names an item."""
_WHOLE: Final = frozenset({"startupProbe", "initContainer"})
"""Objects that nothing of the owner's is put into later; the API server adds defaults to them."""


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
    elif isinstance(after, list) and path[-1] in _KEYS:
        key = _KEYS[str(path[-1])]
        for item in after:
            step = (key, item[key])
            old = step_into(before, (step,))
            if old is None and path[-1] == "env":
                # The owner may lengthen the value.
                yield from (("new", (*path, step)), *_differences(dict([step]), item, (*path, step)))
            else:
                yield from [("add", (*path, step))] if old is None else _differences(old, item, (*path, step))
    elif before != after:
        yield _change(before, after, path)


def _change(before: Any, after: Any, path: Path) -> tuple[Any, ...]:
    if isinstance(before, list) and isinstance(after, list):
        if after[: len(before)] == before:
            return "in", path, after[len(before) :]
        # Of the words of a container, one is a script.
        old, new = next((pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]), (None, None))
    else:
        old, new = before, after
    if isinstance(old, str) and isinstance(new, str) and (size := len(new) - len(old)) > 0:
        for place in range(len(old) + 1):
            if new[:place] + new[place + size :] == old and _without(new, new[place : place + size]) == old:
                return "in", path, new[place : place + size]
    return "set", path, before, after


def _undo(tree: Any, operation: str, path: Path, kept: Any = None, made: Any = None) -> None:
    """Take a change back, unless the owner has written another value since."""
    parent, value, last = step_into(tree, path[:-1]), step_into(tree, path), path[-1]
    if value is None or (operation == "set" and value != made):
        return
    if operation == "set":
        put(tree, path, kept)
    elif operation == "in" or (operation == "add" and kept not in (None, value)):
        put(tree, path, _without(value, kept))
    elif operation == "add" or not value or (not isinstance(last, str) and value == dict([last])):
        parent.pop(last) if isinstance(parent, dict) else parent.remove(value)


def _without(value: Any, kept: Any) -> Any:
    """Return words, or a text, without those that were put in, wherever they stand now."""
    if isinstance(value, list):
        return [_without(each, kept) for each in value if not isinstance(kept, list) or each not in kept]
    if not isinstance(value, str) or not isinstance(kept, str):
        return value
    words = re.escape(kept.strip(" :"))
    return re.sub(rf"^{words}(?:[ :]|$)|[ :]{words}(?=[\s:;&|)]|$)", "", value, count=1, flags=re.MULTILINE)


def make_patch(before: Manifest, after: Manifest) -> Manifest:
    """Return the strategic merge patch from one object to the other."""
    identity = {"apiVersion": before["apiVersion"], "kind": before["kind"]}
    merged = _merge(before, after, "", by_item=KINDS[before["kind"]].is_known_to_kustomize)
    return {**identity, "metadata": {"name": before["metadata"]["name"]}, **merged}


def _merge(before: Any, after: Any, field: str, *, by_item: bool) -> Any:
    """Return the part of a patch that makes one value of another: null or $patch takes away what is gone."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changed = {key: value for key, value in after.items() if before.get(key) != value}
        merged = {key: _merge(before.get(key), value, key, by_item=by_item) for key, value in changed.items()}
        return {**dict.fromkeys(key for key in before if key not in after), **merged}
    if not (by_item and field in _KEYS and isinstance(before, list) and isinstance(after, list)):
        return copy_of(after)
    key, old = _KEYS[field], {each[_KEYS[field]]: each for each in before}
    changed = {each[key]: each for each in after if each not in before}
    gone = [{"$patch": "delete", key: name} for name in old if step_into(after, ((key, name),)) is None]
    new = [{key: name, **_merge(old.get(name, {}), each, "", by_item=by_item)} for name, each in changed.items()]
    return [*new, *gone]
