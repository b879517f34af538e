# SPDX-License-Identifier: Apache-2.0
"""Scripts of .ci, which is no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

CI = Path(__file__).resolve().parents[2] / ".ci"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvtier_ci_{name}", CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
