# SPDX-License-Identifier: Apache-2.0
"""Plugs the block store into vLLM's tiered KV offloading; besides this, only `fingerprints` imports vLLM or torch.

vLLM finds two classes here by configuration: the spec (``spec_module_path``) and the tier (``module_path``).
"""
