# SPDX-License-Identifier: Apache-2.0
"""The proof as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_cli.output import columns
from kvtier_demo.client import Answer


@dataclass(frozen=True)
class Row:
    """The answers of one engine to the prompts, all from one source."""

    what: str
    source: str
    """vLLM's name of the source that must serve the prompts; empty if they must be computed."""
    engine: str
    answers: tuple[Answer, ...]
    references: tuple[tuple[int, ...], ...]
    """Tokens that the answers must agree with; empty for prompts asked once."""

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each answer."""
        return tuple(answer.token_ids for answer in self.answers)

    @property
    def is_identical(self) -> bool:
        """True if all tokens are those of the references."""
        return not self.references or self.token_ids == self.references

    @property
    def median(self) -> Answer:
        """The answer with the median time to the first token."""
        return sorted(self.answers, key=lambda answer: answer.seconds_to_first_token)[len(self.answers) // 2]


_HEADER = ("", "replica", "TTFT", "prompt", "cached", "from", "read from disk", "same tokens")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text: the answer with the median time of each."""
    cells = [_HEADER]
    for row in rows:
        answer = row.median
        cells.append(
            (
                row.what,
                row.engine,
                f"{answer.seconds_to_first_token * 1000:.0f} ms",
                f"{answer.prompt_tokens} tokens",
                f"{answer.cached_tokens} tokens",
                "+".join(source for source, tokens in answer.sources.items() if tokens) or "-",
                f"{answer.disk_bytes / 2**20:.1f} MiB",
                "-" if not row.references else "yes" if row.is_identical else "NO",
            )
        )
    return columns(cells)
