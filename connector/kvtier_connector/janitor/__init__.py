# SPDX-License-Identifier: Apache-2.0
"""The janitor: one small process per tier that keeps the volume within its budget, without vLLM and without torch.

It knows every block from the engines' journals, decides in pure functions which to evict, and removes them in steps.
"""
