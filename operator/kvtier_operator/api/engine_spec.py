# SPDX-License-Identifier: Apache-2.0
"""``spec.engine`` of a KVCacheTier: the vLLM process, its devices, and how its pods are scheduled. Pure.

vLLM keeps the last value of a flag, so a second ``--revision`` in ``spec.engine.args`` would serve one model under the
cache identity of another. Flags and variables that the operator sets are refused in every spelling that vLLM's parser
takes: ``--flag x``, ``--flag=x``, ``--flag.key x``, underscores for dashes, and any abbreviation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from kvtier_operator import quantity
from kvtier_operator.api.external_spec import ExternalEngines
from kvtier_operator.api.pod_template import ENGINE, IntOrText, PodTemplate, Variable, amounts, of_engine
from kvtier_operator.api.rules import (
    TEXT,
    Annotations,
    ApiModel,
    ByteQuantity,
    Checked,
    Converted,
    CpuQuantity,
    Keyed,
    ObjectName,
    Pasted,
    Rule,
    Word,
    at,
)

_TIERS: Final = "the operator renders it from spec.connector, spec.cpu and spec.volume"
_SERVED: Final = (
    "the Service and the probes expect the engine on port 8000 of the pod, on every address; leave it out, or write "
    "--port=8000 and --host=0.0.0.0, each as one word"
)
_ONE_POD: Final = "an engine is one pod, which answers requests; use a node with more devices, or raise spec.replicas"
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
    "--nnodes": _ONE_POD,
    "--headless": _ONE_POD,
    "--shutdown-timeout": "the operator fits it into the grace period of the pod",
    "--config": "write its flags in spec.engine.args, where they are checked and become part of the cache identity",
}
"""Flag to what its user does instead."""

HARMLESS: Final = ("--enable-prefix-caching", "--port=8000", "--host=0.0.0.0")
"""Flags that the operator sets to these very values. They are accepted in these spellings and never passed to vLLM,
where the last value counts: on a cluster of IPv6, --host is another one."""

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


def refuse_flags(flags: Mapping[str, str], *, harmless: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return a rule for each flag that a list must not have, with what to do instead; `harmless` words are taken."""

    def rule(flag: str, instead: str) -> Rule:
        expression = abbreviations(flag)
        allowed = "".join(f" || word == '{each}'" for each in harmless if re.match(expression, each))
        return Rule(
            cel=f"self.all(word, !word.matches('{expression}'){allowed})",
            message=f"{flag} (or an abbreviation of it) is not yours to set here: {instead}",
            check=lambda words: not any(re.match(expression, word) for word in words if word not in harmless),
        )

    return tuple(rule(flag, instead) for flag, instead in flags.items())


def _env_rule(name: str, instead: str) -> Rule:
    def check(env: Sequence[Mapping[str, Any]]) -> bool:
        return all(variable["name"] != name for variable in env)

    return Rule(
        cel=f"self.all(variable, variable.name != '{name}')",
        message=f"{name} is not yours to set here: {instead}",
        check=check,
    )


_FLAG_RULES: Final = (
    *refuse_flags(FLAGS, harmless=HARMLESS),
    Rule(
        cel="self.size() == 0 || self[0].startsWith('-')",
        message="the first item must be a flag, such as --max-model-len; spec.model.name names the model",
        check=lambda args: not args or args[0].startswith("-"),
    ),
    Rule(
        cel=r"self.all(word, !word.matches(r'^-[^=]*\s'))",
        message="a flag and its value must be two items, or one item joined by '=': no shell splits them at spaces",
        check=lambda args: not any(re.match(r"-[^=]*\s", word) for word in args),
    ),
    Rule(
        cel="self.all(word, word != '--')",
        message="'--' would turn the flags after it into names; remove it",
        check=lambda args: "--" not in args,
    ),
)

NO_ACCELERATOR: Final = "none"
"""``engine.accelerator.resource`` of vLLM's CPU build."""

CLAIMED: Final = "claim"
"""``engine.accelerator.resource`` of devices that the pod's resource claims bring."""

_RESOURCE: Final = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"

_IS_RESOURCE: Final = Rule.that(
    TEXT.matches(f"{NO_ACCELERATOR}|{CLAIMED}|{_RESOURCE}"),
    'must be the resource name of a device plugin, such as nvidia.com/gpu, "claim" (devices of '
    'podTemplate.resourceClaims), or "none" (vLLM\'s CPU build)',
)


class Accelerator(ApiModel):
    """The devices that one engine gets."""

    resource: Annotated[StrictStr, Field(min_length=1, max_length=128), Checked((_IS_RESOURCE,))] = "nvidia.com/gpu"
    """Resource that the device plugin offers, such as `nvidia.com/gpu`, `amd.com/gpu` or `gpu.intel.com/xe`; `claim`
    for those of `podTemplate.resourceClaims`; `none` for vLLM's CPU build."""
    # Without a default in the schema: the API server would fill it in, and it would not look left out.
    per_pod: Annotated[StrictInt, Field(ge=1, le=64, json_schema_extra=lambda schema: schema.pop("default", None))] = 1
    """Devices per pod. Left out, as many as `tensorParallel`; 1 when `resource` is `none`, which asks for no device."""
    memory: ByteQuantity | None = None
    """Memory of one device, such as `80Gi`, to estimate its own KV cache with. Left out, it is read from the nodes'
    label nvidia.com/gpu.memory."""

    memory_bytes = Converted[int | None]("memory", quantity.parse_bytes)

    @property
    def of_plugin(self) -> dict[str, int]:
        """Return the devices that a device plugin is asked for, by resource."""
        return {} if self.resource in {NO_ACCELERATOR, CLAIMED} else {self.resource: self.per_pod}


class ServiceSettings(ApiModel):
    """The Service in front of the engines."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Who can reach it: the cluster, or also others. Engines ask for no password unless `env` sets `VLLM_API_KEY`."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations, such as those that tell a cloud which load balancer to make."""


_CountOrShare = Annotated[
    IntOrText,
    Checked(
        (
            Rule(
                # Without CEL: the text has no greatest length there, and so no bounded cost.
                message="must be a number of engines, 0 or more, or a share of them such as 25%",
                check=lambda found: (
                    found >= 0 if isinstance(found, int) else re.fullmatch("(100|[1-9]?[0-9])%", found) is not None
                ),
            ),
        )
    ),
]


class DisruptionBudget(ApiModel):
    """How many engines a drain of nodes may take at once. An engine that does not serve never holds up a drain."""

    max_unavailable: _CountOrShare | None = None
    """Engines that may be missing, as a number or as a share such as `25%`; 1 if both are left out."""
    min_available: _CountOrShare | None = None
    """Engines that must stay, as a number or as a share."""

    rules = (
        Rule.that(
            ~at("maxUnavailable").is_given | ~at("minAvailable").is_given,
            "give maxUnavailable or minAvailable, not both",
        ),
    )


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


def _is_cpu_limit_enough(engine: EngineSpec) -> bool:
    limit = str(amounts(of_engine(engine.pod_template.containers), "limits").get("cpu", ""))
    return not quantity.is_quantity(limit) or quantity.parse_millis(limit) >= quantity.parse_millis(engine.cpu)


class EngineSpec(ApiModel):
    """The vLLM engine of one replica."""

    external: ExternalEngines | None = None
    """Engines of another owner. The operator then makes no engines, and every field that only makes them is
    refused."""
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
        Checked(_FLAG_RULES),
    ] = ()
    """More flags for vLLM, one word each: `--max-model-len`, `"32768"`. Flags that a field of this resource sets are
    refused. JSON that is longer than a word may be goes in parts: `--flag.key`, then the value."""
    env: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(Variable)], ...],
        Field(max_length=128),
        Keyed("name"),
        Checked(tuple(_env_rule(name, instead) for name, instead in ENV.items())),
    ] = ()
    """More environment variables for vLLM. Variables that the operator sets are refused."""
    compile_cache: CompileCache | None = None
    """Where engines share compiled kernels and graphs; each compiles its own if left out."""
    pod_template: PodTemplate = PodTemplate()
    """Additions to the engine pods."""
    rollout: Rollout = Rollout()
    """How a change of the engines reaches the pods."""
    service: ServiceSettings = ServiceSettings()
    """The Service in front of the engines."""
    disruption_budget: DisruptionBudget = DisruptionBudget()
    """How many engines a drain of nodes may take at once."""

    @model_validator(mode="before")
    @classmethod
    def _derive_devices(cls, value: object) -> object:
        """Give the pod as many devices as the model is split over, where their number is left out."""
        if not isinstance(value, Mapping):
            return value
        ranks, accelerator = value.get("tensorParallel"), value.get("accelerator")
        accelerator = {} if accelerator is None else accelerator
        is_open = isinstance(accelerator, Mapping) and accelerator.get("perPod") is None
        if not is_open or type(ranks) is not int or accelerator.get("resource") == NO_ACCELERATOR:
            return value
        return {**value, "accelerator": {**accelerator, "perPod": ranks}}

    rules = (
        Rule.that(
            ~at("accelerator.resource").is_(CLAIMED)
            | at("podTemplate.resourceClaims").test(lambda claims: f"{claims}.size() > 0", bool),
            "claim means the devices of spec.engine.podTemplate.resourceClaims: name a claim there",
            field=".accelerator.resource",
        ),
        Rule(
            cel="!has(self.accelerator) || !has(self.accelerator.resource) || !has(self.podTemplate) || "
            "!has(self.podTemplate.containers) || self.podTemplate.containers.all(each, "
            f"each.name != '{ENGINE}' || !has(each.resources) || "
            "!((has(each.resources.requests) && self.accelerator.resource in each.resources.requests) || "
            "(has(each.resources.limits) && self.accelerator.resource in each.resources.limits)))",
            message=f"the accelerator among the resources of the container {ENGINE} is not yours to set here: set "
            "spec.engine.accelerator.perPod",
            check=lambda engine: (
                not any(
                    engine.accelerator.resource in amounts(of_engine(engine.pod_template.containers), kind)
                    for kind in ("requests", "limits")
                )
            ),
            field=".podTemplate.containers",
        ),
        Rule(
            # Without CEL: the amounts have no greatest length, and so no bounded cost.
            message=f"resources.limits.cpu of the container {ENGINE} is less than spec.engine.cpu, which the pod "
            "requests: raise it, or lower spec.engine.cpu",
            check=_is_cpu_limit_enough,
            field=".podTemplate.containers",
        ),
    )

    memory_bytes = Converted("memory", quantity.parse_bytes)
    ephemeral_bytes = Converted[int | None]("ephemeral_storage", quantity.parse_bytes)
