# SPDX-License-Identifier: Apache-2.0
"""No flag of vLLM's engine is unknown to the identity: a release that adds one fails here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from kvtier_operator.plan.engine_args import IDENTITY, is_identity

SINCE_0_33 = {"monokernel", "sleep-mode-backend", "watchdog-config"}
"""Flags of the release that is supported for trial; ours has not got them."""

NEUTRAL = {
    "the spec sets it, and its field is in the identity": (
        *("kv-events-config", "kv-offloading-backend", "kv-offloading-size", "kv-transfer-config", "model"),
        *("prefix-caching-hash-algo", "revision", "tensor-parallel-size"),
    ),
    "the key covers it: what it changes are the tokens, or inputs that are hashed": (
        *("allowed-local-media-path", "allowed-media-domains", "default-mm-loras", "enable-mm-embeds"),
        *("enable-prompt-embeds", "interleave-mm-strings", "io-processor-plugin", "language-model-only"),
        *("limit-mm-per-prompt", "mm-encoder-only", "renderer-num-workers", "skip-tokenizer-init", "tokenizer"),
        *("tokenizer-mode", "tokenizer-revision", "tokens-only"),
    ),
    "another kernel, batch or placement of the same sums: rounding, as between two requests": (
        *("all2all-backend", "async-scheduling", "compilation-config", "cudagraph-capture-sizes"),
        *("dbo-decode-token-threshold", "dbo-prefill-token-threshold", "dcp-comm-backend", "dcp-q-replicate"),
        *("disable-cascade-attn", "disable-chunked-mm-input", "disable-custom-all-reduce", "enable-chunked-prefill"),
        *("enable-dbo", "enable-ep-weight-filter", "enable-eplb", "enable-expert-parallel"),
        *("enable-flashinfer-autotune", "enable-hc-sp", "enforce-eager", "eplb-config", "expert-placement-strategy"),
        *("fully-sharded-loras", "ir-op-priority", "kernel-config", "linear-backend", "long-prefill-token-threshold"),
        *("long-prefill-token-threshold-adaptive", "mamba-backend", "mamba-ssu-algorithm"),
        *("max-cudagraph-capture-size", "mm-encoder-attn-backend", "mm-encoder-tp-mode", "moe-backend", "monokernel"),
        *("optimization-level", "performance-mode", "specialize-active-lora", "ubatch-size"),
    ),
    "weights and adapters are the same wherever they are fetched from, kept or moved": (
        *("allow-deprecated-quantization", "cpu-offload-gb", "cpu-offload-params", "download-dir"),
        *("elastic-ep-max-dp-size", "enable-cumem-allocator", "enable-elastic-ep", "enable-lora", "enable-sleep-mode"),
        *("hf-token", "max-cpu-loras", "max-lora-cls-labels", "max-lora-rank", "max-loras"),
        *("max-parallel-loading-workers", "offload-backend", "offload-group-size", "offload-num-in-group"),
        *("offload-params", "offload-prefetch-step", "pt-load-map-location", "safetensors-load-strategy"),
        *("safetensors-prefetch-block-size", "safetensors-prefetch-num-threads", "sleep-mode-backend"),
        *("sleep-mode-offload-cudagraph", "sleep-preserve-parameter-names", "use-tqdm-on-load"),
    ),
    "an engine with it shares its blocks with nobody": (*("weight-transfer-config", "worker-extension-cls"),),
    "it decides how much there is room for, or what is kept": (
        *("enable-prefix-caching", "gpu-memory-utilization", "kv-cache-memory-bytes", "mm-ipc-gpu-memory-gb"),
        *("mm-processor-cache-gb", "mm-processor-cache-type", "mm-shm-cache-max-object-size-mb"),
        *("num-gpu-blocks-override", "prefix-cache-retention-interval", "skip-mm-profiling", "watermark"),
    ),
    "it decides which requests run, where and when": (
        *("api-process-count", "api-process-rank", "cpu-distributed-timeout-seconds", "data-parallel-address"),
        *("data-parallel-backend", "data-parallel-external-lb", "data-parallel-hybrid-lb"),
        *("data-parallel-multi-port-external-lb", "data-parallel-rank", "data-parallel-rpc-port", "data-parallel-size"),
        *("data-parallel-size-local", "data-parallel-start-rank", "device-ids", "disable-nccl-for-dp-synchronization"),
        *("distributed-executor-backend", "distributed-timeout-seconds", "dp-sync-interval", "enable-fault-tolerance"),
        *("enable-nccl-comm-suspend", "enable-shm-tensor-arena", "fail-on-environ-validation"),
        *("fault-tolerance-config", "master-addr", "master-port", "max-num-active-seqs", "max-num-batched-tokens"),
        *("max-num-queued-reqs", "max-num-queued-tokens", "max-num-scheduled-tokens", "max-num-seqs", "mm-tensor-ipc"),
        *("nnodes", "node-rank", "numa-bind", "numa-bind-cpus", "numa-bind-nodes", "prefill-schedule-interval"),
        *("scheduler-cls", "scheduler-reserve-full-isl", "scheduling-policy", "shutdown-timeout", "stream-interval"),
        *("watchdog-config",),
    ),
    "it is about what is sampled, returned or reported": (
        *("aggregate-engine-logging", "aux-output-config", "collect-detailed-traces", "cudagraph-metrics"),
        *("custom-histogram-buckets", "disable-log-stats", "ec-manager-config", "ec-transfer-config"),
        *("enable-batch-sharded-sampling", "enable-layerwise-nvtx-tracing", "enable-logging-iteration-details"),
        *("enable-mfu-metrics", "enable-mm-processor-stats", "enable-return-routed-experts", "generation-config"),
        *("jit-monitor-mode", "jit-monitor-verbose", "kv-cache-metrics", "kv-cache-metrics-sample", "log-config-file"),
        *("log-level", "logging-config", "logits-processors", "logprobs-mode", "max-logprobs"),
        *("mm-encoder-fp8-scale-save-margin", "mm-encoder-fp8-scale-save-path", "otlp-traces-endpoint"),
        *("override-generation-config", "per-request-spec-decode-metrics", "pooler-config", "profiler-config"),
        *("ray-workers-use-nsight", "reasoning-config", "reasoning-parser", "reasoning-parser-plugin"),
        *("return-sampling-mask", "served-model-name", "show-hidden-metrics-for-version", "structured-outputs-config"),
        *("use-fp64-gumbel", "watermark-config"),
    ),
}
"""Flags that are not in IDENTITY, by the reason why no block depends on them."""


def flags_of_vllm() -> set[str]:
    found = importlib.util.find_spec("vllm")
    tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (each.target for each in arguments.body if isinstance(each, ast.AnnAssign))
    return {each.id.strip("_").replace("_", "-") for each in fields if isinstance(each, ast.Name)}


def test_every_flag_of_the_engine_was_looked_at() -> None:
    neutral = [flag for flags in NEUTRAL.values() for flag in flags]
    assert len(neutral) == len(set(neutral))
    assert not IDENTITY & set(neutral)
    known = IDENTITY | set(neutral)
    assert flags_of_vllm() - known == set(), "say in IDENTITY or NEUTRAL whether a block depends on it"
    assert known - flags_of_vllm() <= SINCE_0_33, "vLLM has no such flag"


@pytest.mark.parametrize(
    "flag", ["video-pruning-rate", "video-prun", "no-disable-sliding-window", "mm-hasher-algorithm"]
)
def test_flags_and_what_the_parser_takes_for_them_are_part_of_the_identity(flag: str) -> None:
    assert is_identity(flag)


def test_a_flag_that_changes_no_block_is_not() -> None:
    assert not is_identity("max-num-seqs")
