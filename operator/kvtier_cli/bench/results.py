# SPDX-License-Identifier: Apache-2.0
"""What samples come to: means and percentiles, shares of hits by tier, and whether answers are the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtier_cli.bench.client import Sample
from kvtier_cli.output import columns
from kvtier_cli.status import SOURCES

Document = dict[str, Any]
_MOST_LISTED: Final = 20


@dataclass(kw_only=True)
class Pass:
    """The requests of one pass over one target."""

    target: str
    name: str
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    wanted: int = 0
    """Requests that it has if nobody interrupts it."""
    problem: str = ""
    """Why none of them was sent; empty where they were."""


def distribution(values: Iterable[float | None]) -> Document | None:
    """Return mean, median and 99th percentile (the smallest value that so many do not exceed); None for nothing."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None

    def percentile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    mean = sum(ordered) / len(ordered)
    return {"mean": round(mean, 4), "p50": round(percentile(0.5), 4), "p99": round(percentile(0.99), 4)}


def document(passes: Sequence[Pass], **about: Any) -> Document:
    """Return all of it as JSON; `about` is what was asked for."""
    return {
        **about,
        "passes": [_of_pass(each) for each in passes],
        "answers": compare(passes),
        "isComplete": all(len(each.samples) == each.wanted for each in passes),
    }


def _of_pass(each: Pass) -> Document:
    good = [sample for sample in each.samples if not sample.error]
    labels = dict.fromkeys(sample.label for sample in sorted(each.samples, key=lambda sample: sample.number))
    prompt, output = sum(sample.prompt_tokens for sample in good), sum(sample.output_tokens for sample in good)
    failed = [sample for sample in each.samples if sample.error]
    return {
        "target": each.target,
        "pass": each.name,
        "requests": len(each.samples),
        "wanted": each.wanted,
        "failed": len(failed),
        "failures": list(dict.fromkeys(sample.error for sample in failed))[:_MOST_LISTED],
        "problem": each.problem,
        "seconds": round(each.seconds, 3),
        "ttft": distribution(sample.first_token for sample in good),
        "tpot": distribution(sample.per_token for sample in good),
        "byLabel": {
            label: distribution(sample.first_token for sample in good if sample.label == label)
            for label in labels
            if len(labels) > 1
        },
        "promptTokensPerSecond": round(prompt / each.seconds, 1) if each.seconds else None,
        "outputTokensPerSecond": round(output / each.seconds, 1) if each.seconds else None,
        "hits": shares(each.before, each.after),
        "prefillSecondsSaved": _saved(each.before, each.after),
    }


def shares(before: Mapping[str, Any], after: Mapping[str, Any]) -> Document | None:
    """Return which share of the prompt tokens came from where, by the engines' counters; None where nobody counts."""
    if not after:
        return None
    prompt = after["promptTokens"] - before.get("promptTokens", 0)
    if prompt <= 0:
        return {}
    found = {
        SOURCES.get(source, source): (count - before.get("bySource", {}).get(source, 0)) / prompt
        for source, count in after["bySource"].items()
    }
    return {source: round(share, 4) for source, share in found.items() if share > 0}


def _saved(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    if not after:
        return None
    saved: float = after["prefillSecondsNotSpent"] - before.get("prefillSecondsNotSpent", 0.0)
    return round(max(0.0, saved), 3)


def compare(passes: Sequence[Pass]) -> Document:
    """Say for how many prompts all answers are the same, over targets and passes, and name those that differ."""
    by_prompt: dict[tuple[str, int], dict[tuple[int, ...] | str, list[str]]] = {}
    for each in passes:
        for sample in each.samples:
            if not sample.error:
                # Passes over the same prompts have one word in common: `single again` and `single first`.
                prompt = by_prompt.setdefault((each.name.partition(" ")[0], sample.number), {})
                prompt.setdefault(sample.answer, []).append(f"{each.target}, {each.name}")
    several = {place: answers for place, answers in by_prompt.items() if sum(map(len, answers.values())) > 1}
    differing = [place for place, answers in several.items() if len(answers) > 1]
    return {
        "compared": len(several),
        "same": len(several) - len(differing),
        "different": [
            {"pass": name, "request": number, "answers": list(several[name, number].values())}
            for name, number in differing[:_MOST_LISTED]
        ],
    }


def lines(passes: Sequence[Pass]) -> list[Document]:
    """Return each request, for a file of its own; the words of answers stay out."""
    return [
        {"target": each.target, "pass": each.name, **{k: v for k, v in asdict(sample).items() if k != "text"}}
        for each in passes
        for sample in each.samples
    ]


def page(found: Document) -> str:
    """Return the table for people."""
    rows = [["TARGET", "PASS", "REQUESTS", "TTFT mean", "P50", "P99", "TPOT P50", "TOKENS/s", "HITS", "SAVED"]]
    for each in found["passes"]:
        failed = f", {each['failed']} failed" if each["failed"] else ", not sent" if each["problem"] else ""
        ttft = each["ttft"] or {}
        rows.append(
            [
                each["target"],
                each["pass"],
                f"{each['requests']}{failed}",
                *(_ms(ttft.get(name)) for name in ("mean", "p50", "p99")),
                _ms((each["tpot"] or {}).get("p50")),
                "-" if each["outputTokensPerSecond"] is None else f"{each['outputTokensPerSecond']:.0f}",
                _hits(each["hits"]),
                "-" if each["prefillSecondsSaved"] is None else f"{each['prefillSecondsSaved']:.1f} s",
            ]
        )
        rows += [
            ["", f"  {label}", "", *(_ms((by or {}).get(name)) for name in ("mean", "p50", "p99"))]
            for label, by in each["byLabel"].items()
        ]
    width = len(rows[0])
    text = columns([[*row, *[""] * (width - len(row))] for row in rows])
    answers = found["answers"]
    if answers["compared"]:
        text += (
            f"\nanswers: {answers['same']} of {answers['compared']} prompts asked more than once got the same tokens\n"
        )
    for each in answers["different"]:
        ways = " | ".join("; ".join(asked) for asked in each["answers"])
        text += f"  request {each['request']} of {each['pass']} differs: {ways}\n"
    for each in found["passes"]:
        said = [*each["failures"], *([each["problem"]] if each["problem"] else [])]
        text += "".join(f"{each['target']}, {each['pass']}: {error}\n" for error in said)
    if any(each["requests"] != each["wanted"] and not each["problem"] for each in found["passes"]):
        text += "interrupted: these are the answers that there were\n"
    return text


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"  # noqa: PLR2004  digits that mean something


def _hits(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "?"
    return ", ".join(f"{source} {share:.0%}" for source, share in found.items()) or "none"
