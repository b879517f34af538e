# SPDX-License-Identifier: Apache-2.0
"""Flags and environment variables of the engine that the operator sets, and the field to change instead. Pure.

vLLM keeps the last value it is given, so a second ``--revision`` in ``spec.engine.args`` would quietly serve one model
under the cache identity of another. Each of these is refused, in every spelling that vLLM's parser takes: ``--flag x``,
``--flag=x``, ``--flag.key x``, underscores for dashes, and any abbreviation.

``spec.engine`` of a KVCacheTier: the vLLM process, what it runs on, and how its pods are scheduled. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from kvtier_operator import quantity
from kvtier_operator.api.pod_template import ENGINE, IntOrText, PodTemplate, Variable, amounts, of_engine
from kvtier_operator.api.rules import (
    ApiModel,
    ByteQuantity,
    Checked,
    CpuQuantity,
    Keyed,
    LabelKey,
    ObjectName,
    Pasted,
    Rule,
    Word,
)

_TIERS: Final = "the operator renders it from spec.connector, spec.cpu and spec.volume"
_SERVED: Final = (
    "the Service and the probes expect the engine on port 8000 of the pod, on every address; leave it out, or write "
    "--port=8000 and --host=0.0.0.0, each as one word"
)
_PLAIN: Final = "the probes speak plain HTTP to the engine; put TLS in front of the Service"

FLAGS: Final[Mapping[str, str]] = {
    "--model": "set spec.model.name",
    "--revision": "set spec.model.revision",
    "--hf-token": "set spec.model.tokenSecretRef",
    "--tensor-parallel-size": "set spec.engine.tensorParallel",
    "-tp": "set spec.engine.tensorParallel",
    "--prefix-caching-hash-algo": "set spec.hash.algorithm",
    "--no-enable-prefix-caching": "the cache tiers need prefix caching, so it is always on",
    "--kv-transfer-config": _TIERS,
    "--kv-events-config": "set spec.kvEvents",
    "--kv-offloading-size": f"set spec.cpu.size: {_TIERS}",
    "--kv-offloading-backend": _TIERS,
    "--host": _SERVED,
    "--port": _SERVED,
    "--uds": _SERVED,
    "--ssl-certfile": _PLAIN,
    "--ssl-keyfile": _PLAIN,
    "--shutdown-timeout": "the operator fits it into the grace period of the pod",
    "--config": "write its flags in spec.engine.args, where they are checked and become part of the cache identity",
}
"""Flag to what its user does instead."""

HARMLESS: Final = ("--enable-prefix-caching", "--port=8000", "--host=0.0.0.0")
"""What people bring along from elsewhere and the operator sets just so: it may stand there, in these spellings, and
never reaches vLLM, for which the last word counts: on a cluster of IPv6, every address is another one."""

_TOKEN: Final = "set spec.model.tokenSecretRef"  # noqa: S105  the name of a field, not a token
ENV: Final[Mapping[str, str]] = {
    "PYTHONHASHSEED": "set spec.hash.seed, which every pod gets; engines with different seeds cannot share blocks",
    "PYTHONPATH": "the operator points it at the connector",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "set spec.kvEvents.blockHashes, which the volume's events follow, too",
    "HF_TOKEN": _TOKEN,
    "HUGGING_FACE_HUB_TOKEN": _TOKEN,
    "HF_HOME": "the operator points it at /tmp/hf; to keep downloads, mount a volume there with "
    "spec.engine.podTemplate.volumeMounts",
}
"""Variable to what its user does instead."""


def abbreviations(flag: str) -> str:
    """Return the regular expression of a flag, of what argparse takes for it, and of the value or key after it."""
    name = flag.lstrip("-")
    dashes = flag.removesuffix(name)
    rest = ""
    for letter in reversed(name[1:]):
        rest = f"({'[-_]' if letter == '-' else letter}{rest})?"
    return f"^{dashes}{name[0]}{rest}([=.]|$)"


def _flag_rule(flag: str, instead: str) -> Rule:
    expression = abbreviations(flag)
    pattern = re.compile(expression)

    def check(args: Sequence[str]) -> bool:
        return not any(pattern.match(word) for word in args if word not in HARMLESS)

    allowed = "".join(f" || word == '{each}'" for each in HARMLESS if pattern.match(each))
    return Rule(
        cel=f"self.all(word, !word.matches('{expression}'){allowed})",
        message=f"{flag} (or an abbreviation of it) is not yours to set here: {instead}",
        check=check,
    )


def _env_rule(name: str, instead: str) -> Rule:
    def check(env: Sequence[Mapping[str, Any]]) -> bool:
        return all(variable["name"] != name for variable in env)

    return Rule(
        cel=f"self.all(variable, variable.name != '{name}')",
        message=f"{name} is not yours to set here: {instead}",
        check=check,
    )


_SPLIT: Final = re.compile(r"^-[^=]*\s")

FLAG_RULES: Final = (
    *(_flag_rule(flag, instead) for flag, instead in FLAGS.items()),
    Rule(
        cel="self.size() == 0 || self[0].startsWith('-')",
        message="the first item must be a flag, such as --max-model-len; spec.model.name names the model",
        check=lambda args: not args or args[0].startswith("-"),
    ),
    Rule(
        cel=r"self.all(word, !word.matches(r'^-[^=]*\s'))",
        message="a flag and its value must be two items, or one item joined by '=': no shell splits them at spaces",
        check=lambda args: not any(_SPLIT.match(word) for word in args),
    ),
    Rule(
        cel="self.all(word, word != '--')",
        message="'--' would turn the flags after it into names; remove it",
        check=lambda args: "--" not in args,
    ),
)
"""What ``spec.engine.args`` must keep to."""

ENV_RULES: Final = tuple(_env_rule(name, instead) for name, instead in ENV.items())
"""What ``spec.engine.env`` must keep to."""


NO_ACCELERATOR: Final = "none"
"""``engine.accelerator.resource`` of vLLM's CPU build."""

CLAIMED: Final = "claim"
"""``engine.accelerator.resource`` of devices that the pod's resource claims bring."""

_RESOURCE: Final = re.compile(r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")

ACCELERATOR_NAME: Final = Rule(
    cel=f"self == '{NO_ACCELERATOR}' || self == '{CLAIMED}' || self.matches('{_RESOURCE.pattern}')",
    message='must be the resource name of a device plugin, such as nvidia.com/gpu, "claim" (devices of '
    'podTemplate.resourceClaims), or "none" (vLLM\'s CPU build)',
    check=lambda text: text in {NO_ACCELERATOR, CLAIMED} or _RESOURCE.fullmatch(text) is not None,
)


class Accelerator(ApiModel):
    """The devices that one engine gets."""

    resource: Annotated[StrictStr, Field(min_length=1, max_length=128), Checked((ACCELERATOR_NAME,))] = "nvidia.com/gpu"
    """Resource that the device plugin offers, such as `nvidia.com/gpu`, `amd.com/gpu` or `gpu.intel.com/xe`; `claim`
    for those of `podTemplate.resourceClaims`; `none` for vLLM's CPU build."""
    # Without a default in the schema: the API server would fill it in, and nobody could tell that it was left out.
    per_pod: Annotated[StrictInt, Field(ge=1, le=64, json_schema_extra=lambda schema: schema.pop("default", None))] = 1
    """Devices per pod. Left out, as many as `tensorParallel`; 1 when `resource` is `none`, which asks for no device."""
    memory: ByteQuantity | None = None
    """Memory of one device, such as `80Gi`, to estimate its own KV cache with. Left out, it is read from the nodes'
    label nvidia.com/gpu.memory."""

    @property
    def memory_bytes(self) -> int | None:
        """Return `memory` in bytes; None where it is left out."""
        return None if self.memory is None else quantity.parse_bytes(self.memory)

    @property
    def of_plugin(self) -> dict[str, int]:
        """Return the devices that a device plugin is asked for, by resource."""
        return {} if self.resource in {NO_ACCELERATOR, CLAIMED} else {self.resource: self.per_pod}


class ServiceSettings(ApiModel):
    """The Service in front of the engines."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Who can reach it: the cluster, or also others. Engines ask nobody for a password unless `env` sets
    `VLLM_API_KEY`."""
    annotations: Annotated[Mapping[LabelKey, Annotated[StrictStr, Field(max_length=16384)]], Field(max_length=64)] = (
        Field(default_factory=dict)
    )
    """Annotations, such as those that tell a cloud which load balancer to make."""


class DisruptionBudget(ApiModel):
    """How many engines a drain of nodes may take at once. An engine that does not serve never holds up a drain."""

    max_unavailable: IntOrText | None = None
    """Engines that may be missing, as a number or as a share such as `25%`; 1 if both are left out."""
    min_available: IntOrText | None = None
    """Engines that must stay, as a number or as a share."""

    rules = (Rule.not_both("max_unavailable", "min_available"),)


class Rollout(ApiModel):
    """How a change of the engines reaches the pods: they are replaced a few at a time, and the cache stays."""

    max_surge: Annotated[StrictInt, Field(ge=0, le=1000)] = 0
    """Pods beyond `spec.replicas` while engines are replaced. More than 0 needs spare devices and spare memory for a
    whole CPU tier each."""
    max_unavailable: Annotated[StrictInt, Field(ge=0, le=1000)] = 1
    """Pods that may be missing while engines are replaced. 0 needs a `maxSurge` of at least 1."""
    min_ready_seconds: Annotated[StrictInt, Field(ge=0, le=3600)] = 0
    """Seconds that a new engine must have been ready before the next one is replaced."""

    rules = (
        Rule(
            cel="(has(self.maxSurge) && self.maxSurge > 0) || !has(self.maxUnavailable) || self.maxUnavailable > 0",
            message="maxSurge and maxUnavailable cannot both be 0: no pod could ever be replaced",
            check=lambda rollout: rollout.max_surge > 0 or rollout.max_unavailable > 0,
        ),
    )


class CompileCache(ApiModel):
    """A shared directory for what vLLM compiles at its start (`torch.compile`, Triton)."""

    claim: ObjectName
    """PersistentVolumeClaim in the same namespace, which all engines mount and write to. Engines of one image and model
    share a directory on it. Give it a claim of its own: who can write there can run code in the engines. An engine
    that cannot write there compiles for itself."""


class Engine(ApiModel):
    """The vLLM engine of one replica."""

    image: Word = "vllm/vllm-openai:v0.32.0"
    """Image with vLLM in it: a stock one will do, the connector is added when the pod starts. Another image starts a
    new cache generation."""
    accelerator: Accelerator = Accelerator()
    """The devices that one engine gets."""
    tensor_parallel: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Devices that one model is split over (vLLM's `--tensor-parallel-size`). At most `accelerator.perPod`. Changing it
    starts a new cache generation, unless `disk.canonicalLayout` is set."""
    memory: ByteQuantity = "16Gi"
    """Host memory of the engine itself, beside the CPU tier: weights on their way to the device, Python, the model on
    the CPU build. The pod asks for this plus its shared memory."""
    ephemeral_storage: ByteQuantity | None = None
    """Storage of the node that the pod may use for downloaded weights, compiled kernels and logs: requested, and the
    limit. Left out, what it will likely need is requested, without a limit."""
    cpu: CpuQuantity = "4"
    """Processors that the engine asks for, as a number of CPUs. There is no limit on what it may use when others do
    not."""
    args: Annotated[
        # Short enough for the API server to compare each of them with every reserved flag within its budget.
        tuple[Annotated[StrictStr, Field(min_length=1, max_length=1024)], ...],
        Field(max_length=128),
        Checked(FLAG_RULES),
    ] = ()
    """More flags for vLLM, one word each: `--max-model-len`, `"32768"`. Flags that a field of this resource sets are
    refused. JSON that is longer than a word may be goes in parts: `--flag.key`, then the value."""
    env: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(Variable)], ...],
        Field(max_length=128),
        Keyed("name"),
        Checked(ENV_RULES),
    ] = ()
    """More environment variables for vLLM. Variables that the operator sets are refused."""
    compile_cache: CompileCache | None = None
    """Where engines share compiled kernels and graphs; each compiles its own if left out."""
    pod_template: PodTemplate = PodTemplate()
    """What the engine pods have beside what the operator gives them."""
    rollout: Rollout = Rollout()
    """How a change of the engines reaches the pods."""
    service: ServiceSettings = ServiceSettings()
    """The Service in front of the engines."""
    disruption_budget: DisruptionBudget = DisruptionBudget()
    """How many engines a drain of nodes may take at once."""

    @model_validator(mode="before")
    @classmethod
    def _derive_devices(cls, value: object) -> object:
        """Give the pod as many devices as the model is split over, where nobody says how many."""
        if not isinstance(value, Mapping):
            return value
        ranks, accelerator = value.get("tensorParallel"), value.get("accelerator")
        accelerator = {} if accelerator is None else accelerator
        is_open = isinstance(accelerator, Mapping) and accelerator.get("perPod") is None
        if not is_open or type(ranks) is not int or accelerator.get("resource") == NO_ACCELERATOR:
            return value
        return {**value, "accelerator": {**accelerator, "perPod": ranks}}

    rules = (
        Rule(
            cel=f"!has(self.accelerator) || !has(self.accelerator.resource) || self.accelerator.resource != '{CLAIMED}'"
            " || (has(self.podTemplate) && has(self.podTemplate.resourceClaims) && "
            "self.podTemplate.resourceClaims.size() > 0)",
            message="claim means the devices of spec.engine.podTemplate.resourceClaims: name a claim there",
            check=lambda engine: engine.accelerator.resource != CLAIMED or len(engine.pod_template.resource_claims) > 0,
            field=".accelerator.resource",
        ),
        Rule(
            cel="!has(self.accelerator) || !has(self.accelerator.resource) || !has(self.podTemplate) || "
            "!has(self.podTemplate.containers) || self.podTemplate.containers.all(each, "
            f"each.name != '{ENGINE}' || !has(each.resources) || "
            "!((has(each.resources.requests) && self.accelerator.resource in each.resources.requests) || "
            "(has(each.resources.limits) && self.accelerator.resource in each.resources.limits)))",
            message=f"the accelerator among the resources of the container {ENGINE} is not yours to set "
            "here: set spec.engine.accelerator.perPod",
            check=lambda engine: (
                not any(
                    engine.accelerator.resource in amounts(of_engine(engine.pod_template.containers), kind)
                    for kind in ("requests", "limits")
                )
            ),
            field=".podTemplate.containers",
        ),
    )

    @property
    def memory_bytes(self) -> int:
        """Return `memory` in bytes."""
        return quantity.parse_bytes(self.memory)

    @property
    def ephemeral_bytes(self) -> int | None:
        """Return `ephemeral_storage` in bytes; None where it is left out."""
        return None if self.ephemeral_storage is None else quantity.parse_bytes(self.ephemeral_storage)
