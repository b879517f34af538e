# SPDX-License-Identifier: Apache-2.0
"""Causes of crashes, recognised in the end of an engine's log, and their remedies. Pure.

The kubelet keeps the end of a failed container's log in the pod's status, so no right to read logs is needed. The
first line of the table that fits counts: causes stand before their consequences.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kvtier_operator.api.reasons import Reason

BUS_ERROR_CODES: Final = frozenset({135, -7})
"""SIGBUS: a page of shared memory was touched that /dev/shm has no room for."""

_LONGEST_QUOTE: Final = 200


class Explanation(NamedTuple):
    """Why an engine ended, and the remedy."""

    reason: Reason
    remedy: str
    quote: str
    """The line that says so; empty where the exit code does."""


class _Clue(NamedTuple):
    pattern: re.Pattern[str]
    reason: Reason
    remedy: str


def _clue(pattern: str | tuple[str, ...], reason: Reason, remedy: str) -> _Clue:
    alternatives = (pattern,) if isinstance(pattern, str) else pattern
    return _Clue(re.compile("|".join(alternatives), re.IGNORECASE), reason, remedy)


_SHM_REMEDY: Final = (
    "shared memory is too small: it holds spec.cpu.size and 1Gi per engine core; if something else in the pod uses it, "
    "lower spec.cpu.size"
)

_CLUES: Final = (
    _clue(
        r"(loading lora .* failed|no adapter found for|lora rank .*greater than max_lora_rank|call to add_lora"
        r"|adapter bias is not supported|unexpected modules in .*lora|is unsupported lora weight|adapter_config\.json)",
        Reason.ADAPTER_REFUSED,
        "vLLM cannot use an adapter: correct its source in spec.model.loras, remove it there, or raise "
        "spec.model.maxLoraRank; engines that run go on without it",
    ),
    _clue(
        r"(gatedrepoerror|gated repo|access to model .* is restricted|40[13] client error|invalid (user )?token"
        r"|invalid credentials|must have access to it and be authenticated)",
        Reason.TOKEN_REFUSED,
        "the model hub refuses the token: check the Secret of spec.model.tokenSecretRef and that its account was "
        "granted the model",
    ),
    _clue(
        (
            r"couldn't connect to ['\"]?https?://|we couldn't connect to|offline mode is enabled",
            r"(huggingface\.co|hf\.co|modelscope).*(timed out|name resolution|max retries|connection|unreachable)",
            r"(failed to resolve|max retries exceeded|connecttimeout|connecterror).*(huggingface|hf\.co|modelscope)",
            r"localentrynotfounderror|cannot find the requested files in the disk cache",
        ),
        Reason.HUB_UNREACHABLE,
        "the pods cannot reach the model hub: allow egress to it, or give a proxy (HTTPS_PROXY) or a mirror "
        "(HF_ENDPOINT) in spec.engine.env. Or put the model on a volume: mount it with "
        "spec.engine.podTemplate.volumes, and set spec.model.name to its directory",
    ),
    _clue(
        r"(repositorynotfounderror|revisionnotfounderror|entrynotfounderror|404 client error"
        r"|is not a valid model identifier|is not a local folder|incorrect path_or_model_id|repo id must be)",
        Reason.MODEL_NOT_FOUND,
        "the model does not exist under that name: correct spec.model.name or spec.model.revision, or mount its "
        "directory with spec.engine.podTemplate.volumes",
    ),
    _clue(
        r"(vllm_offload\S*.*(exists|no space)|(exists|errno 17).*vllm_offload)",
        Reason.STALE_SHM,
        "a region of an engine that is gone fills shared memory: delete the pod, its next one starts with an empty one",
    ),
    _clue(
        r"((no space left|errno 28|cannot allocate|errno 12).*(/dev/shm|shm|shared.?memory)"
        r"|(/dev/shm|shm_open|shared.?memory).*(no space left|errno 28|too small|cannot allocate)"
        r"|insufficient space in /dev/shm|bus error|errno 14\] bad address)",
        Reason.SHM_TOO_SMALL,
        _SHM_REMEDY,
    ),
    _clue(
        r"(no cuda gpus are available|no nvidia driver|found no nvidia|libcuda\.so|nvml.*(not found|uninitialized)"
        r"|failed to infer device type|no hip gpus are available|cuda driver version is insufficient"
        r"|device string must not be empty)",
        Reason.DEVICE_MISSING,
        "the engine sees no device: check spec.engine.accelerator, the device plugin and the driver of the node, and "
        "spec.engine.podTemplate.runtimeClassName (such as nvidia)",
    ),
    _clue(
        (
            r"cuda out of memory|outofmemoryerror|hip out of memory|no available memory for the cache blocks",
            r"free memory on device .* is less than desired|kv cache (is )?needed.*larger than",
            r"larger than the (maximum number of tokens|available kv)",
        ),
        Reason.DEVICE_OUT_OF_MEMORY,
        "the model and its KV cache do not fit the device: lower --max-model-len or --gpu-memory-utilization in "
        "spec.engine.args, raise spec.engine.tensorParallel, or use a larger device",
    ),
    _clue(
        r"encoder-decoder models are not (currently )?supported with kv connectors",
        Reason.MODEL_UNSUPPORTED,
        "vLLM has no prefix cache for an encoder-decoder model and starts none with a KV connector: serve it without a "
        "KVCacheTier",
    ),
    _clue(
        r"(unrecognized arguments|invalid choice|error: argument|expected one argument)",
        Reason.ARGS_REFUSED,
        "vLLM does not take its flags: correct spec.engine.args for this version of spec.engine.image",
    ),
    _clue(
        r"(no module named 'kvtier_connector|kvtier_connector\.errors\.configinvalid|configinvalid:)",
        Reason.CONFIG_REFUSED,
        "the connector refuses its configuration: run the operator and the connector image of one release, and set the "
        "annotation kvtier.dev/restart to take them up",
    ),
)


LASTING: Final = frozenset(clue.reason for clue in _CLUES) - {Reason.HUB_UNREACHABLE, Reason.STALE_SHM}
"""Causes that stay until a person acts."""


def explain(message: str, exit_code: int | None) -> Explanation | None:
    """Return the cause that the end of a log names; None where no known cause is in it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for clue in _CLUES:
        # The last lines of vLLM are consequences of those above, so the newest line that fits is the closest.
        for line in reversed(lines):
            if clue.pattern.search(line):
                return Explanation(clue.reason, clue.remedy, line[-_LONGEST_QUOTE:])
    if exit_code in BUS_ERROR_CODES:
        return Explanation(Reason.SHM_TOO_SMALL, _SHM_REMEDY, "")
    return None


_MOUNTS: Final = (
    _clue(
        r"multi-attach error",
        Reason.MULTI_ATTACH,
        "the volume can be attached to one node only and is still attached to another. Use a ReadWriteMany storage "
        "class, or set spec.replicas to 1 and wait until the old pod is gone",
    ),
    _clue(
        r"(no runtime for|runtimeclass|runtime handler)",
        Reason.RUNTIME_CLASS_MISSING,
        "the node does not know the container runtime: correct spec.engine.podTemplate.runtimeClassName, or install "
        "it on the nodes",
    ),
    _clue(
        r"(secret|configmap) .*not found",
        Reason.CONFIG_MISSING,
        "create the object it names, or correct spec.disk.encryption.secretName or spec.engine.podTemplate.volumes",
    ),
)


def explain_mount(message: str) -> tuple[Reason, str]:
    """Return what the kubelet's trouble with a pod's volumes or sandbox means."""
    for clue in _MOUNTS:
        if clue.pattern.search(message):
            return clue.reason, clue.remedy
    return Reason.VOLUME_NOT_MOUNTED, (
        "the node cannot bring the pod its volumes: check that the storage class's driver runs there and that the "
        "server of the volume can be reached"
    )
