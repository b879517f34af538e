# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector of kvtier: blocks of KV cache on a shared volume, found and verified by any replica."""

from __future__ import annotations

__version__ = "0.1.0"
