# SPDX-License-Identifier: Apache-2.0
"""The kvtier operator: turns each ``KVCacheTier`` into vLLM pods whose numbers agree, and reports what it sees."""

from __future__ import annotations

__version__ = "0.1.0"
