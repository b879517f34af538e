# SPDX-License-Identifier: Apache-2.0
"""``kvtier attach``: objects of other owners get what an engine of a tier needs, and give it back.

The folder foreign/ has one object of each kind, and the tier. The schema of a PodSpec judges every pod that is printed.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ci_tools
import jsonschema
import kubernetes_schemas
import pytest
import yaml
from command import Command
from test_external import SELECTOR, World, external
from tiers import merge, plan_of

from kvtier_cli.client import Where
from kvtier_operator.errors import KindMissing
from kvtier_operator.parts.external.attach import AttachRefused, put, step_into
from kvtier_operator.parts.external.attach import Path as Steps
from kvtier_operator.parts.external.templates import ANNOTATION, KINDS, attach_document, detach_document, is_values
from kvtier_operator.plan import TierPlan

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

OWNERS_MEMORY = TABLES["owners_pods"]["memory of the owner's"][2]
FOREIGN = Path(__file__).parent / "foreign"
TIER = FOREIGN / "tier.yaml"
KUBECTL = ci_tools.load("helm").binary("kubectl")
FILES = sorted(path.stem for path in FOREIGN.glob("*.yaml") if path != TIER)


def plan(**spec: Any) -> TierPlan:
    return plan_of(merge(yaml.safe_load(TIER.read_text()), {"spec": spec}))


def read(name: str, folder: Path = FOREIGN) -> dict[str, Any]:
    return read_printed((folder / f"{name}.yaml").read_text())


def read_printed(text: str) -> dict[str, Any]:
    return next(each for each in yaml.safe_load_all(text) if is_values(each) or each["kind"] in KINDS)


def engine_of(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return pod, container and command line of an attached object."""
    if is_values(document):
        model = document["servingEngineSpec"]["modelSpec"][0]
        init = {**model["initContainer"], "volumeMounts": model["initContainer"].pop("extraVolumeMounts")}
        engine = {
            "env": model["env"],
            "volumeMounts": model["extraVolumeMounts"],
            "args": model["vllmConfig"]["extraArgs"],
        }
        return {"volumes": model["extraVolumes"], "initContainers": [init]}, engine, engine["args"]
    pod = step_into(document, KINDS[document["kind"]].pod)
    containers = [pod["model"]] if "model" in pod else pod["containers"]
    engine = next(each for each in containers if "PYTHONHASHSEED" in str(each))
    return pod, engine, [*engine.get("args", ()), *(each.get("value", "") for each in engine["env"])]


@pytest.mark.parametrize("name", FILES)
def test_what_is_attached_is_valid_again_the_same_and_without_the_tier_the_object_of_before(name: str) -> None:
    original, made = read(name), plan()
    _, once, _ = attach_document(copy.deepcopy(original), made)
    for each in (original, once):
        validate(each)
    # The API server answers with keys in another order.
    before, twice, _ = attach_document(json.loads(json.dumps(once, sort_keys=True)), made)
    assert (twice, before) == (once, original)
    assert detach_document(once) == detach_document(original) == original
    # Another CPU tier takes the place of the first.
    _, larger, _ = attach_document(copy.deepcopy(once), plan(cpu={"size": "9Gi"}))
    assert larger != once
    assert detach_document(larger) == original


def test_what_the_owner_changes_between_stays_when_the_tier_is_taken_out_or_attached_again() -> None:
    original = read("statefulset")
    _, attached, _ = attach_document(copy.deepcopy(original), plan())
    for each in (original, attached):
        spec = each["spec"]["template"]["spec"]
        spec["volumes"] = [*spec.get("volumes", ()), {"name": "models", "emptyDir": {}}]
        spec["containers"][1]["args"] = [*spec["containers"][1]["args"], "--max-num-seqs=8"]
        each["spec"]["replicas"] = 5
    assert detach_document(attached) == original
    _, document, _ = attach_document(read("deployment"), plan())
    _, engine, _ = engine_of(document)
    for field in ("requests", "limits"):
        engine["resources"][field]["memory"] = "900Gi"
    _, again, _ = attach_document(document, plan())
    for found in (again, detach_document(document)):
        containers = found["spec"]["template"]["spec"]["containers"]
        assert next(each for each in containers if each["name"] == engine["name"])["resources"] == engine["resources"]


@pytest.mark.parametrize(("name", "where", "words", "left"), TABLES["lengthened"])
def test_what_the_owner_adds_to_a_text_stays_and_what_was_put_in_goes(
    name: str, where: str, words: str, left: Any
) -> None:
    _, document, _ = attach_document(read(name), plan())
    *way, last = steps_of(where)
    parent = step_into(document, tuple(way))
    parent[last] = [f"{parent[last][0]}{words}"] if isinstance(left, list) else f"{parent[last]}{words}"
    _, again, _ = attach_document(copy.deepcopy(document), plan())
    for each in (document, again):
        found = detach_document(each)
        assert step_into(found, (*way, last)) == left
        assert "kvtier" not in str(found)


def test_flags_that_the_owner_has_changed_are_not_left_behind() -> None:
    _, document, _ = attach_document(read("deployment"), plan())
    args = step_into(document, (*VLLM, "args"))
    args[0] = args[0].replace("sha256_cbor", "sha256")
    with pytest.raises(AttachRefused, match=r"\.args\[0\]: has flags that attach put in, changed since: take them out"):
        detach_document(document)


@pytest.mark.parametrize("script", TABLES["scripts"])
def test_the_shell_reads_the_flags_behind_a_script(script: str, tmp_path: Path) -> None:
    document = read("deployment")
    put(document, (*VLLM, "args"), [script])
    _, attached, _ = attach_document(document, plan())
    (tmp_path / "vllm").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "vllm").chmod(0o755)
    (line,) = step_into(attached, (*VLLM, "args"))
    found = subprocess.run(["/bin/sh", "-c", line], env={"PATH": str(tmp_path)}, stdout=subprocess.PIPE, check=True)
    assert (
        found.stdout.decode().split()[-1]
        == "--scheduler-cls=kvtier_connector.vllm_adapter.split_scheduler.SplitScheduler"
    )
    assert detach_document(attached) == document


def bare(tree: Any) -> Any:
    """Return an object without what is empty, and with lists in one order."""
    if isinstance(tree, dict):
        return {key: bare(value) for key, value in tree.items() if value not in ({}, [], None)}
    items = [bare(each) for each in tree] if isinstance(tree, list) else ()
    return sorted(items, key=lambda each: json.dumps(each, sort_keys=True)) or tree


@pytest.mark.parametrize("name", [each for each in FILES if each != "values"])
def test_kubectl_makes_of_a_patch_what_is_attached_and_of_another_what_was_before(
    name: str, kvtier: Command, tmp_path: Path
) -> None:
    original = read(name)
    attached = read_printed(kvtier("attach", TIER, "-f", FOREIGN / f"{name}.yaml"))
    (tmp_path / "component").mkdir()
    (tmp_path / "kustomization.yaml").write_text("{resources: [object.yaml], components: [component]}")
    merge_type = "strategic" if KINDS[original["kind"]].is_known_to_kustomize else "merge"
    file, patch = tmp_path / "object.yaml", tmp_path / "patch.yaml"
    local = ["patch", "--local", "--type", merge_type, "-f", file, "--patch-file", patch, "-o", "yaml"]
    for before, after, options in ((original, attached, ()), (attached, original, ("--remove",))):
        file.write_text(yaml.safe_dump(before, sort_keys=False))
        words = ("attach", TIER, "-f", file, *options, "-o")
        patch.write_text(kvtier(*words, "patch"))
        (tmp_path / "component" / "kustomization.yaml").write_text(kvtier(*words, "kustomize"))
        for command in (local, ["kustomize", tmp_path]):
            made = subprocess.run([KUBECTL, *command], capture_output=True, text=True, check=True).stdout
            assert bare(yaml.safe_load(made)) == bare(after)


def test_what_cannot_be_read_is_named_and_what_is_no_object_refused(tmp_path: Path, kvtier: Command) -> None:
    document = read("deployment")
    pod = document["spec"]["template"]["spec"]
    pod["containers"][0]["envFrom"] = [{"configMapRef": {"name": "settings"}}]
    assert "envFrom is not read" in attach_document(copy.deepcopy(document), plan())[2][-1]
    pod["volumes"] = [{"emptyDir": {}}]
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(document))
    assert "kubectl apply --dry-run=server" in kvtier.fails("attach", str(TIER), "-f", str(tmp_path / "odd.yaml"))


def test_defaults_that_the_api_server_fills_in_go_with_what_they_belong_to() -> None:
    original = read("deployment")
    _, attached, _ = attach_document(copy.deepcopy(original), plan())
    pod, engine, _ = engine_of(attached)
    engine["startupProbe"] |= {"successThreshold": 1, "terminationGracePeriodSeconds": 30}
    pod["initContainers"][0] |= {"imagePullPolicy": "IfNotPresent", "terminationMessagePath": "/dev/termination-log"}
    step_into(pod, ("volumes", ("name", "kvtier-config"), "configMap"))["defaultMode"] = 420
    assert detach_document(attached) == original


def test_room_that_is_there_is_kept_and_room_that_lacks_is_made() -> None:
    _, document, _ = attach_document(read("deployment"), plan())
    pod, engine, _ = engine_of(document)
    assert step_into(pod, ("volumes", ("name", "shm"), "emptyDir", "sizeLimit")) == "9Gi"
    assert engine["resources"]["limits"]["memory"] == "40Gi"
    assert engine["resources"]["requests"]["memory"] == "26880Mi"
    assert engine["startupProbe"]["exec"]["command"][-1] == "--port=8000"
    _, document, _ = attach_document(read("statefulset") | {"spec": {"template": {"spec": OWNERS_MEMORY}}}, plan())
    paths = [each["mountPath"] for each in engine_of(document)[1]["volumeMounts"] if "shm" in each["mountPath"]]
    assert paths == ["/dev/shm/"]
    document = read("statefulset")
    put(document, (*CONTAINER, "startupProbe", "failureThreshold"), None)
    _, document, _ = attach_document(document, plan())
    pod, engine, words = engine_of(document)
    assert pod["securityContext"] == {"runAsUser": 1000, "fsGroup": 10001}
    assert "/opt/kvtier:/plugins" in words
    assert engine["startupProbe"] == {
        "httpGet": {"path": "/health", "port": 9000},
        "periodSeconds": 10,
        "failureThreshold": 34,
    }


VLLM: Steps = ("spec", "template", "spec", "containers", ("name", "vllm"))
MODEL: Steps = ("servingEngineSpec", "modelSpec", ("name", "qwen"))
CONTAINER: Steps = ("spec", "template", "spec", "containers", ("name", "server"))
AT = "spec.template.spec.containers[server]"


@pytest.mark.parametrize(("where", "value", "field", "words"), TABLES["refused"])
def test_what_would_break_the_engine_is_refused_by_its_field(where: str, value: object, field: str, words: str) -> None:
    document = read("statefulset")
    if where == "command":
        put(document, (*CONTAINER, "args"), [] if "-c" in str(value) else ["--max-model-len=8192"])
    put(document, (*CONTAINER, where), value)
    with pytest.raises(AttachRefused) as caught:
        attach_document(document, plan())
    assert any(at == f"{AT}.{field}" and words in text for at, text in caught.value.problems)


def steps_of(path: str) -> Steps:
    """Return the steps of a path such as ``spec.containers[vllm].args``."""
    return tuple(("name", item) if item else field for item, field in re.findall(r"\[(.+?)\]|([^.\[]+)", path))


@pytest.mark.parametrize(("name", "where", "value", "words"), TABLES["refused_of_kinds"])
def test_what_a_kind_cannot_do_is_refused_by_its_field(name: str, where: str, value: object, words: str) -> None:
    document = read(name)
    put(document, steps_of(where), value)
    with pytest.raises(AttachRefused, match=re.escape(words)):
        attach_document(document, plan())


def test_an_engine_that_cannot_be_told_needs_a_name_and_an_object_of_another_tier_is_refused() -> None:
    document = read("statefulset")
    put(document, (*CONTAINER, "image"), "example.org/inference")
    put(document, (*CONTAINER, "command"), ["serve-model"])
    with pytest.raises(AttachRefused, match="there is logs, server, and which of them runs vLLM cannot be told"):
        attach_document(document, plan())
    with pytest.raises(AttachRefused, match=r"\.image: is example.org/inference"):
        attach_document(document, plan(), container="server")
    _, document, _ = attach_document(read("deployment"), plan())
    assert json.loads(document["spec"]["template"]["metadata"]["annotations"][ANNOTATION])["tier"] == "default/qwen"
    other = plan_of(merge(yaml.safe_load(TIER.read_text()), {"metadata": {"name": "other"}}))
    with pytest.raises(AttachRefused, match="names tier default/qwen: take that out first"):
        attach_document(document, other)
    attach_document(detach_document(document), other)


def test_models_of_one_values_file_are_attached_and_detached_one_by_one() -> None:
    original = read("values")
    step_into(original, MODEL[:-1]).append({**copy.deepcopy(step_into(original, MODEL)), "name": "other"})
    with pytest.raises(AttachRefused, match="has qwen, other: name one with --container"):
        attach_document(original, plan())
    _, one, _ = attach_document(copy.deepcopy(original), plan(), container="qwen")
    _, both, _ = attach_document(copy.deepcopy(one), plan(), container="other")
    assert attach_document(copy.deepcopy(both), plan(), container="qwen")[1] == both
    assert detach_document(both, container="other") == one
    assert detach_document(both) == original
    without = detach_document(both, container="qwen")
    assert without["servingEngineSpec"]["securityContext"] == both["servingEngineSpec"]["securityContext"]
    assert detach_document(without, container="other") == original


def test_an_object_of_the_cluster_is_read_in_the_first_version_that_is_served(
    monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    class Client:
        namespace = "default"

        def ask(self, path: str, _what: str) -> dict[str, Any]:
            if path != "/apis/serving.kserve.io/v1alpha1/namespaces/default/llminferenceservices/qwen":
                raise KindMissing(path)
            return read("llminferenceservice")

    monkeypatch.setattr(Where, "client", Client())
    assert yaml.safe_load(kvtier("attach", str(TIER), "llmisvc/qwen"))["kind"] == "LLMInferenceService"
    assert "serving.kserve.io/v1beta1" in kvtier.fails("attach", str(TIER), "isvc/qwen")


def test_the_command_prints_every_document_and_says_what_the_digest_took(kvtier: Command, tmp_path: Path) -> None:
    printed = kvtier("attach", str(TIER), "-f", str(FOREIGN / "deployment.yaml"))
    assert [each["kind"] for each in yaml.safe_load_all(printed)] == ["Service", "Deployment"]
    assert "is that of model Qwen/Qwen2.5-7B-Instruct, revision main, image vllm/vllm-openai:v0.32.0" in kvtier.err
    assert f"{plan().generation.digest}" in kvtier.err
    assert "--max-model-len 8192" in kvtier.err
    tier, engines = tmp_path / "tier.yaml", tmp_path / "engines.yaml"
    tier.write_text(TIER.read_text().replace(", namespace: default", ""))
    engines.write_text(
        (FOREIGN / "statefulset.yaml").read_text().replace("{name: vllm}", "{name: vllm, namespace: ai}", 1)
    )
    assert '"tier":"ai/qwen"' in kvtier("attach", tier, "-f", engines)
    assert "metadata.namespace is ai, and the tier's is default" in kvtier.fails("attach", TIER, "-f", engines)
    for empty in ("", "''"):  # is no name
        tier.write_text(TIER.read_text().replace("namespace: default", f"namespace: {empty}"))
        assert '"tier":"ai/qwen"' in kvtier("attach", tier, "-f", engines)
    engines.write_text(engines.read_text().replace("namespace: ai", "namespace: ''"))
    assert '"tier":"default/qwen"' in kvtier("attach", TIER, "-f", engines)
    kvtier("attach", str(TIER), "-f", str(FOREIGN / "inferenceservice.yaml"))
    assert "taken from the tier: revision, image, tensor parallel size" in kvtier.err


@pytest.mark.parametrize(("name", "is_whole"), [("deployment", False), ("llminferenceservice", True)])
def test_a_patch_has_only_what_is_put_in_and_whole_lists_where_kustomize_does_not_know_the_kind(
    name: str, is_whole: bool, kvtier: Command
) -> None:
    component = yaml.safe_load(kvtier("attach", str(TIER), "-f", str(FOREIGN / f"{name}.yaml"), "-o", "kustomize"))
    assert component["kind"] == "Component"
    patch = yaml.safe_load(component["patches"][0]["patch"])
    container = step_into(patch, (*KINDS[patch["kind"]].pod, "containers"))[0]
    assert ("limits" in container["resources"]) is is_whole
    assert "image" not in container


def test_a_refusal_is_told_line_by_line_and_prints_no_object(kvtier: Command, tmp_path: Path) -> None:
    document = read("deployment")
    put(document, ("spec", "template", "spec", "containers", ("name", "vllm"), "image"), "example.org/vllm:1")
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(document))
    assert kvtier("attach", str(TIER), "-f", str(file), code=1) == ""
    assert kvtier.err.startswith("spec.template.spec.containers[vllm].image is example.org/vllm:1, which makes blocks")


SCHEMAS = {path.stem: yaml.safe_load(path.read_text()) for path in FOREIGN.with_name("foreign_schemas").glob("*.yaml")}
SAMPLES_OF_OTHERS = FOREIGN.with_name("foreign_samples")
"""Samples and presets of other projects; foreign_schemas/ has the schemas of their objects."""
PRESETS = yaml.safe_load((SAMPLES_OF_OTHERS / "presets.yaml").read_text())
Manifest = dict[str, Any]


def validate(document: Manifest) -> None:
    kind = "values" if is_values(document) else document["kind"].lower()
    if kind in SCHEMAS:
        kubernetes_schemas.validate_custom(document, SCHEMAS[kind])
    else:
        kubernetes_schemas.validate(document, "1.37")


SAMPLES = TABLES["samples"]
"""Sample of another project, and the tier to which it is attached."""


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_other_projects_are_attached_and_stay_valid(name: str) -> None:
    sample = read(name, SAMPLES_OF_OTHERS)
    validate(sample)
    _, attached, _ = attach_document(copy.deepcopy(sample), plan(**merge({"engine": {"args": []}}, SAMPLES[name])))
    validate(attached)
    assert detach_document(attached) == sample


@pytest.mark.parametrize("field", ["spec", "servingEngineSpec"])
def test_a_schema_finds_a_field_that_is_not_there(field: str) -> None:
    document = read("values" if field == "servingEngineSpec" else "llminferenceservice")
    document[field]["annotation"] = {}
    with pytest.raises(jsonschema.ValidationError, match="annotation"):
        validate(document)


def test_a_sample_of_several_nodes_and_of_a_script_is_refused_by_field() -> None:
    sample = read("leaderworkerset", SAMPLES_OF_OTHERS)
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
        "resources": model.get("resources")
        or {"requests": {"memory": model["requestMemory"], **gpus}, "limits": {**limits, **gpus}},
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


CASES = {name: (name, "", None, {}) for name in FILES if name != "inferenceservice"} | TABLES["owners_pods"]


@pytest.mark.parametrize(("name", "where", "value", "spec"), CASES.values(), ids=CASES)
def test_the_pod_that_the_owner_makes_of_an_attached_object_is_an_engine_of_the_tier(
    name: str, where: str, value: Any, spec: Manifest
) -> None:
    document = read(name)
    if where:
        put(document, steps_of(where), value)
    if name == "llminferenceservice":
        spec = {"engine": {"image": "ghcr.io/llm-d/llm-d-cuda:v0.6.0"}}
    body = tier_with(spec)
    assert judge(document, body)[:2] == ("False", "NotAttached")
    _, attached, _ = attach_document(document, plan_of(body))
    status, reason, message = judge(attached, body)
    assert (status, reason) == ("True", "EnginesReady"), message
    assert detach_document(attached) == document
