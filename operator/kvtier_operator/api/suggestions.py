# SPDX-License-Identifier: Apache-2.0
"""What may be meant by a field that there is not: one of another level, another product's word, a typo. Pure."""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvtier_operator.api.rules import ApiModel, Pasted

_ROOT: Final = "spec"
_TEMPLATE: Final = "spec.engine.podTemplate."
_DEEPEST: Final = 4
"""Levels below spec that are searched for the same word; further down are the fields of containers."""
_CLOSE: Final = 0.75

_FLAG: Final = "a flag of vLLM, which goes into spec.engine.args as {flag}"
_KNOWN: Final[Mapping[str, str]] = {
    # vLLM's own words, and those of KServe, LMCache, llm-d and others; without capitals, dashes and underscores.
    "modelname": "spec.model.name",
    "modelid": "spec.model.name",
    "modeluri": "spec.model.name",
    "modelurl": "spec.model.name",
    "modelpath": "spec.model.name",
    "uri": "spec.model.name, with the weights on a volume of spec.engine.podTemplate",
    "id": "spec.model.name",
    "storageuri": "spec.model.name, with the weights on a volume of spec.engine.podTemplate",
    "hftoken": "spec.model.tokenSecretRef",
    "hftokensecret": "spec.model.tokenSecretRef",
    "tensorparallelsize": "spec.engine.tensorParallel",
    "tp": "spec.engine.tensorParallel",
    "tpsize": "spec.engine.tensorParallel",
    "gpu": "spec.engine.accelerator.perPod",
    "gpus": "spec.engine.accelerator.perPod",
    "gpucount": "spec.engine.accelerator.perPod",
    "requestgpu": "spec.engine.accelerator.perPod",
    "requestcpu": "spec.engine.cpu",
    "requestmemory": "spec.engine.memory",
    "resources": "spec.engine.cpu, spec.engine.memory and spec.engine.accelerator",
    "limits": "spec.engine.cpu, spec.engine.memory and spec.engine.accelerator",
    "extraargs": "spec.engine.args",
    "vllmargs": "spec.engine.args",
    "replicacount": "spec.replicas",
    "minreplicas": "spec.replicas, which an HPA or KEDA may scale",
    "maxreplicas": "spec.replicas, which an HPA or KEDA may scale",
    "minworkers": "spec.replicas, which an HPA or KEDA may scale",
    "predictor": "spec.engine and spec.model",
    "runtime": "spec.engine.image",
    "cpuoffloadgb": "spec.cpu.size",
    "swapspace": "spec.cpu.size",
    "kvoffloadingsize": "spec.cpu.size",
    "cpuoffloadingsize": "spec.cpu.size",
    "cpubytestouse": "spec.cpu.size",
    "maxlocalcpusize": "spec.cpu.size",
    "localcpu": "spec.cpu.size",
    "localdisk": "spec.connector.lmcache.localDisk",
    "maxlocaldisksize": "spec.disk.budget.maxBytes",
    "remoteurl": "spec.connector.lmcache.redis.url",
    "rootdir": "spec.volume.path",
    "chunksize": "spec.disk.blockTokens",
    "blocksize": "spec.disk.blockTokens",
    "compress": "spec.disk.compression",
    "storethreshold": "spec.disk.admission.minReuse",
    "pvc": "spec.volume.existingClaim",
    "pvcname": "spec.volume.existingClaim",
    "claimname": "spec.volume.existingClaim",
    "pvcstorage": "spec.volume.claim.size",
    "storageclass": "spec.volume.claim.storageClassName",
    "capacity": "spec.disk.budget.maxBytes, or spec.volume.claim.size",
    "maxsize": "spec.disk.budget.maxBytes",
    "pythonhashseed": "spec.hash.seed",
    "hashseed": "spec.hash.seed",
    "prefixcachinghashalgo": "spec.hash.algorithm",
    "kvtransferconfig": "spec.cpu and spec.volume, from which the operator renders it",
    "nodeselectorterms": f"{_TEMPLATE}nodeSelector",
}
_FLAGS: Final = frozenset(
    {
        "max-model-len", "gpu-memory-utilization", "dtype", "quantization", "max-num-seqs", "max-num-batched-tokens",
        "served-model-name", "pipeline-parallel-size", "data-parallel-size", "enforce-eager", "trust-remote-code",
        "kv-cache-dtype", "enable-chunked-prefill", "enable-lora", "max-loras", "tokenizer", "chat-template",
        "tool-call-parser", "reasoning-parser", "speculative-config", "limit-mm-per-prompt", "load-format",
    }
)  # fmt: skip


def hint(path: str) -> str:
    """Return what may have been meant by a field that there is not, as the end of a sentence; empty if nobody knows.

    Args:
        path: where it was written, such as ``spec.nodeSelector``.
    """
    parent, _, name = path.rpartition(".")
    word = _plain(name)
    if word in _KNOWN:
        return f"did you mean {_KNOWN[word]}?"
    dashed = re.sub(r"[_ ]", "-", re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name)).lower()
    if dashed in _FLAGS:
        return f"it is {_FLAG.format(flag=f'--{dashed}')}"
    elsewhere = sorted(
        (each for each in _fields() if _plain(each.rpartition(".")[2]) == word),
        key=lambda each: (not each.startswith(_TEMPLATE), each.count("."), each),
    )
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    beside = [each.rpartition(".")[2] for each in _fields() if each.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(name, beside, n=1, cutoff=_CLOSE)
    if near:
        return f"did you mean {parent}.{near[0]}?"
    leaves = {_plain(each.rpartition(".")[2]): each for each in reversed(_fields())}
    near = difflib.get_close_matches(word, leaves, n=1, cutoff=_CLOSE)
    return f"did you mean {leaves[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def _fields() -> tuple[str, ...]:
    """Return the paths of all fields, the upper ones first."""
    # The models refer to this module where they are read.
    from kvtier_operator.api.tier_spec import TierSpec  # noqa: PLC0415  see above

    return tuple(sorted(_below(TierSpec, _ROOT, _DEEPEST), key=lambda each: (each.count("."), each)))


def _below(model: type[ApiModel], path: str, levels: int) -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = f"{path}.{field.alias or name}"
        yield below
        if levels > 1:
            for each in _models(field.annotation, field.metadata):
                yield from _below(each, below, levels - 1)


def _models(annotation: Any, metadata: list[Any]) -> Iterator[type[ApiModel]]:
    """Yield the models that a field holds itself; items of lists have no path of their own."""
    for each in metadata:
        if isinstance(each, Pasted):
            yield each.model
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
    elif typing.get_origin(annotation) is not tuple:
        for each in typing.get_args(annotation):
            yield from _models(each, [])
