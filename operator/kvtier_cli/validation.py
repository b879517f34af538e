# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the tiers of a file, each field with its remedy, as the operator would say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier_cli import input_files
from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.parse import problems, read_annotations
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts import pod_security
from kvtier_operator.plan import Refusal, decide


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """About one tier of a file."""

    file: str
    tier: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "file": self.file,
            "tier": self.tier,
            "valid": not self.problems,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }

    def page(self) -> str:
        """Return it for people."""
        lines = [f"{self.file}: {self.tier}: {each}" for each in self.problems]
        lines += [f"{self.file}: {self.tier}: warning: {each}" for each in self.warnings]
        if not self.problems:
            lines.append(f"{self.file}: {self.tier} is valid")
        return "\n".join(lines) + "\n"


def validate(file: str) -> list[Verdict]:
    """Judge every tier of a file.

    Raises:
        OperatorError: the file holds something else.
        OSError: it cannot be read.
    """
    return [_judge(file, body) for body in input_files.read_tiers(file)]


def _judge(file: str, body: names.Manifest) -> Verdict:
    tier = names.tier_ref(body)
    found = [str(each) for each in problems(body)]
    try:
        read_annotations(body)
    except SpecInvalid as error:
        found.append(str(error))
    if found:
        return Verdict(file=file, tier=str(tier), problems=tuple(found))
    spec = parse(body)
    decided = decide(spec, tier, None)
    # A share of nodes is told only where the nodes are: that is no fault of the file.
    if isinstance(decided, Refusal) and decided.reason is not Reason.NODES_UNKNOWN:
        return Verdict(file=file, tier=str(tier), problems=(decided.message,))
    warning = pod_security.warning(spec.engine.pod_template)
    return Verdict(file=file, tier=str(tier), warnings=(warning,) if warning else ())
