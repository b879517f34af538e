# SPDX-License-Identifier: Apache-2.0
"""From the records of a run to Markdown tables and charts: ``python e2e/bench/report.py DIRECTORY...``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from e2e.bench import charts, journal, outputs
from e2e.bench.journal import Record
from e2e.bench.stats import Summary, group, milliseconds, percent, plain, ratio, summarise, table, times

ORDER = ("none", "cpu", "fs", "lifeboat", "kvtier")
TITLES = {
    "none": "no offload",
    "cpu": "vLLM CPU tier",
    "fs": "vLLM fs",
    "lifeboat": "lifeboatcache 0.1.11",
    "kvtier": "kvtier",
}
CASES = {
    "cold": "computed",
    "gpu_hit": "GPU hit",
    "cpu_hit": "CPU-tier hit",
    "disk_hit": "disk hit after restart",
    "cpu_hit_again": "CPU-tier hit after that",
}


def engine_report(directory: Path) -> str:
    """Read ``engine.jsonl``, write ``engine.md`` and the charts beside it, and return the text."""
    records = journal.read(directory / "engine.jsonl")
    singles = group((record["phase"], record) for record in records if record["kind"] == "single")
    parts = [_heading(records), *(_single(directory, phase, found) for phase, found in singles.items())]
    if waves := [record for record in records if record["kind"] == "wave"]:
        parts.append(_waves(directory, waves))
    if rounds := [record for record in records if record["kind"] == "never"]:
        parts.append(_never(rounds))
    parts.extend((outputs.section(records), _troubles(records)))
    text = "\n".join(part for part in parts if part)
    (directory / "engine.md").write_text(text, encoding="utf-8")
    return text


def present(backends: Iterable[str]) -> list[str]:
    """Return the backends that were measured, in the order of the tables."""
    found = set(backends)
    return [backend for backend in ORDER if backend in found]


def _heading(records: Sequence[Record]) -> str:
    runs = [line for record in records if record["kind"] == "run" for line in _run(record)]
    lines = ["# Engine benchmark", "", *runs]
    return "\n".join([*lines, ""])


def _run(run: Record) -> list[str]:
    machine = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    host = f"{machine['cpus']} x {machine['cpu']}, {machine['memory_gib']} GiB, GPU: {machine['gpu']}"
    return [f"- {run['date']}: `{run['command']}`", f"  {versions}; {host}"]


def _single(directory: Path, phase: str, records: Sequence[Record]) -> str:
    backends = present(record["backend"] for record in records)
    sizes = sorted({record["tokens"] for record in records})
    measured = {
        key: summarise(values)
        for key, values in group(((r["case"], r["tokens"], r["backend"]), r["first"]) for r in records).items()
    }
    cases = [case for case in CASES if any(record["case"] == case for record in records)]
    rows = [
        [f"{CASES[case]}, {tokens}", *(milliseconds(measured.get((case, tokens, backend))) for backend in backends)]
        for tokens in sizes
        for case in cases
    ]
    lines = [
        f"## One request, {phase.partition('-')[2]}: time to the first token in ms, median (extremes)",
        "",
        table(["case, tokens", *(TITLES[backend] for backend in backends)], rows),
    ]
    if "kvtier" in backends:
        lines += ["Disk hit of kvtier against:", "", _single_ratios(measured, backends, sizes)]
    charts.first_tokens(directory / f"{phase}.png", phase, measured, backends, sizes)
    return "\n".join([*lines, f"![{phase}]({phase}.png)", ""])


def _single_ratios(
    measured: dict[tuple[str, int, str], Summary | None], backends: Sequence[str], sizes: Sequence[int]
) -> str:
    rivals = [backend for backend in backends if backend not in {"kvtier", "none"}]
    rows = []
    for tokens in sizes:
        ours = measured.get(("disk_hit", tokens, "kvtier"))
        computed = measured.get(("cold", tokens, "none")) or measured.get(("cold", tokens, "kvtier"))
        rows.append(
            [
                str(tokens),
                *(f"{times(ratio(measured.get(('disk_hit', tokens, rival)), ours))} faster" for rival in rivals),
                f"{times(ratio(ours, measured.get(('cpu_hit', tokens, 'kvtier'))))} its time",
                f"{times(ratio(computed, ours))} faster",
            ]
        )
    return table(
        ["tokens", *(f"{TITLES[rival]}'s disk hit" for rival in rivals), "own CPU-tier hit", "computing"], rows
    )


def _waves(directory: Path, records: Sequence[Record]) -> str:
    backends = present(record["backend"] for record in records)
    keys = list(dict.fromkeys((record["users"], record["tokens"], record["case"]) for record in records))
    by_key = group(((r["users"], r["tokens"], r["case"], r["backend"]), r) for r in records)
    measured = {key: summarise(record["all_first"] for record in found) for key, found in by_key.items()}
    rows = []
    for users, tokens, case in keys:
        name = "return after restart" if case == "return" else "all computed"
        cells = [f"{users} x {tokens}, {name}"]
        for backend in backends:
            found = by_key.get((users, tokens, case, backend), [])
            cells.append(f"{plain(measured.get((users, tokens, case, backend)))} {_served(found)}" if found else "-")
        rows.append(cells)
    ratios = []
    for users, tokens, case in keys:
        ours = measured.get((users, tokens, case, "kvtier"))
        if case == "return" and ours is not None:
            others = [backend for backend in backends if backend != "kvtier"]
            cells = [f"{TITLES[b]} {times(ratio(ours, measured.get((users, tokens, case, b))))}" for b in others]
            ratios.append(f"{users} users, kvtier's time as a multiple: {', '.join(cells)}")
    charts.waves(directory / "users.png", measured, backends, [key for key in keys if key[2] == "return"])
    return "\n".join(
        [
            "## Users with long prompts, all at once: seconds until the last first token",
            "",
            "In brackets: how many users were served whole, each time; the share of the prompts' tokens not computed.",
            "",
            table(["users x tokens", *(TITLES[backend] for backend in backends)], rows),
            *ratios,
            "",
            "![users](users.png)",
            "",
        ]
    )


def _served(records: Sequence[Record]) -> str:
    whole = "/".join(str(record["served"]) for record in records)
    share = summarise(sum(record["cached"]) / (record["users"] * record["tokens"]) for record in records)
    return f"[{whole}; {percent(share.median if share else None)}]"


def _never(records: Sequence[Record]) -> str:
    backends = present(record["backend"] for record in records)
    measured = {
        backend: {
            "rate": summarise(r["output_tokens_per_second"] for r in records if r["backend"] == backend),
            "tpot": summarise(sum(r["tpot"]) / len(r["tpot"]) for r in records if r["backend"] == backend),
            "first": summarise(sorted(r["first"])[len(r["first"]) // 2] for r in records if r["backend"] == backend),
        }
        for backend in backends
    }
    base = measured.get("none", {})
    rows = []
    for backend in backends:
        mine = measured[backend]
        pairs = _paired(records, backend)
        rows.append(
            [
                TITLES[backend],
                plain(mine["rate"]),
                _change(ratio(mine["rate"], base.get("rate"))),
                _change(pairs.median if pairs else None),
                milliseconds(mine["tpot"]),
                _change(ratio(mine["tpot"], base.get("tpot"))),
                milliseconds(mine["first"]),
                str(sum(r["hits"] for r in records if r["backend"] == backend)),
            ]
        )
    headers = ["backend", "output tokens/s", "change", "paired", "ms per token", "change", "ms to first", "hits"]
    return "\n".join(
        [
            "## A workload that never hits: median (extremes) of the rounds, change against no offload",
            "",
            "`paired` is the median of each round's own ratio, which a drift of the machine leaves alone.",
            "",
            table(headers, rows),
        ]
    )


def _paired(records: Sequence[Record], backend: str) -> Summary | None:
    rates = {(r["backend"], r["repetition"]): r["output_tokens_per_second"] for r in records}
    rounds = [repetition for name, repetition in rates if name == backend and ("none", repetition) in rates]
    return summarise(rates[backend, repetition] / rates["none", repetition] for repetition in rounds)


def _change(value: float | None) -> str:
    return "-" if value is None else f"{(value - 1) * 100:+.1f} %"


def _troubles(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        if record["kind"] == "failed":
            lines.append(f"- {record['phase']}, {record['backend']}: failed: {record['error'].splitlines()[0]}")
        elif record["kind"] == "skipped":
            lines.append(f"- {record['phase']}, {record['backend']}: not measured, the time was up")
        elif record["kind"] == "missing":
            share = percent(1 - record["found"] / record["expected"])
            lines.append(f"- {record['backend']}: {share} of the blocks were not stored")
    return "\n".join(["## What went wrong", "", *lines, ""]) if lines else ""


def main() -> None:
    """Write the reports of the directories that the command line names."""
    # Not at the top: `store` measures, and measuring does not need this module the other way round.
    from e2e.bench.store_report import store_report

    for argument in sys.argv[1:]:
        directory = Path(argument)
        if journal.exists(directory / "engine.jsonl"):
            print(engine_report(directory))
        if journal.exists(directory / "store.jsonl"):
            print(store_report(directory))


if __name__ == "__main__":
    main()
