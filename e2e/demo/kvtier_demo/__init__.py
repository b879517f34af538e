# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a KVCacheTier on the embedded cluster, two vLLM engines, and the proof that they share a cache."""
