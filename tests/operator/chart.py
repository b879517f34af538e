# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import ci_tools
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvtier"
NAMESPACE = "kvtier-system"


tools = ci_tools.load("helm")


class HelmFailed(Exception):
    """Helm said no."""


def helm(*arguments: str, environment: dict[str, str] | None = None, stdin: str = "") -> str:
    done = subprocess.run(
        [tools.binary(), *arguments], check=False, capture_output=True, text=True, env=environment, input=stdin
    )
    if done.returncode:
        raise HelmFailed(done.stderr)
    return done.stdout


def render(values: dict[str, Any] | None = None, *options: str, release: str = "kvtier") -> list[dict[str, Any]]:
    """Return the objects that a release with these values consists of, in helm's order."""
    text = render_text(values, *options, release=release)
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]


def render_text(values: dict[str, Any] | None = None, *options: str, release: str = "kvtier") -> str:
    stdin = json.dumps(values or {})
    return helm("template", release, str(CHART), f"--namespace={NAMESPACE}", "--values=-", *options, stdin=stdin)
