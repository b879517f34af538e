# SPDX-License-Identifier: Apache-2.0
"""Whether answers are the same with and without the cache. Pure.

Two answers to one prompt must be equal token for token when the engine computed the same part of the prompt: then the
arithmetic is the same, and only the origin of the cached blocks differs. A computed prompt and a hit run through
kernels of other shapes, whose rounding may differ; how often that alone changes an answer is shown for vLLM without
offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from e2e.bench.journal import Record
from e2e.bench.stats import group, table


class Answer(NamedTuple):
    """One request's answer."""

    backend: str
    case: str
    prompt: tuple[int, int]
    """Seed and length."""
    cached: int
    output: tuple[int, ...]


def answers(records: Iterable[Record]) -> Iterator[Answer]:
    """Return every recorded answer."""
    for record in records:
        if record["kind"] == "single":
            prompt = (record["seed"], record["tokens"])
            yield Answer(record["backend"], record["case"], prompt, record["cached"], tuple(record["output"]))
        elif record["kind"] == "wave":
            case = f"{record['users']} users, {record['case']}"
            for seed, cached, output in zip(record["seeds"], record["cached"], record["outputs"], strict=True):
                yield Answer(record["backend"], case, (seed, record["tokens"]), cached, tuple(output))
        elif record["kind"] == "never":
            for seed, output in zip(record["seeds"], record["outputs"], strict=True):
                yield Answer(record["backend"], "never hits", (seed, 0), 0, tuple(output))


def section(records: Iterable[Record]) -> str:
    """Return the part of the report about answers; empty if there are none."""
    found = list(answers(records))
    if not found:
        return ""
    computed = _reference(found, lambda answer: answer.case in {"cold", "never hits"} or answer.case.endswith("cold"))
    hit = _reference(found, lambda answer: answer.case == "gpu_hit")
    rows = []
    for (backend, case), mine in sorted(group(((a.backend, a.case), a) for a in found).items()):
        rows.append(
            [f"{backend}, {case}", _equal(mine, computed, same_length=False), _equal(mine, hit, same_length=True)]
        )
    distinct = len({answer.output for answer in found})
    prompts = len({answer.prompt for answer in found})
    note = (
        f"{prompts} prompts with the same last tokens, {distinct} different answers: "
        "an answer that ignored the cached part of its prompt would be the same for all."
    )
    origin = next((answer.backend for answer in hit.values()), "-")
    headers = ["backend, case", "as computed", f"as a GPU hit of {origin}"]
    return "\n".join(["## Are the answers the same? (equal / compared)", "", table(headers, rows), note, ""])


def _reference(found: Sequence[Answer], matches: Callable[[Answer], bool]) -> dict[tuple[int, int], Answer]:
    """Return one answer for each prompt, vLLM's without offloading if there is one."""
    chosen: dict[tuple[int, int], Answer] = {}
    for answer in sorted(found, key=lambda answer: answer.backend != "none"):
        if matches(answer):
            chosen.setdefault(answer.prompt, answer)
    return chosen


def _equal(mine: Sequence[Answer], reference: dict[tuple[int, int], Answer], *, same_length: bool) -> str:
    pairs = [(answer, reference[answer.prompt]) for answer in mine if answer.prompt in reference]
    if same_length:
        pairs = [(answer, other) for answer, other in pairs if answer.cached == other.cached]
    return f"{sum(answer.output == other.output for answer, other in pairs)} / {len(pairs)}" if pairs else "-"
