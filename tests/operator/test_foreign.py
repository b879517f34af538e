# SPDX-License-Identifier: Apache-2.0
"""What ``kvtier attach`` prints is valid where it goes, and what its owner then makes of it is an engine of the tier.

The folder foreign_schemas/ has the schemas of other projects' objects, foreign_samples/ their own samples and presets.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_schemas
import pytest
import yaml
from test_attach import FILES, FOREIGN, plan
from test_external import SELECTOR, World, external
from tiers import merge, plan_of

from kvtier_operator.parts.external.attach import AttachRefused, put, step_into
from kvtier_operator.parts.external.templates import KINDS, attach_document, detach_document, is_values

HERE = Path(__file__).parent
SCHEMAS = {path.stem: yaml.safe_load(path.read_text()) for path in (HERE / "foreign_schemas").glob("*.yaml")}
PRESETS = yaml.safe_load((HERE / "foreign_samples" / "presets.yaml").read_text())
Manifest = dict[str, Any]


def read(path: Path) -> Manifest:
    found: list[Manifest] = list(yaml.safe_load_all(path.read_text()))
    return next(each for each in found if is_values(each) or each["kind"] in KINDS)


def validate(document: Manifest) -> None:
    kind = "values" if is_values(document) else document["kind"].lower()
    if kind in SCHEMAS:
        kubernetes_schemas.validate_custom(document, SCHEMAS[kind])
    else:
        kubernetes_schemas.validate(document, "1.37")


SAMPLES = {
    "inferenceservice": {"model": {"name": "meta-llama/meta-llama-3-8b-instruct"}, "cpu": {"size": "4Gi"}},
    "llminferenceservice": {"model": {"name": "Qwen/Qwen2.5-7B-Instruct"}},
    "values": {
        "model": {"name": "facebook/opt-125m", "config": {"architectures": ["OPTForCausalLM"]}},
        "engine": {"image": "vllm/vllm-openai:latest", "memory": "1Gi"},
        "cpu": {"size": "1Gi"},
    },
}
"""Sample of another project, and the tier to which it is attached."""


@pytest.mark.parametrize("name", FILES)
def test_what_is_printed_is_valid_where_it_goes(name: str) -> None:
    document = read(FOREIGN / f"{name}.yaml")
    validate(document)
    validate(attach_document(document, plan())[1])


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_other_projects_are_attached_and_stay_valid(name: str) -> None:
    sample = read(HERE / "foreign_samples" / f"{name}.yaml")
    validate(sample)
    _, attached, _ = attach_document(copy.deepcopy(sample), plan(**merge({"engine": {"args": []}}, SAMPLES[name])))
    validate(attached)
    assert detach_document(attached) == sample


@pytest.mark.parametrize("field", ["spec", "servingEngineSpec"])
def test_a_schema_finds_a_field_that_is_not_there(field: str) -> None:
    document = read(FOREIGN / ("values.yaml" if field == "servingEngineSpec" else "llminferenceservice.yaml"))
    document[field]["annotation"] = {}
    with pytest.raises(jsonschema.ValidationError, match="annotation"):
        validate(document)


def test_a_sample_of_several_nodes_and_of_a_script_is_refused_by_field() -> None:
    sample = read(HERE / "foreign_samples" / "leaderworkerset.yaml")
    validate(sample)
    with pytest.raises(AttachRefused, match=r"spec\.leaderWorkerTemplate\.size: is 2"):
        attach_document(sample, plan())
    sample["spec"]["leaderWorkerTemplate"]["size"] = 1
    with pytest.raises(
        AttachRefused, match=r"leaderTemplate.spec.containers\[vllm-leader\].command: is a script of sev"
    ):
        attach_document(sample, plan())


def lay_over(below: Any, above: Any, key: str = "name") -> Any:
    """Return a strategic merge of two pods, as KServe makes it."""
    if isinstance(below, dict) and isinstance(above, dict):
        keys = {field: "mountPath" if field == "volumeMounts" else "name" for field in (*below, *above)}
        both = {field: lay_over(below[field], above[field], keys[field]) for field in below.keys() & above.keys()}
        return {**below, **above, **both}
    if isinstance(below, list) and all(isinstance(each, dict) for each in (*below, *above)):
        mine = {each[key]: each for each in below}
        rest = [each for each in above if each[key] not in mine]
        theirs = {each[key]: each for each in above}
        return [lay_over(each, theirs.get(each[key], each), key) for each in below] + rest
    return above


def pod_of_values(values: Manifest) -> Manifest:
    """Return the pod of production-stack's chart: helm/templates/deployment-vllm-multi.yaml at 010004eea56f."""
    serving = values["servingEngineSpec"]
    (model,) = serving["modelSpec"]
    vllm, init = model.get("vllmConfig", {}), model.get("initContainer")
    words = ["vllm", "serve", model["modelURL"], "--host", "0.0.0.0", "--port", "8000"]
    words.append("--enable-prefix-caching" if vllm.get("enablePrefixCaching") else "--no-enable-prefix-caching")
    words += ["--max-model-len", str(vllm["maxModelLen"])] if "maxModelLen" in vllm else []
    words += ["--tensor-parallel-size", str(vllm["tensorParallelSize"])] if "tensorParallelSize" in vllm else []
    gpus = {"nvidia.com/gpu": str(model["requestGPU"])}
    limits = {"memory": model["limitMemory"]} if "limitMemory" in model else {}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model.get("shmSize", "20Gi")}}
    has_shm = "tensorParallelSize" in vllm
    engine = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "command": [*words, *vllm.get("extraArgs", ())],
        "env": [{"name": "HF_HOME", "value": "/tmp"}, *model.get("env", ())],
        "resources": {"requests": {"memory": model["requestMemory"], **gpus}, "limits": {**limits, **gpus}},
        "volumeMounts": [
            *([{"name": "shm", "mountPath": "/dev/shm"}] if has_shm else []),
            *model.get("extraVolumeMounts", ()),
        ],
    }
    fields = ("name", "image", "command", "args", "resources")
    made = {field: init[field] for field in fields} if init else {}
    return {
        **({"securityContext": serving["securityContext"]} if serving.get("securityContext") else {}),
        "initContainers": [{**made, "volumeMounts": init["extraVolumeMounts"]}] if init else [],
        "containers": [engine],
        "volumes": [*([shm] if has_shm else []), *model.get("extraVolumes", ())],
    }


def pod_of(document: Manifest) -> Any:
    """Return the pod that the owner of an object makes of it."""
    if is_values(document):
        return pod_of_values(document)
    pod = copy.deepcopy(step_into(document, KINDS[document["kind"]].pod))
    if document["kind"] == "LLMInferenceService":
        return lay_over(PRESETS["LLMInferenceService"], pod)
    if "model" not in pod:
        return {field: value for field, value in pod.items() if field not in {"annotations", "labels", "minReplicas"}}
    model = pod.pop("model")
    runtime = copy.deepcopy(PRESETS[model.get("runtime", "kserve-huggingfaceserver")])
    (engine,) = runtime["containers"]
    fields = ("modelFormat", "storageUri", "runtime")
    above = {key: value for key, value in model.items() if key not in fields} | {"name": "kserve-container"}
    above["args"] = [*engine.get("args", ()), *model.get("args", ())]
    pod = {field: value for field, value in pod.items() if field not in {"annotations", "labels"}}
    return lay_over(runtime, {**pod, "containers": [above]})


def tier_with(spec: Manifest) -> Manifest:
    """Return a tier whose selector finds the pods of `World`, otherwise that of foreign/tier.yaml."""
    body = merge(yaml.safe_load((FOREIGN / "tier.yaml").read_text())["spec"], spec)
    return external() | {"spec": merge(body, {"engine": {"external": {"selector": {"matchLabels": SELECTOR}}}})}


def judge(document: Manifest, body: Manifest) -> tuple[str, str, str]:
    """Return the condition of a tier whose selector finds the pod that an object's owner makes."""
    world = World(body)
    world.add("one", pod_of(document))
    return world.condition("EnginesReady")


CASES: list[Any] = [
    *(pytest.param(name, (), None, {}, id=name) for name in FILES if name != "inferenceservice"),
    pytest.param(
        "inferenceservice", (), None, {"engine": {"image": "kserve/huggingfaceserver:v0.17.0-gpu"}}, id="huggingface"
    ),
    pytest.param(
        "inferenceservice",
        ("spec", "predictor", "model", "runtime"),
        "kserve-vllmserver",
        {"engine": {"image": "kserve/vllmserver:v0.17.0"}},
        id="vllmserver",
    ),
    pytest.param(
        "inferenceservice",
        ("spec", "predictor", "model", "runtime"),
        "with-a-mounted-model",
        {"engine": {"image": "example.org/vllm:1"}},
        id="a mounted model",
    ),
    pytest.param(
        "llminferenceservice",
        ("spec", "template", "containers", ("name", "main"), "args"),
        ["--gpu-memory-utilization=0.8"],
        {},
        id="args behind a preset's",
    ),
]


@pytest.mark.parametrize(("name", "where", "value", "spec"), CASES)
def test_the_pod_that_the_owner_makes_of_an_attached_object_is_an_engine_of_the_tier(
    name: str, where: tuple[Any, ...], value: Any, spec: Manifest
) -> None:
    document = read(FOREIGN / f"{name}.yaml")
    if where:
        put(document, where, value)
    if name == "llminferenceservice":
        spec = {"engine": {"image": "ghcr.io/llm-d/llm-d-cuda:v0.6.0"}}
    body = tier_with(spec)
    assert judge(document, body)[:2] == ("False", "NotAttached")
    _, attached, _ = attach_document(document, plan_of(body))
    status, reason, message = judge(attached, body)
    assert (status, reason) == ("True", "EnginesReady"), message
