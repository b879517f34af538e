# SPDX-License-Identifier: Apache-2.0
"""Every flag of vLLM's engine, and whether blocks that were computed with it can be read without it. Pure.

A flag belongs to the identity if it changes the bytes of a block by more than the rounding of another kernel or batch,
what the bytes mean, how they lie, or which tokens a key stands for. When in doubt it does: that costs a cold cache
once, and the other mistake wrong answers. A test compares the tables with the flags that vLLM has, so that a release
which adds one is looked at before it is served.
"""

from __future__ import annotations

from typing import Final

IDENTITY: Final = frozenset(
    {
        # Which weights are loaded, and what becomes of them.
        *("code-revision", "config-format", "convert", "dtype", "hf-config-path", "hf-overrides", "ignore-patterns"),
        *("load-format", "model-class-overrides", "model-impl", "model-loader-extra-config", "model-weights"),
        *("quantization", "quantization-config", "runner", "trust-remote-code"),
        # Decides the weights where load-format makes them up.
        "seed",
        # Long-context RoPE variants choose their factors by it.
        "max-model-len",
        # How KV and states are computed, rounded and laid out.
        *("additional-config", "attention-backend", "attention-config", "block-size", "diffusion-config"),
        *("disable-hybrid-kv-cache-manager", "disable-sliding-window", "enable-trace-replay", "engram-config"),
        *("gdn-prefill-backend", "kda-decode-backend", "kda-prefill-backend", "kv-cache-dtype"),
        *("kv-cache-dtype-skip-layers", "kv-sharing-fast-prefill", "prefix-match-unit", "sparse-indexer-topk-backend"),
        *("swa-bounded-replay", "worker-cls", "enable-mamba-cache-stochastic-rounding"),
        *("enable-mamba-shared-prefix-checkpoint", "mamba-block-size", "mamba-cache-dtype", "mamba-cache-mode"),
        *(
            "mamba-cache-philox-rounds",
            "mamba-config",
            "mamba-ssm-cache-dtype",
            "replayssm-buffer-len",
            "use-replayssm",
        ),
        # Which tokens and heads a rank holds.
        *("cp-kv-cache-interleave-size", "dcp-kv-cache-interleave-size", "decode-context-parallel-size"),
        *("pipeline-parallel-size", "prefill-context-parallel-size"),
        # What becomes of an image or a video that the key names by its own hash.
        *("media-io-kwargs", "mm-device-do-normalize", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path"),
        *("mm-hasher-algorithm", "mm-processor-device", "mm-processor-kwargs", "video-pruning-method"),
        "video-pruning-rate",
        # What becomes of an adapter that the key names by its contents.
        *("enable-mixed-moe-lora-format", "enable-moe-shared-loras", "enable-tower-connector-lora", "lora-dtype"),
        "lora-target-modules",
        # A draft model has KV of its own in the same blocks; the short forms are another way to write the config.
        *("spec-method", "spec-model", "spec-tokens", "speculative-config"),
    }
)
"""Flags that change the bytes of a block or their meaning."""

NEUTRAL: Final = {
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
        *(
            "all2all-backend",
            "async-scheduling",
            "compilation-config",
            "cudagraph-capture-sizes",
            "dbo-decode-token-threshold",
        ),
        *("dbo-prefill-token-threshold", "dcp-comm-backend", "dcp-q-replicate", "disable-cascade-attn"),
        *("disable-chunked-mm-input", "disable-custom-all-reduce", "enable-chunked-prefill", "enable-dbo"),
        *("enable-ep-weight-filter", "enable-eplb", "enable-expert-parallel", "enable-flashinfer-autotune"),
        *("enable-hc-sp", "enforce-eager", "eplb-config", "expert-placement-strategy", "fully-sharded-loras"),
        *("ir-op-priority", "kernel-config", "linear-backend", "long-prefill-token-threshold"),
        *("long-prefill-token-threshold-adaptive", "mamba-backend", "mamba-ssu-algorithm"),
        *("max-cudagraph-capture-size", "mm-encoder-attn-backend", "mm-encoder-tp-mode", "moe-backend", "monokernel"),
        *("optimization-level", "performance-mode", "specialize-active-lora", "ubatch-size"),
    ),
    "weights and adapters are the same wherever they are fetched from, kept or moved": (
        *(
            "allow-deprecated-quantization",
            "cpu-offload-gb",
            "cpu-offload-params",
            "download-dir",
            "elastic-ep-max-dp-size",
        ),
        *(
            "enable-cumem-allocator",
            "enable-elastic-ep",
            "enable-lora",
            "enable-sleep-mode",
            "hf-token",
            "max-cpu-loras",
        ),
        *("max-lora-cls-labels", "max-lora-rank", "max-loras", "max-parallel-loading-workers", "offload-backend"),
        *("offload-group-size", "offload-num-in-group", "offload-params", "offload-prefetch-step"),
        *("pt-load-map-location", "safetensors-load-strategy", "safetensors-prefetch-block-size"),
        *("safetensors-prefetch-num-threads", "sleep-mode-backend", "sleep-mode-offload-cudagraph"),
        *("sleep-preserve-parameter-names", "use-tqdm-on-load"),
    ),
    "an engine with it shares its blocks with nobody": ("weight-transfer-config", "worker-extension-cls"),
    "it decides how much there is room for, or what is kept": (
        *("enable-prefix-caching", "gpu-memory-utilization", "kv-cache-memory-bytes", "mm-ipc-gpu-memory-gb"),
        *(
            "mm-processor-cache-gb",
            "mm-processor-cache-type",
            "mm-shm-cache-max-object-size-mb",
            "num-gpu-blocks-override",
        ),
        *("prefix-cache-retention-interval", "skip-mm-profiling", "watermark"),
    ),
    "it decides which requests run, where and when": (
        *("api-process-count", "api-process-rank", "cpu-distributed-timeout-seconds", "data-parallel-address"),
        *("data-parallel-backend", "data-parallel-external-lb", "data-parallel-hybrid-lb"),
        *("data-parallel-multi-port-external-lb", "data-parallel-rank", "data-parallel-rpc-port", "data-parallel-size"),
        *("data-parallel-size-local", "data-parallel-start-rank", "device-ids", "disable-nccl-for-dp-synchronization"),
        *("distributed-executor-backend", "distributed-timeout-seconds", "dp-sync-interval", "enable-fault-tolerance"),
        *(
            "enable-nccl-comm-suspend",
            "enable-shm-tensor-arena",
            "fail-on-environ-validation",
            "fault-tolerance-config",
        ),
        *("master-addr", "master-port", "max-num-active-seqs", "max-num-batched-tokens", "max-num-queued-reqs"),
        *("max-num-queued-tokens", "max-num-scheduled-tokens", "max-num-seqs", "mm-tensor-ipc", "nnodes", "node-rank"),
        *("numa-bind", "numa-bind-cpus", "numa-bind-nodes", "prefill-schedule-interval", "scheduler-cls"),
        *("scheduler-reserve-full-isl", "scheduling-policy", "shutdown-timeout", "stream-interval", "watchdog-config"),
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
        *("return-sampling-mask", "served-model-name", "show-hidden-metrics-for-version"),
        *("structured-outputs-config", "use-fp64-gumbel", "watermark-config"),
    ),
}
"""The others, by why a block does not depend on them."""

ENVIRONMENT: Final = (
    "VLLM_ATTENTION_BACKEND",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MLA_DISABLE",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)
"""Variables that change the bytes of a block or their meaning; engines compare besides how they really lay KV out."""


def is_identity(flag: str) -> bool:
    """Tell whether a flag, or what vLLM's parser would take for one, is part of the identity."""
    positive = flag.removeprefix("no-")
    return any(known.startswith(positive) for known in IDENTITY)
