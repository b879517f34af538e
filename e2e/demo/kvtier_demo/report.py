# SPDX-License-Identifier: Apache-2.0
"""The proof as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_demo.client import Answer


@dataclass(frozen=True)
class Row:
    """One measured prompt."""

    what: str
    engine: str
    answer: Answer
    reference: Answer | None
    """The answer that this one must agree with, token for token; None for a prompt asked once."""

    @property
    def is_identical(self) -> bool:
        """The tokens are those of the reference."""
        return self.reference is None or self.answer.token_ids == self.reference.token_ids


_HEADER = ("", "replica", "TTFT", "prompt", "cached", "from", "read from disk", "tokens identical")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    cells = [_HEADER]
    for row in rows:
        answer = row.answer
        cells.append(
            (
                row.what,
                row.engine,
                f"{answer.seconds_to_first_token * 1000:.0f} ms",
                f"{answer.prompt_tokens} tokens",
                f"{answer.cached_tokens} tokens",
                "+".join(source for source, tokens in answer.sources.items() if tokens) or "-",
                f"{answer.disk_bytes / 2**20:.1f} MiB",
                "-" if row.reference is None else "yes" if row.is_identical else "NO",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    lines = []
    for number, line in enumerate(cells):
        lines.append(
            "  ".join(
                text.ljust(width) if column in (0, 1) else text.rjust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def chart(rows: Sequence[Row], file: Path) -> None:
    """Write the times to first token as a bar chart (PNG)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = {"cold": "#b9543b", "GPU": "#3b6ea5", "CPU": "#4c9a6a", "disk": "#8a6fb0"}
    figure, axes = pyplot.subplots(figsize=(8, 0.7 * len(rows) + 1.4))
    times = [row.answer.seconds_to_first_token * 1000 for row in rows]
    labels = [f"{row.what} ({row.engine})" for row in rows]
    fills = [next((colour for word, colour in colours.items() if word in row.what), "#888888") for row in rows]
    bars = axes.barh(labels, times, color=fills)
    for bar, row, milliseconds in zip(bars, rows, times, strict=True):
        text = f" {milliseconds:.0f} ms, {row.answer.cached_tokens} of {row.answer.prompt_tokens} tokens cached"
        axes.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(times) * 1.7)  # room for the text beside the longest bar
    axes.set_xlabel("time to first token, ms (vLLM's CPU build, a tiny model)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
