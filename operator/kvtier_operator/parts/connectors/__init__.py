# SPDX-License-Identifier: Apache-2.0
"""Rendering of connectors: the engine's settings for each, and the servers that some of them need. Pure."""

from __future__ import annotations

from kvtier_operator.parts.connectors.rendering import Rendered, render

__all__ = ["Rendered", "render"]
