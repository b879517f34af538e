# SPDX-License-Identifier: Apache-2.0
"""Keeps KV blocks as files on a shared volume: format, layout, reading, writing, walking and checking.

Needs the standard library, blake3 and cryptography, never vLLM or torch: engines, the janitor and the check command all
use it.
Threads live here only while a root is walked in parallel; every class says which of its methods may be called from
several threads.
"""
