# SPDX-License-Identifier: Apache-2.0
"""Processes that move blocks between the engine's CPU tier and the volume.

They exist because of Python's interpreter lock: threads of the engine's own process wait for it at every system call,
and the engine's scheduler holds it most of the time. Standard library and the store only: no process imports vLLM.
"""
