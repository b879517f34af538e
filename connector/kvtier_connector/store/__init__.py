# SPDX-License-Identifier: Apache-2.0
"""Keeps KV blocks as files on a shared volume: format, layout, reading, writing, walking and checking.

Needs the standard library, blake3 and cryptography, never vLLM or torch. Every class says which of its methods may be
called from several threads.
"""
