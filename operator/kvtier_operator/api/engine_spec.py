# SPDX-License-Identifier: Apache-2.0
"""``spec.engine`` of a KVCacheTier: the vLLM process, what it runs on, and how its pods are scheduled. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from kvtier_operator import quantity
from kvtier_operator.api import reserved_flags
from kvtier_operator.api.pod_template import ENGINE, IntOrText, PodTemplate, Variable, amounts, of_engine
from kvtier_operator.api.rules import ApiModel, Checked, Keyed, Pasted, Rule
from kvtier_operator.api.scalars import ByteQuantity, CpuQuantity, LabelKey, ObjectName, Word

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
        Checked(reserved_flags.FLAG_RULES),
    ] = ()
    """More flags for vLLM, one word each: `--max-model-len`, `"32768"`. Flags that a field of this resource sets are
    refused. JSON that is longer than a word may be goes in parts: `--flag.key`, then the value."""
    env: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(Variable)], ...],
        Field(max_length=128),
        Keyed("name"),
        Checked(reserved_flags.ENV_RULES),
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
