# SPDX-License-Identifier: Apache-2.0
"""``spec.engine`` of a KVCacheTier: the vLLM process, what it runs on, and how its pods are scheduled. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import Field, StrictInt, StrictStr

from kvtier_operator import quantity
from kvtier_operator.spec import owned
from kvtier_operator.spec.pods import PodTemplate, Variable
from kvtier_operator.spec.rules import ApiModel, Checked, Keyed, Pasted, Rule
from kvtier_operator.spec.scalars import ByteQuantity, CpuQuantity, Word

NO_ACCELERATOR: Final = "none"
"""``engine.accelerator.resource`` of vLLM's CPU build."""

_RESOURCE: Final = re.compile(r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")

ACCELERATOR_NAME: Final = Rule(
    cel=f"self == 'none' || self.matches('{_RESOURCE.pattern}')",
    message='must be "none" (vLLM\'s CPU build) or the resource name of a device plugin, such as nvidia.com/gpu',
    check=lambda text: text == NO_ACCELERATOR or _RESOURCE.fullmatch(text) is not None,
)


class Accelerator(ApiModel):
    """The devices that one engine gets."""

    resource: Annotated[StrictStr, Field(min_length=1, max_length=128), Checked((ACCELERATOR_NAME,))] = "nvidia.com/gpu"
    """Resource that the device plugin offers, such as `nvidia.com/gpu`, `amd.com/gpu` or `gpu.intel.com/xe`; `none` for
    vLLM's CPU build."""
    per_pod: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Devices per pod. Stays at 1 when `resource` is `none`, which asks for no device."""
    memory: ByteQuantity | None = None
    """Memory of one device, such as `80Gi`, to estimate its own KV cache with. Left out, it is read from the nodes'
    label nvidia.com/gpu.memory."""

    @property
    def memory_bytes(self) -> int | None:
        """Return `memory` in bytes; None where it is left out."""
        return None if self.memory is None else quantity.parse_bytes(self.memory)


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


class Engine(ApiModel):
    """The vLLM engine of one replica."""

    image: Word = "vllm/vllm-openai:v0.32.0"
    """Image with vLLM in it: a stock one will do, the connector is added when the pod starts. Another image starts a
    new cache generation."""
    accelerator: Accelerator = Accelerator()
    """The devices that one engine gets."""
    tensor_parallel: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Devices that one model is split over (vLLM's `--tensor-parallel-size`). At most `accelerator.perPod`. Changing it
    starts a new cache generation."""
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
        tuple[Annotated[StrictStr, Field(min_length=1, max_length=4096)], ...],
        Field(max_length=128),
        Checked(owned.FLAG_RULES),
    ] = ()
    """More flags for vLLM, one word each: `--max-model-len`, `"32768"`. Flags that a field of this resource sets are
    refused."""
    env: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(Variable)], ...],
        Field(max_length=128),
        Keyed("name"),
        Checked(owned.ENV_RULES),
    ] = ()
    """More environment variables for vLLM. Variables that the operator sets are refused."""
    pod_template: PodTemplate = PodTemplate()
    """How the engine pods are labelled, placed and secured."""
    rollout: Rollout = Rollout()
    """How a change of the engines reaches the pods."""

    @property
    def memory_bytes(self) -> int:
        """Return `memory` in bytes."""
        return quantity.parse_bytes(self.memory)

    @property
    def ephemeral_bytes(self) -> int | None:
        """Return `ephemeral_storage` in bytes; None where it is left out."""
        return None if self.ephemeral_storage is None else quantity.parse_bytes(self.ephemeral_storage)
