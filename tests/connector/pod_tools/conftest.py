# SPDX-License-Identifier: Apache-2.0
"""Lets these tests use the helpers of the store's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
