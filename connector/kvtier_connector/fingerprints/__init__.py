# SPDX-License-Identifier: Apache-2.0
"""Identifies an engine's KV blocks: its settings, KV layout and weights (`engine`), and its LoRA adapters.

The package imports vLLM and torch, but neither the tier nor the volume: its results become part of block names.
"""
