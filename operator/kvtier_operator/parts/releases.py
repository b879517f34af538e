# SPDX-License-Identifier: Apache-2.0
"""Engines of several releases of vLLM, and the generations that they use. Pure."""

from __future__ import annotations

from kvtier_operator import names
from kvtier_operator.api.generations_spec import COMPARED, REFUSED
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import PlannedStage, Problem, listed, met


def releases_agree(stage: PlannedStage) -> Problem | None:
    """Every engine uses the blocks of the generation, or one of its release's own; either is healthy."""
    found = {pod.name: pod.report.release for pod in stage.snapshot.pods if pod.report is not None}
    if pods := sorted(name for name, release in found.items() if release == REFUSED):
        return met(
            Reason.RELEASE_REFUSED,
            f"pod {listed(pods)} uses a generation of its release of vLLM, since the blocks of generation "
            f"{stage.plan.generation.digest} differ from what it computes, or could not be compared: `kubectl logs "
            f"{pods[0]} -c {names.ENGINE_CONTAINER}` says in what. An earlier spec.engine.image finds the earlier "
            "blocks; `kvtier purge --generation` removes them",
        )
    if pods := sorted(name for name, release in found.items() if release == COMPARED):
        return met(
            Reason.RELEASE_COMPARED,
            f"pod {listed(pods)} is of another image or release of vLLM than the blocks of generation "
            f"{stage.plan.generation.digest}, and loads and stores none until three prompts that it computes agree "
            "with them. Requests whose prompts have blocks on the volume bring that about",
        )
    return None


def generation_role(digest: str, current: str) -> str:
    """Return the use of a generation, as ``status.generations`` names it."""
    if digest == current:
        return "Current"
    return "Release" if digest.startswith(f"{current}.r") else "Unshared" if "." in digest else "Previous"
