# SPDX-License-Identifier: Apache-2.0
"""``spec.engine.external``: engines that another owner makes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field, StrictInt

from kvtier_operator.api.rules import ApiModel, Checked, Labels, ObjectName, Rule, Term, at

_NAMES_LABELS: Final = Rule(
    cel="self.size() > 0",
    message="names no label, and so every pod of the namespace: give the labels of the engines' pods",
    check=bool,
)


class PodSelector(ApiModel):
    """Which pods, by their labels."""

    match_labels: Annotated[Labels, Checked((_NAMES_LABELS,))]
    """Labels that a pod must all have."""


class ExternalEngines(ApiModel):
    """Engines whose pods another owner makes: a Deployment, KServe, a chart.

    `kvtier attach` prints that owner's YAML with what an engine of this tier needs. The fields `image`, `accelerator`,
    `tensorParallel`, `args` and `env` describe those engines then. They must be equal to the owner's, as far as they
    decide which blocks an engine may read. `memory` is what an engine needs beside the CPU tier.
    """

    selector: PodSelector
    """The pods. The condition `EnginesReady` tells which of them lack something. A pod belongs to one tier."""
    container: ObjectName | None = None
    """Container of the pods that runs vLLM. Left out, it is the one whose name, image or command says so."""
    port: Annotated[StrictInt, Field(ge=1, le=65535)] = 8000
    """Port on which vLLM serves."""


_EXTERNAL: Final = at("engine.external").is_given
_EMPTY: Final = (lambda found: f"{found}.size() == 0", lambda found: not found)
_MAKES_ENGINES: Final[Mapping[str, Term]] = {
    "replicas": at("replicas").is_(1),
    "engine.compileCache": ~at("engine.compileCache").is_given,
    "engine.ephemeralStorage": ~at("engine.ephemeralStorage").is_given,
    "engine.rollout": at("engine.rollout.maxSurge").is_(0)
    & at("engine.rollout.maxUnavailable").is_(1)
    & at("engine.rollout.minReadySeconds").is_(0),
    "engine.service": at("engine.service.type").is_("ClusterIP") & at("engine.service.annotations").test(*_EMPTY),
    "engine.disruptionBudget": ~at("engine.disruptionBudget.maxUnavailable").is_given
    & ~at("engine.disruptionBudget.minAvailable").is_given,
    **{
        f"engine.podTemplate.{field}": at(f"engine.podTemplate.{field}").test(*_EMPTY)
        for field in ("containers", "initContainers", "volumes", "volumeMounts", "labels", "annotations")
    },
    "model.loras": at("model.loras").test(*_EMPTY),
    "kvEvents": ~at("kvEvents").is_given,
    "routing.type": at("routing.type").is_("None"),
    "routing.inferencePool": ~at("routing.inferencePool").is_given,
}
"""Field that only makes engines, and its value where it is left out."""

EXTERNAL_RULES: Final = (
    *(
        Rule.that(
            ~_EXTERNAL | is_left_out,
            "makes engines, and those of spec.engine.external are made by another owner: remove one of the two",
            field=f".{field}",
        )
        for field, is_left_out in _MAKES_ENGINES.items()
    ),
    Rule.that(
        ~_EXTERNAL | at("connector.type").is_("Bundled"),
        "must be Bundled where spec.engine.external is given: no other connector can be attached",
        field=".connector.type",
    ),
    Rule.that(
        ~_EXTERNAL | at("cpu.size").is_given,
        "must be given where spec.engine.external is: a share is taken of the nodes of engines that the operator makes",
        field=".cpu.size",
    ),
)
"""Rules of a whole tier."""
