# SPDX-License-Identifier: Apache-2.0
"""A cluster as a person with kubectl has it: nothing here knows whether it is a real one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ci_tools
import waiting
import yaml

NAMESPACE = "default"
SECONDS = float(os.environ.get("E2E_SECONDS", "120"))
"""How long anything may take: CPU engines start in minutes."""
until = functools.partial(waiting.until, seconds=SECONDS, pause_seconds=0.25)
"""Waits for what kubectl tells, which computes for a tenth of a second each time."""


@dataclass(kw_only=True)
class Cluster:
    """A cluster as a person with kubectl has it."""

    kubeconfig: str
    model: dict[str, Any]
    engine: dict[str, Any]
    claim: dict[str, Any]
    upgrade: Callable[[], None]
    """Replace the operator by another version, which brings another connector."""
    kubectl_program: Path = field(default_factory=lambda: ci_tools.load("helm").binary("kubectl"))

    def kubectl(self, *words: str, given: str | None = None) -> str:
        command = [str(self.kubectl_program), "--kubeconfig", self.kubeconfig, "-n", NAMESPACE, *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=SECONDS + 60)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def get(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", given=json.dumps(manifest))

    def pods(self, tier: str, component: str = "engine") -> list[dict[str, Any]]:
        found = self.get("pods", "-l", f"kvtier.dev/tier={tier},app.kubernetes.io/component={component}")["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def ready_engines(self, tier: str) -> set[str]:
        """Return the names of the engine pods that serve and are not going."""
        return {
            each["metadata"]["name"]
            for each in self.pods(tier)
            if any(it["type"] == "Ready" and it["status"] == "True" for it in each["status"].get("conditions", ()))
        }

    def condition(self, tier: str, kind: str) -> dict[str, Any]:
        """Return a condition of the present generation; nothing while there is none."""
        body = self.get("kvcachetier", tier)
        return next(
            (
                each
                for each in body.get("status", {}).get("conditions", ())
                if each["type"] == kind and each.get("observedGeneration") == body["metadata"]["generation"]
            ),
            {},
        )

    def reaches(self, tier: str, kind: str, status: str, reason: str = "") -> None:
        def is_met() -> bool:
            found = self.condition(tier, kind)
            return found.get("status") == status and reason in {"", found.get("reason")}

        until(is_met, f"{kind}={status} of {tier}")

    def ask(self, pod: str, prompt: str) -> float:
        """Send a prompt to one engine; return how many of its tokens came from the volume."""
        address = self.get("pod", pod)["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        # By way of the pod: no port needs to be open to us.
        program = _ASK.format(base=f"http://{host}:8000", prompt=prompt)
        return float(self.kubectl("exec", pod, "-c", "engine", "--", "python3", "-c", program))


_ASK = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["ASK"]
