# SPDX-License-Identifier: Apache-2.0
"""Overrides of vLLM's KV offloading; nothing else of kvtier imports vLLM or torch.

vLLM loads two classes from here by name: the spec (``spec_module_path``) and the tier (``module_path``).
"""
