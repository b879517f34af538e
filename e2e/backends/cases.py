# SPDX-License-Identifier: Apache-2.0
"""The tiers that are started: one for each connector that the machine can run, most telling first."""

from __future__ import annotations

from typing import Any, Final

MODEL: Final = "/tmp/kvtier-backends/model"  # noqa: S108  the script's own, and the same for every engine
GIB: Final = 1 << 30

OPEN_PORT: Final = 6380
"""Of a Redis without a password; one with a password has Redis' own port."""
ABSENT_PORT: Final = 6399
"""A port without a server."""
REDIS: Final = {"redis": {"url": "redis://127.0.0.1:6379", "passwordSecretRef": {"name": "redis"}}}

_OPEN: Final = {"redis": {"url": f"redis://127.0.0.1:{OPEN_PORT}"}}
_ABSENT: Final = {"redis": {"url": f"redis://127.0.0.1:{ABSENT_PORT}"}}

CUDA: Final[dict[str, dict[str, Any]]] = {
    # In pairs that start together: no two use one Redis, or one port for a cache server.
    "LMCache, Redis with a password": {"type": "LMCache", "lmcache": REDIS},
    "LMCache, memory": {"type": "LMCache"},
    "LMCache, MultiProcess": {"type": "LMCache", "lmcache": {"mode": "MultiProcess"}},
    "SimpleCPU, Lazy": {"type": "SimpleCPU", "simpleCPU": {"mode": "Lazy"}},
    "Hybrid, LMCache with Redis": {"type": "Hybrid", "hybrid": {"lmcache": REDIS, "lmcacheMemory": "4Gi"}},
    "VLLMTiering": {"type": "VLLMTiering"},
    "LMCache, MultiProcess with Redis": {"type": "LMCache", "lmcache": {"mode": "MultiProcess", **_OPEN}},
    "Bundled": {"type": "Bundled"},
    "LMCache, node's disk": {"type": "LMCache", "lmcache": {"localDisk": {"size": "32Gi"}}},
    "VLLMOffloading, storeThreshold 2": {"type": "VLLMOffloading", "vllmOffloading": {"storeThreshold": 2}},
    "SimpleCPU": {"type": "SimpleCPU"},
    "SimpleCPU, Disk": {"type": "SimpleCPU", "simpleCPU": {"medium": "Disk"}},
}
CPU: Final[dict[str, dict[str, Any]]] = {
    "VLLMOffloading, storeThreshold 2": {"type": "VLLMOffloading", "vllmOffloading": {"storeThreshold": 2}},
    "VLLMTiering": {"type": "VLLMTiering"},
    "Bundled": {"type": "Bundled"},
}

LMCACHE: Final[dict[str, dict[str, Any]]] = {
    # In pairs that start together: no two use one Redis, or one port for a cache server.
    "LMCache, Redis with a password": {"type": "LMCache", "lmcache": REDIS},
    "LMCache, MultiProcess with Redis": {"type": "LMCache", "lmcache": {"mode": "MultiProcess", **_OPEN}},
    "LMCache, Redis": {"type": "LMCache", "lmcache": _OPEN},
    "LMCache, MultiProcess, Redis that is not there": {
        "type": "LMCache",
        "lmcache": {"mode": "MultiProcess", **_ABSENT},
    },
    "LMCache, Redis that is not there": {"type": "LMCache", "lmcache": _ABSENT},
    "LMCache, node's disk": {"type": "LMCache", "lmcache": {"localDisk": {"size": "1Gi"}}},
    "Hybrid, LMCache with Redis": {"type": "Hybrid", "hybrid": {"lmcache": REDIS, "lmcacheMemory": "1Gi"}},
}
"""LMCache on the CPU build, where the operator refuses it: in its process, a class of the test copies for it."""

SHAPES: Final[dict[str, dict[str, int]]] = {
    # Llama 3.2 3B's, so that several engines fit one GPU.
    "cuda": {"hidden": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "head": 128, "intermediate": 8192},
    "cpu": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head": 64, "intermediate": 1408},
}


PAIR: Final[dict[str, dict[str, Any]]] = {
    "prefill": {"type": "Hybrid", "hybrid": {"nixl": {"role": "Prefill"}}},
    "decode": {"type": "Hybrid", "hybrid": {"nixl": {"role": "Decode", "blocksOf": "prefill"}}},
}
"""Two tiers, named as their roles, with one volume."""


def model_config(device: str) -> dict[str, Any]:
    """Return the config.json of the model: a Llama with random weights."""
    shape = SHAPES[device]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head"],
        "intermediate_size": shape["intermediate"],
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def body(device: str, connector: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the KVCacheTier of one connector."""
    is_cpu = device == "cpu"
    is_lmcache = connector["type"] == "LMCache" or "lmcache" in connector.get("hybrid", {})
    memory = ["--gpu-memory-utilization=0.15"] if is_cpu else ["--kv-cache-memory-bytes=4294967296"]
    memory += [] if is_cpu else ["--gpu-memory-utilization=0.12"]
    args = ["--load-format=dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype=bfloat16", *memory]
    args += [f"--max-model-len={4096 if is_cpu else 32768}", "--seed=0"]
    env = [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]
    env += [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}] if is_cpu else []
    if is_cpu and connector.get("lmcache", {}).get("mode") == "MultiProcess":
        # Its server takes blocks out of the engine's memory, as it does on a GPU.
        env.append({"name": "LMCACHE_MP_TRANSFER_MODE", "value": "lmcache_driven"})
    nixl = connector.get("hybrid", {}).get("nixl")
    is_ours = connector["type"] == "Bundled" or nixl is not None
    spec: dict[str, Any] = {
        "model": {"name": MODEL, "config": model_config(device)},
        "engine": {
            "accelerator": {"resource": "none" if is_cpu and not is_lmcache else "nvidia.com/gpu"},
            "args": args,
            "env": env,
        },
        "connector": connector,
        "cpu": {"size": _memory(connector) if is_cpu else "8Gi"},
        # Loading is to be measured, also on a machine where it does not pay.
        # No janitor runs here whose permit engines would store by.
        **({"disk": {"admission": {"costAware": False}}, "janitor": {"enabled": False}} if is_ours else {}),
    }
    if is_ours or connector["type"] == "VLLMTiering":
        spec["volume"] = {"claim": {"size": "100Gi", "accessModes": ["ReadWriteOnce"]}}
    if nixl is not None and "blocksOf" in nixl:
        spec["volume"] = {"existingClaim": f"{nixl['blocksOf']}-blocks"}
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {"name": name, "namespace": "backends"},
        "spec": spec,
    }


def _memory(connector: dict[str, Any]) -> str:
    """Return the memory of a tier on the CPU: with a disk behind it, less than the prompts that are asked between."""
    return "48Mi" if "localDisk" in connector.get("lmcache", {}) else "512Mi"
