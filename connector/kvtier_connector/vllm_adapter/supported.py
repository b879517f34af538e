# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed vLLM is a release that kvtier supports; any other one serves without kvtier.

The connector derives from classes of vLLM that have no stable interface, and an engine must not find that out in the
middle of a request. The tests of the surface (tests/connector/tier/test_surface.py) hold every name and parameter that
kvtier uses against each supported release. Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from kvtier_connector.contract.engine import SUPPORTED_VLLM, vllm_release

RELEASE_METRIC = "vllm:kvtier_vllm_release"
RELEASE_LABELS = ("version", "support")
RELEASE_DOCUMENTATION = (
    "1, with the version of vLLM and whether kvtier supports it: supported, unsupported, or no_prefix_caching (a "
    "supported one that has it off). In the last two cases the engine serves without the volume and without the CPU "
    "tier."
)

CONNECTOR_MODULE = "kvtier_connector.vllm_adapter.offloading_connector"


class Support(NamedTuple):
    """The installed vLLM, and why kvtier cannot be used with it."""

    version: str
    problem: str
    """Empty for a supported release."""

    @property
    def label(self) -> str:
        """Value of the label ``support``."""
        return "unsupported" if self.problem else "supported"


def check() -> Support:
    """Compare the version of vLLM with the supported ones, and import the connector."""
    version = str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))
    if vllm_release(version) not in SUPPORTED_VLLM:
        return Support(version, f"kvtier supports vLLM {' and '.join(SUPPORTED_VLLM)}, and this is {version}")
    try:
        importlib.import_module(CONNECTOR_MODULE)
    except (ImportError, AttributeError, TypeError) as error:
        # A build of a supported release that lacks a name, or a class that cannot be derived from any more.
        return Support(version, f"the connector cannot be imported with this build of vLLM {version}: {error}")
    return Support(version, "")
