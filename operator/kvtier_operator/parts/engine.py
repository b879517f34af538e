# SPDX-License-Identifier: Apache-2.0
"""The Deployment of engine pods: stock vLLM, our connector beside it, and sizes that agree. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from kvtier_connector.contract.engine import SUPPORTED_VLLM, vllm_release
from kvtier_operator import names, quantity
from kvtier_operator.api import TierSpec, pod_template
from kvtier_operator.api.disk_spec import EncryptionSpec
from kvtier_operator.api.engine_spec import HARMLESS
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule, PlannedStage, Problem, Status, listed, met, unknown
from kvtier_operator.names import Manifest
from kvtier_operator.parts import connectors, engine_config
from kvtier_operator.parts import pods as pod_settings
from kvtier_operator.parts.connectors import Rendered
from kvtier_operator.parts.pods import lay_over
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.decisions import checkpoints_of, make_rendered
from kvtier_operator.plan.digest import digest

ENDPOINT_DRAIN_SECONDS: Final = 10
"""How long the pod keeps accepting after it was told to go, until every proxy has dropped its address."""

REQUEST_DRAIN_SECONDS: Final = 60
"""How long requests that run then may go on, and blocks be written that wait for it, where the user says nothing."""

TEARDOWN_SECONDS: Final = 20
"""Time for vLLM to end its workers, and for the connector to finish open writes."""

LONGEST_NOTE: Final = 192 << 10
"""Bytes of the note on what the pods were made from: an object takes 256 KiB of annotations, and none beyond. Without
it, the next version of the operator renders the pods anew."""

_PROBE_PERIOD_SECONDS: Final = 5

_COMPILED_MOUNT: Final = {"name": "kvtier-compiled", "mountPath": names.COMPILED_MOUNT}

# python3 is there because the engine is started with it; a native sleep action needs Kubernetes 1.30, and a stock image
# owes us no sleep command.
_DRAIN_COMMAND: Final = ["python3", "-c", f"import time; time.sleep({ENDPOINT_DRAIN_SECONDS})"]

# With -S, the packages of the image, which take their time to be found, stay away.
_READY_COMMAND: Final = ["python3", "-S", "-m", "kvtier_connector.pod_tools.ready", f"--state={names.ENGINE_STATE}"]


def deployment(plan: TierPlan) -> Manifest:
    """Return the Deployment of the tier's engines."""
    rollout = plan.spec.engine.rollout
    metadata = names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE)
    template = template_of(plan) if plan.rendered is None else dict(plan.rendered.template)
    # Not on the pods: what was decided must not be decided anew, and writing it down restarts nothing.
    metadata["annotations"] = {names.ANNOTATION_DECISIONS: plan.decisions.encode()}
    if plan.is_recorded:
        rendered = plan.rendered or make_rendered(
            plan.spec, restart=plan.restart, config=plan.config_text, template=template
        )
        note = rendered.encode()
        if len(note) <= LONGEST_NOTE:
            metadata["annotations"][names.ANNOTATION_RENDERED] = note
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": plan.spec.replicas,
            "selector": {"matchLabels": names.selector(plan.tier)},
            # Accelerators, and host memory for a whole CPU tier, are scarce: a new pod gets the place of an old one.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            **({"minReadySeconds": rollout.min_ready_seconds} if rollout.min_ready_seconds else {}),
            # A rollout is stuck only when a pod had its whole startup budget and time to be scheduled and pulled.
            "progressDeadlineSeconds": _startup_seconds(plan) + rollout.min_ready_seconds + 600,
            "revisionHistoryLimit": 3,
            "template": template,
        },
    }


def drift(plan: TierPlan) -> tuple[str, ...]:
    """Return what this operator would change in the pods at their next restart, in words; empty for nothing."""
    if plan.rendered is None or plan.desired is None:
        return ()
    before, now = plan.rendered.template, template_of(replace(plan.desired, listen_host=plan.listen_host))
    found = [] if before == now else list(_differences(before, json.loads(json.dumps(now))))
    starts_anew = plan.desired.generation.digest != plan.generation.digest
    return (*found, *(("the cache generation, which starts empty",) if starts_anew else ()))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    pods = before["spec"], now["spec"]
    for group in ("initContainers", "containers"):
        old, new = ({each["name"]: each for each in pod.get(group) or ()} for pod in pods)
        for name in sorted(old.keys() | new.keys()):
            one, other = old.get(name, {}), new.get(name, {})
            if one.get("image") != other.get("image"):
                yield f"the image of {name} from {one.get('image')} to {other.get('image')}"
            fields = sorted((one.keys() | other.keys()) - {"image"})
            if changed := [field for field in fields if one.get(field) != other.get(field)]:
                yield f"{' and '.join(changed)} of {name}"
    for field in sorted((pods[0].keys() | pods[1].keys()) - {"initContainers", "containers"}):
        if pods[0].get(field) != pods[1].get(field):
            yield f"{field} of the pods"
    if before["metadata"] != now["metadata"]:
        yield "the connector's configuration"


def _period(probe: Mapping[str, Any]) -> int:
    """Return the seconds between tries of a probe with the user's settings; 0 is Kubernetes' default."""
    return int(probe.get("periodSeconds", _PROBE_PERIOD_SECONDS) or 10)


def _startup_seconds(plan: TierPlan) -> int:
    """Return what a start may take: what we expect, or what the user's threshold of the probe allows."""
    probe = pod_template.of_engine(plan.spec.engine.pod_template.containers).get("startupProbe") or {}
    allowed = probe.get("failureThreshold", 0) * _period(probe)
    return int(max(plan.sizing.startup_seconds, allowed + probe.get("initialDelaySeconds", 0)))


def _shutdown_seconds(plan: TierPlan) -> int:
    """Return what vLLM may take from its signal on, before it kills its own processes."""
    grace = plan.spec.engine.pod_template.termination_grace_period_seconds
    return REQUEST_DRAIN_SECONDS if grace is None else grace - ENDPOINT_DRAIN_SECONDS - TEARDOWN_SECONDS


def template_of(plan: TierPlan) -> Manifest:
    """Return the pods that this version of the operator makes."""
    template = plan.spec.engine.pod_template
    restart = {names.ANNOTATION_RESTART: plan.restart} if plan.restart else {}
    # Read at the start alone, so another one takes another pod.
    files = connectors.render(plan).files
    return {
        "metadata": {
            "labels": {**template.labels, **names.labels(plan.tier, names.COMPONENT_ENGINE)},
            "annotations": {
                **template.annotations,
                names.ANNOTATION_CONFIG_DIGEST: plan.config_digest,
                **({names.ANNOTATION_FILES_DIGEST: digest(dict(files))} if files else {}),
                **restart,
            },
        },
        "spec": _pod(plan),
    }


def _pod(plan: TierPlan) -> Manifest:
    template, rendered = plan.spec.engine.pod_template, connectors.render(plan)
    ours = {
        "serviceAccountName": pod_settings.service_account(plan),
        "automountServiceAccountToken": False,
        # A Service called "vllm" would otherwise set VLLM_PORT=tcp://…, which vLLM reads as its own setting.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ENDPOINT_DRAIN_SECONDS + _shutdown_seconds(plan) + TEARDOWN_SECONDS,
        "securityContext": pod_settings.security_context(template),
        # On the node's network, the node's own resolver knows no Service.
        **({"dnsPolicy": "ClusterFirstWithHostNet"} if template.host_network else {}),
        **template.pod_fields(),
        # The first replica may run on any node that the volume allows, the others beside it.
        **({"affinity": pod_settings.beside_engines(plan, template.affinity)} if plan.is_on_one_node else {}),
    }
    beside = [pod_settings.of_user(each) for each in template.containers if each["name"] != pod_template.ENGINE]
    return {
        **ours,
        "initContainers": [
            *([_install_container(plan)] if _has_install(plan, rendered) else []),
            *rendered.init,
            *(pod_settings.of_user(each) for each in template.init_containers),
        ],
        "containers": [_engine_container(plan, rendered, pod_template.of_engine(template.containers)), *beside],
        "volumes": _volumes(plan, rendered),
    }


def _has_install(plan: TierPlan, rendered: Rendered) -> bool:
    """Return whether an init container brings our package, clears shared memory, or links the compile caches."""
    return rendered.needs_package or plan.spec.connector.kind.is_in_shm or plan.spec.engine.compile_cache is not None


def _install_container(plan: TierPlan) -> Manifest:
    return {
        "name": names.INSTALL_CONTAINER,
        "image": plan.connector_image,
        "command": ["python3", "-m", "kvtier_connector.pod_tools.install"],
        # Shared memory of a crashed engine outlives its container, because the emptyDir is the pod's.
        "args": ["--target", names.CONNECTOR_MOUNT, "--clear-shm", names.SHM_MOUNT, *_link_caches(plan)],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        # The end of a crashed container's log is the only thing that says why, to a person and in the status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod_settings.hardened(),
        "volumeMounts": [
            {"name": "connector", "mountPath": names.CONNECTOR_MOUNT},
            {"name": "shm", "mountPath": names.SHM_MOUNT},
            {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
            *([] if plan.spec.engine.compile_cache is None else [_COMPILED_MOUNT]),
        ],
    }


def _link_caches(plan: TierPlan) -> list[str]:
    """Return the flags that link the engine's caches to the directory of its image and model."""
    if plan.spec.engine.compile_cache is None:
        return []
    model, engine = plan.spec.model, plan.spec.engine
    shared = digest({"image": engine.image, "model": model.name, "revision": model.revision})
    return [f"--caches={names.COMPILED_MOUNT}/{shared}", f"--link-caches={names.SCRATCH_MOUNT}"]


def _startup(plan: TierPlan) -> Manifest:
    if not plan.spec.connector.is_ours:
        return {"httpGet": {"path": "/health", "port": "http"}}
    # At the address that the engine is told to listen on: to Linux, all addresses are this machine.
    return {"exec": {"command": [*_READY_COMMAND, f"--host={plan.listen_host}", f"--port={names.HTTP_PORT}"]}}


def _engine_container(plan: TierPlan, rendered: Rendered, added: Mapping[str, Any]) -> Manifest:
    engine, keys, period = plan.spec.engine, plan.spec.disk.encryption, _period(added.get("startupProbe") or {})
    ours = {
        "name": names.ENGINE_CONTAINER,
        "image": engine.image,
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": _args(plan, rendered),
        "env": _env(plan, rendered),
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            *engine_config.events_ports(plan.spec),
            *rendered.ports,
        ],
        "resources": pod_settings.engine_resources(plan),
        # The engine answers, and it has its volume or has decided to serve without. Only at the start: a volume that
        # fails later costs what is computed instead, and an engine that serves is not taken away for it.
        "startupProbe": {
            **_startup(plan),
            "periodSeconds": period,
            # A start of Python on a node that is busy loading a model, and the engine's own answer.
            "timeoutSeconds": 10,
            "failureThreshold": math.ceil(plan.sizing.startup_seconds / period),
        },
        "readinessProbe": {**_health(), "timeoutSeconds": 5, "failureThreshold": 3},
        # /health answers 503 once the engine core has died. A busy front end may be slow to answer: that is no reason
        # to throw away what it computed.
        "livenessProbe": {**_health(), "timeoutSeconds": 10, "failureThreshold": 12},
        "lifecycle": {"preStop": {"exec": {"command": list(_DRAIN_COMMAND)}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod_settings.hardened(added),
        "volumeMounts": [
            *rendered.mounts,
            *(
                [{"name": "connector", "mountPath": names.CONNECTOR_MOUNT, "readOnly": True}]
                if rendered.needs_package
                else []
            ),
            {"name": "shm", "mountPath": names.SHM_MOUNT},
            {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
            *([] if keys is None else [{"name": "kvtier-keys", "mountPath": names.KEYS_MOUNT, "readOnly": True}]),
            *engine_config.adapter_mounts(plan.spec.model),
            *([] if plan.spec.engine.compile_cache is None else [_COMPILED_MOUNT]),
            *engine.pod_template.volume_mounts,
        ],
    }
    return lay_over(ours, added)


def _health() -> Manifest:
    return {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_PERIOD_SECONDS}


def _args(plan: TierPlan, rendered: Rendered) -> list[str]:
    model, engine = plan.spec.model, plan.spec.engine
    return [
        f"--model={model.name}",
        # A directory has no revisions; vLLM would ask the hub for one.
        *([] if model.name.startswith("/") else [f"--revision={model.revision}"]),
        f"--host={plan.listen_host}",
        f"--port={names.HTTP_PORT}",
        f"--served-model-name={model.name}",
        f"--tensor-parallel-size={engine.tensor_parallel}",
        "--enable-prefix-caching",
        f"--prefix-caching-hash-algo={plan.spec.hash.algorithm}",
        f"--shutdown-timeout={_shutdown_seconds(plan)}",
        f"--kv-transfer-config={rendered.transfer_text}",
        *engine_config.events_args(plan.spec),
        *rendered.args,
        *checkpoints_of(plan.spec, plan.decisions.chunking).args(),
        *engine_config.adapter_args(model),
        *(word for word in engine.args if word not in HARMLESS),
    ]


def _env(plan: TierPlan, rendered: Rendered) -> list[Manifest]:
    token = plan.spec.model.token_secret_ref
    ours: list[Manifest] = [
        # First, so that nothing that follows can be thought to change it: equal in every pod, or no block is found.
        {"name": "PYTHONHASHSEED", "value": plan.spec.hash.seed},
        *([{"name": "PYTHONPATH", "value": names.CONNECTOR_MOUNT}] if rendered.needs_package else []),
        # The root file system is read-only; everything that vLLM and its libraries write goes to the scratch volume.
        {"name": "HOME", "value": f"{names.SCRATCH_MOUNT}/home"},
        # getpass.getuser() raises for a user id that the image's /etc/passwd does not know.
        {"name": "USER", "value": "kvtier"},
        {"name": "HF_HOME", "value": names.MODEL_CACHE},
        {"name": "XDG_CACHE_HOME", "value": f"{names.SCRATCH_MOUNT}/cache"},
        {"name": "VLLM_CACHE_ROOT", "value": f"{names.SCRATCH_MOUNT}/vllm"},
        {"name": "TRITON_CACHE_DIR", "value": f"{names.SCRATCH_MOUNT}/triton"},
        {"name": "TORCHINDUCTOR_CACHE_DIR", "value": f"{names.SCRATCH_MOUNT}/torchinductor"},
    ]
    ours += engine_config.events_env(plan.spec)
    if token is not None:
        ours.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    ours += rendered.env
    # Names are unique, as server-side apply demands. Fixed variables were refused with the spec.
    return list({entry["name"]: dict(entry) for entry in (*ours, *plan.spec.engine.env)}.values())


def _volumes(plan: TierPlan, rendered: Rendered) -> list[Manifest]:
    return [
        *rendered.volumes,
        *([{"name": "connector", "emptyDir": {"sizeLimit": "64Mi"}}] if _has_install(plan, rendered) else []),
        # The default /dev/shm of a container is 64 MiB; the CPU tier is a file in it.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity.format_bytes(plan.sizing.shm_bytes)}},
        {"name": "scratch", "emptyDir": {}},
        *([] if plan.spec.disk.encryption is None else [_keys(plan.spec.disk.encryption)]),
        *engine_config.adapter_volumes(plan.spec.model),
        *(
            []
            if (cache := plan.spec.engine.compile_cache) is None
            else [{"name": _COMPILED_MOUNT["name"], "persistentVolumeClaim": {"claimName": cache.claim}}]
        ),
        *plan.spec.engine.pod_template.volumes,
    ]


def _keys(encryption: EncryptionSpec) -> Manifest:
    """Return the volume with the keys: readable for the pod's group alone, as its block files are."""
    secret = {"secretName": encryption.secret_name, "defaultMode": 0o440, "optional": False}
    return {"name": "kvtier-keys", "secret": secret}


def release_of(image: str) -> str | None:
    """Return the release of vLLM in an image; None for images whose tags number other releases."""
    found = re.fullmatch(
        r"(?:.*/)?(?:vllm/vllm-openai(?:-[a-z0-9]+)*|vllm-[a-z0-9]+-release-repo):([^@:/]*)(?:@.*)?", image
    )
    return None if found is None else vllm_release(found[1])


def release_problem(spec: TierSpec) -> Problem | None:
    """Return that no connector supports the release of vLLM in the tier's image."""
    image, release = spec.engine.image, release_of(spec.engine.image) if spec.connector.is_ours else None
    if release is None or release in SUPPORTED_VLLM:
        return None
    return Problem(
        Reason.VLLM_UNSUPPORTED,
        f"spec.engine.image {image} is vLLM {release}, and this release of kvtier supports "
        f"{' and '.join(SUPPORTED_VLLM)}: engines serve without the volume; set spec.engine.image to one of these",
    )


def _judge(stage: PlannedStage, _previous: Status) -> Problem:
    """The pods are as this operator would make them, with a vLLM that the connector supports."""
    restart = (
        f"`kubectl annotate kvt {stage.tier.name} -n {stage.tier.namespace} --overwrite "
        f'{names.ANNOTATION_RESTART}="$(date +%s)"`'
    )
    if (problem := release_problem(stage.spec)) is not None:
        return problem
    if changed := drift(stage.plan):
        return Problem(
            Reason.ENGINES_OUTDATED,
            f"engines are as an earlier operator made them, and this one would change "
            f"{listed(changed)}: {restart} replaces them, one at a time; so does the next edit of the spec",
        )
    engines = stage.snapshot.engines
    if engines.updated < engines.replicas:
        return unknown(
            Reason.ENGINES_REPLACED,
            f"{engines.replicas - engines.updated} of {engines.replicas} engines are to be replaced",
        )
    return met(Reason.CURRENT, "engines are as this operator makes them")


UP_TO_DATE: Final = ConditionRule(kind="UpToDate", needs=PlannedStage, judge=_judge, counts=False)
