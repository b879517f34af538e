# SPDX-License-Identifier: Apache-2.0
"""What tells an engine's KV blocks from all others: its weights, its adapters, and how it lays KV out in memory.

It knows vLLM and torch, and neither the tier nor the volume: what is found here becomes part of the names of blocks.
"""
