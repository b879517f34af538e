# SPDX-License-Identifier: Apache-2.0
"""The proof as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


_COLORS = {"": "#b9543b", "device": "#3b6ea5", "host": "#4c9a6a", "disk": "#8a6fb0"}


def chart(rows: Sequence[Row], file: Path) -> None:
    """Write the times to the first token as a bar chart (PNG), titled with what the last row proves."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.7 * len(rows) + 1.9))
    times = [row.median.seconds_to_first_token * 1000 for row in rows]
    bars = axes.barh([f"{row.what} ({row.engine})" for row in rows], times, color=[_COLORS[row.source] for row in rows])
    for bar, row, milliseconds in zip(bars, rows, times, strict=True):
        answer = row.median
        facts = [f" {milliseconds:.0f} ms", f"{answer.cached_tokens} of {answer.prompt_tokens} tokens cached"]
        facts += [f"{answer.disk_bytes / 2**20:.0f} MiB read"] if row.source == "disk" else []
        facts += [f"same tokens {'✓' if row.is_identical else '✗'}"] if row.references else []
        axes.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, ", ".join(facts), va="center", fontsize=9)
    proved = rows[-1]
    who = (
        f"{proved.engine} read from the volume what A computed"
        if proved.engine != "A"
        else "A read what it computed before"
    )
    axes.set_title(f"{who}: {times[0] / times[-1]:.1f} times as soon", loc="left", fontsize=12, fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, max(times) * 2.1)  # room for the text beside the longest bar
    axes.set_xlabel(f"time to first token, ms, median of {len(proved.answers)} (vLLM's CPU build, a tiny model)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
