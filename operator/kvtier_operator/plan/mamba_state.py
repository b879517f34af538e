# SPDX-License-Identifier: Apache-2.0
"""How large the state of a Mamba or linear-attention layer is. Pure.

vLLM makes every block of such a model large enough to hold one, so the state decides how many tokens a block has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator.plan.layers import number

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def state_bytes(config: Mapping[str, Any], *, tensor_parallel: int, element_bytes: int) -> int | None:
    """Return the bytes of one layer's state on one rank, or None for a family that is not known here.

    Raises:
        ConfigUnclear: a field of a family that is known is missing.
    """
    shapes = _shapes(config, tensor_parallel)
    if shapes is None:
        return None
    convolution, recurrent = shapes
    return convolution * element_bytes + recurrent * _recurrent_bytes(config, element_bytes)


def _recurrent_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Return the bytes of one number of the recurrent part, which some models keep more exactly."""
    if config.get("model_type") == "nemotron_h":
        return _BYTES.get(str(config.get("mamba_ssm_cache_dtype", "float32")), 4)
    named = config.get("mamba_ssm_dtype") if str(config.get("model_type")).startswith("qwen3_5") else None
    return _BYTES.get(str(named), element_bytes)


def _shapes(config: Mapping[str, Any], ranks: int) -> tuple[int, int] | None:
    """Return how many numbers the convolution and the recurrent part keep on one rank."""
    if "linear_num_value_heads" in config:
        return _gated_delta_net(config, ranks)
    if "mamba_num_heads" in config or "mamba_n_heads" in config:
        return _mamba2(config, ranks)
    if "mamba_d_state" in config and "mamba_expand" in config:
        inner = number(config, "mamba_expand") * number(config, "hidden_size") // ranks
        return inner * (number(config, "mamba_d_conv", default=4) - 1), inner * number(config, "mamba_d_state")
    return None


def _gated_delta_net(config: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    key_size, value_size = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    width = (2 * keys * key_size + values * value_size) // ranks
    kernel = number(config, "linear_conv_kernel_dim", default=4)
    return width * (kernel - 1), math.ceil(values / ranks) * key_size * value_size


def _mamba2(config: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    heads = number(config, "mamba_num_heads", "mamba_n_heads")
    head_size = number(config, "mamba_head_dim", "mamba_d_head")
    groups = number(config, "n_groups", "mamba_n_groups", default=1)
    state = number(config, "ssm_state_size", "mamba_d_state")
    if groups % ranks:
        # Every rank needs the groups of its own heads.
        groups = ranks
    inner = number(config, "mamba_d_ssm", default=heads * head_size)
    width = (inner + 2 * groups * state) // ranks
    kernel = number(config, "conv_kernel", "mamba_d_conv", default=4)
    return width * (kernel - 1), math.ceil(heads / ranks) * head_size * state
