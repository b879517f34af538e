# SPDX-License-Identifier: Apache-2.0
"""The shapes of the models in the matrix: each a real architecture, small enough for two cores.

Pure data: what a config.json says beside what `weights` adds for all of them alike. Head sizes, windows and states are
as small as the kernels of vLLM's CPU build take them, so that a prompt of some hundred tokens fills several blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

VOCABULARY: Final = 2048
LONGEST_PROMPT: Final = 4096
PICTURE_SIDE: Final = 56
PICTURE_TOKEN: Final = 3
"""Stands in a prompt for its picture."""
PICTURE_TOKENS: Final = 16
"""Tokens that each of these models makes of a picture."""

Shape = Mapping[str, Any]

_DENSE: Final[Shape] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": LONGEST_PROMPT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

LLAMA: Final[Shape] = {"model_type": "llama", **_DENSE}

LLAVA: Final[Shape] = {
    "model_type": "llava",
    "text_config": {"initializer_range": 0.08, **LLAMA},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PICTURE_SIDE,
        "patch_size": 14,
        "projection_dim": 64,
    },
    "image_token_index": PICTURE_TOKEN,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}

BLIP_2: Final[Shape] = {
    "model_type": "blip-2",
    "text_config": {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LONGEST_PROMPT,
        "init_std": 0.08,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    "vision_config": {
        "model_type": "blip_2_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PICTURE_SIDE,
        "patch_size": 14,
        "initializer_range": 0.08,
    },
    "qformer_config": {
        "model_type": "blip_2_qformer",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "encoder_hidden_size": 64,
        "initializer_range": 0.08,
    },
    "num_query_tokens": PICTURE_TOKENS,
    "image_token_index": PICTURE_TOKEN,
}
"""vLLM puts the tokens of the picture before the prompt."""

GQA: Final[Shape] = {"model_type": "qwen3", **_DENSE, "num_key_value_heads": 2}

MLA: Final[Shape] = {
    "model_type": "deepseek_v2",
    **{name: value for name, value in _DENSE.items() if name != "head_dim"},
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

MLA_ON_GPU: Final[Shape] = {**MLA, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""The kernels of vLLM's CUDA build take the heads of DeepSeek's own models only."""

MOE: Final[Shape] = {
    "model_type": "qwen3_moe",
    **_DENSE,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

GLM_4_MOE: Final[Shape] = {
    "model_type": "glm4_moe",
    **_DENSE,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
"""With a layer behind the others that predicts the token after the next one."""

GEMMA_3: Final[Shape] = {
    "model_type": "gemma3_text",
    **_DENSE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "query_pre_attn_scalar": 64,
    "tie_word_embeddings": True,
}

GEMMA_4: Final[Shape] = {
    "model_type": "gemma4_text",
    **_DENSE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "global_head_dim": 128,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 0,
}

COHERE_2_MOE: Final[Shape] = {
    "model_type": "cohere2_moe",
    **_DENSE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "logit_scale": 1.0,
    "tie_word_embeddings": True,
}

GPT_OSS: Final[Shape] = {
    "model_type": "gpt_oss",
    **_DENSE,
    "num_key_value_heads": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

_STATES: Final[Shape] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
}

BAMBA: Final[Shape] = {
    "model_type": "bamba",
    **_DENSE,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "attn_rotary_emb": 32,
    **_STATES,
}

GRANITE_4: Final[Shape] = {
    "model_type": "granitemoehybrid",
    **_DENSE,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 256,
    "position_embedding_type": "rope",
    **_STATES,
}

FALCON_H1: Final[Shape] = {
    "model_type": "falcon_h1",
    **_DENSE,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 512,
    "mamba_rms_norm": False,
    **_STATES,
}

JAMBA: Final[Shape] = {
    "model_type": "jamba",
    **_DENSE,
    "num_key_value_heads": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "use_mamba_kernels": False,
}

WHISPER: Final[Shape] = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "vocab_size": VOCABULARY,
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "init_std": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 0,
    "begin_suppress_tokens": None,
}

QWEN3_NEXT: Final[Shape] = {
    "model_type": "qwen3_next",
    **_DENSE,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
