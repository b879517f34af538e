# SPDX-License-Identifier: Apache-2.0
"""The tests of the embedded cluster: `make test-localcluster`. They share tests/kit with those of the product."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "kit"))

# No test is about time. The examples are the same each time, so that a run that fails says something about the change.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
