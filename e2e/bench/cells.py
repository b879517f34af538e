# SPDX-License-Identifier: Apache-2.0
"""Heavy cells of the traffic benchmark: agents, prompts after a restart, a pool that is too small, a killed engine."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import yaml
from e2e.bench import throttle, workloads
from e2e.bench.workloads import NEXT_SEED, Cell, Request, Sizes, make_request
from e2e.engines.process import EngineProcess

from kvtier_connector.store.fsck import FsckReport, check_generation
from kvtier_connector.store.header import Fault
from kvtier_connector.store.journal import RECORD_BYTES, Op, decode_record
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.scan import BlockEntry, scan

_AGENT, _LONG, _BURST, _PREEMPTED, _KILLED, _GROUP = (NEXT_SEED + place * 10_000_000 for place in range(6))
_PARTS = 100
"""Most parts of one history."""
PREPARE: Final = "prepare"
"""Begins the names of what puts on the volume what the cells after a restart ask for."""
WINDOW_SECONDS: Final = 2.0
BACK: Final = 0.95
"""The hit rate is the old one again where it is at least this share of it."""
_CHECKS_AT_ONCE = 16
_MODEL_LENGTH_STEP = 1024


class HeavyCell(enum.StrEnum):
    """One measurement; README.md says what each of them is."""

    AGENTS = "agents"
    LONG = "long"
    BURSTS = "bursts512"
    PREEMPTION = "preemption"
    KILLED = "killed"
    RATES = "rates"
    RETURNING = "returning"
    ROUTER = "router"


@dataclass(frozen=True, kw_only=True)
class HeavySizes:
    """How large the workloads are; sizes.yaml says more."""

    agents: int
    agent_tokens: int
    agent_step_tokens: int
    agent_steps: int
    agent_gap_seconds: float
    """Mean time from an answer to the next prompt."""
    agent_output: int
    long_prompts: int
    long_tokens: int
    bursts: int
    burst_tokens: int
    preempted: int
    preempted_tokens: int
    preempted_output: int
    killed_conversations: int
    killed_tokens: int
    killed_turn_tokens: int
    killed_turns: int
    killed_turns_before: float
    """When the engine is killed, in turns of all conversations."""
    killed_per_second: float
    killed_output: int
    long_rounds: int
    volume_rates: Sequence[float]
    """GB/s that a slow volume is read at; 0 for one that hangs."""
    groups: int
    group_requests: int
    group_tokens: int
    group_own_tokens: int
    group_output: int
    group_spread: int
    """Prompts of so many groups come mixed."""
    group_at_a_time: int


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine's memory, and what it serves."""

    cells: Sequence[str]
    keeps_volume: bool
    """Finds what the stage before left."""
    engine: Mapping[str, Any]
    """More of vLLM's engine arguments."""
    gpu_tokens: int
    """Capacity of the GPU's prefix cache; 0 for all free memory."""
    cpu_bytes: int
    engines: int = 1
    """Replicas on one device; only the cell `router` asks those after the first."""


_SIZES = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text())
STAGES, TINY_STAGES = (
    {
        name: Stage(stage["cells"], stage.get("keeps_volume", False), stage.get("engine", {}), **stage[device])
        for name, stage in _SIZES["stages"].items()
    }
    for device in ("gpu", "cpu")
)
GPU_HEAVY = HeavySizes(**_SIZES["heavy"]["gpu"])
TINY_HEAVY = HeavySizes(**_SIZES["heavy"]["cpu"])
_Sized = TypeVar("_Sized", Sizes, HeavySizes)


def sized(usual: _Sized, given: Mapping[str, Any]) -> _Sized:
    """Return sizes with those of their fields that are given."""
    return dataclasses.replace(usual, **{name: value for name, value in given.items() if hasattr(usual, name)})


class Player(Protocol):
    """Plays cells with its engine and its volume."""

    sizes: Sizes
    heavy: HeavySizes
    rounds: int
    blocks: Path

    @property
    def engine(self) -> EngineProcess:
        """The engine that serves."""

    @property
    def engines(self) -> Sequence[EngineProcess]:
        """All engines of the stage."""

    def ask(self, requests: Sequence[Mapping[str, Any]], *, at_a_time: int = 0, until: float = 0.0) -> dict[str, Any]:
        """Have the engine answer requests."""

    def ask_each(self, requests: Sequence[Sequence[Request]], *, at_a_time: int) -> dict[str, Any]:
        """Have every engine answer requests of its own, so many of each at a time."""

    def note(self, cell: str, found: Mapping[str, Any]) -> None:
        """Record what was asked as a cell."""

    def forget_all(self) -> None:
        """Empty GPU and CPU tier."""

    def empty(self) -> None:
        """Remove all blocks from the volume."""

    def start_engine(self) -> None:
        """Start another engine."""


def agents(sizes: HeavySizes, *, step: int) -> list[Request]:
    """Return one step of every agent: its history, which the step before had but for the last part.

    Tools take some seconds between an answer and the next prompt; `steps` joins the steps.
    """
    found = []
    for agent in range(sizes.agents):
        seed = _AGENT + agent * _PARTS
        chooser = random.Random(seed + step)
        output = chooser.randint(sizes.agent_output, 2 * sizes.agent_output)
        gap = sizes.agent_gap_seconds * chooser.uniform(0.5, 1.5)
        parts = _history(seed, sizes.agent_tokens, sizes.agent_step_tokens, turns=step)
        found.append(make_request(f"step {step}", parts, output, gap=gap))
    return found


def _history(seed: int, tokens: int, turn_tokens: int, *, turns: int) -> list[tuple[int, int]]:
    """Return the parts of a prompt that so many turns were added to."""
    return [(seed, tokens), *((seed + number, turn_tokens) for number in range(1, turns + 1))]


def steps(sizes: HeavySizes) -> list[Request]:
    """Return all steps of the agents but their first, each after the one before."""
    first = [{**request, "start": request["gap"]} for request in agents(sizes, step=1)]
    later = [request for step in range(2, sizes.agent_steps) for request in agents(sizes, step=step)]
    return [*first, *({**request, "after": number} for number, request in enumerate(later))]


def long_prompts(sizes: HeavySizes) -> list[Request]:
    """Return very long prompts."""
    return [make_request("long", [(_LONG + n, sizes.long_tokens)], 1) for n in range(sizes.long_prompts)]


def bursts(sizes: HeavySizes) -> list[Request]:
    """Return short prompts that come at once."""
    return [make_request("burst", [(_BURST + n, sizes.burst_tokens)], 1) for n in range(sizes.bursts)]


def preempted(sizes: HeavySizes, *, first: int = 0) -> list[Request]:
    """Return prompts whose answers are long, numbered from a number on."""
    seeds = range(_PREEMPTED + first, _PREEMPTED + first + sizes.preempted)
    return [make_request("preempted", [(seed, sizes.preempted_tokens)], sizes.preempted_output) for seed in seeds]


def steady(sizes: HeavySizes) -> list[Request]:
    """Return the turns of conversations, which come at a steady rate: all of one turn, then all of the next."""
    return [
        make_request(
            f"of turn {turn}",
            _history(_KILLED + conversation * _PARTS, sizes.killed_tokens, sizes.killed_turn_tokens, turns=turn),
            sizes.killed_output,
            start=(turn * sizes.killed_conversations + conversation) / sizes.killed_per_second,
        )
        for turn in range(sizes.killed_turns)
        for conversation in range(sizes.killed_conversations)
    ]


def grouped(sizes: HeavySizes, *, first: int = 0) -> list[Request]:
    """Return the prompts of groups, numbered from a number on, in a random order that keeps each group together."""
    chooser = random.Random(_GROUP + first)
    places = {
        (group, number): group + chooser.uniform(0, sizes.group_spread)
        for group in range(sizes.groups)
        for number in range(sizes.group_requests)
    }
    found = []
    for group, number in sorted(places, key=lambda each: places[each]):
        seed = _GROUP + (first + group) * _PARTS
        parts = [(seed, sizes.group_tokens), (seed + 1 + number, sizes.group_own_tokens)]
        found.append(make_request("grouped", parts, sizes.group_output))
    return found


def placed(requests: Sequence[Request], engines: int, *, by_prefix: bool) -> list[list[Request]]:
    """Return the requests of each engine: by the highest hash of prefix and engine, or chosen at random."""
    chooser = random.Random(_GROUP)
    found: list[list[Request]] = [[] for _ in range(engines)]
    for request in requests:
        prefix = str(request["parts"][0])
        ranks = [hashlib.sha256(f"{prefix} {engine}".encode()).digest() for engine in range(engines)]
        found[ranks.index(max(ranks)) if by_prefix else chooser.randrange(engines)].append(request)
    return found


def _asked(sizes: Sizes, heavy: HeavySizes) -> dict[str, list[Request]]:
    """Return what cells after a restart ask for; of cells without restart, their longest prompts."""
    long: dict[str, list[Request]] = {HeavyCell.LONG: long_prompts(heavy), HeavyCell.BURSTS: bursts(heavy)}
    after = {Cell.SINGLE: workloads.singles(sizes), **long}
    return {
        **after,
        PREPARE: [*workloads.arrivals(sizes), *workloads.shared_prefix(sizes), *after[Cell.SINGLE]],
        **{f"{PREPARE}-{cell}": requests for cell, requests in after.items()},
        HeavyCell.AGENTS: agents(heavy, step=heavy.agent_steps - 1),
        HeavyCell.PREEMPTION: preempted(heavy),
        HeavyCell.KILLED: steady(heavy)[-1:],
        HeavyCell.ROUTER: grouped(heavy)[:1],
    }


def prepared(cell: str, sizes: Sizes, heavy: HeavySizes) -> list[Request]:
    """Return what cells find on the volume after a restart: ``prepare`` is for all of `restart`, others for one."""
    return [{**each, "start": 0.0} for each in _asked(sizes, heavy)[cell]] if cell.startswith(PREPARE) else []


def known() -> set[str]:
    """Return the names of all cells."""
    return {*Cell, *HeavyCell, *_asked(workloads.TINY_SIZES, TINY_HEAVY)}


def model_length(cells: Sequence[str], sizes: Sizes, heavy: HeavySizes) -> int:
    """Return the longest context of these cells, as far as they may be longer than an engine takes by default."""
    requests = [request for name, made in _asked(sizes, heavy).items() if name in cells for request in made]
    lengths = (sum(tokens for _, tokens in each["parts"]) + 1 + each["output_tokens"] for each in requests)
    return -(-max(lengths, default=0) // _MODEL_LENGTH_STEP) * _MODEL_LENGTH_STEP


def play(player: Player, cell: str) -> None:
    """Play a cell; one that prepares a volume is nothing where there is none."""
    sizes = player.heavy
    match cell:
        case HeavyCell.AGENTS:
            player.note(f"{cell} first", player.ask(agents(sizes, step=0)))
            player.note(cell, player.ask(steps(sizes)))
        case HeavyCell.LONG:
            for _round in range(sizes.long_rounds):
                player.note(cell, player.ask(long_prompts(sizes)))
                player.forget_all()
        case HeavyCell.BURSTS:
            for _round in range(player.rounds):
                player.note(f"{cell} first", player.ask(bursts(sizes)))
                for _again in range(3):
                    player.note(cell, player.ask(bursts(sizes)))
                player.forget_all()
        case HeavyCell.PREEMPTION:
            for number in range(player.rounds):
                player.note(cell, player.ask(preempted(sizes, first=number * sizes.preempted)))
        case _ if other := _OTHERS.get(cell):
            other(player, cell)


def _return(player: Player, cell: str) -> None:
    """Ask for the agents' last prompts at once, with GPU and CPU tier emptied."""
    player.forget_all()
    last = agents(player.heavy, step=player.heavy.agent_steps - 1)
    player.note(cell, player.ask([{**each, "output_tokens": 1} for each in last]))


def _route(player: Player, cell: str) -> None:
    """Place groups of prompts on the engines at random, then others by their prefix."""
    sizes = player.heavy
    for number, name in enumerate(("random", "prefix")):
        own = placed(grouped(sizes, first=number * sizes.groups), len(player.engines), by_prefix=name == "prefix")
        player.note(f"{cell} {name}", player.ask_each(own, at_a_time=sizes.group_at_a_time))
        player.empty()


def _slow_down(player: Player, cell: str) -> None:
    """Slow the volume down to several rates, each learnt by the first prompt; at the last it may hang."""
    bucket = throttle.Bucket(Path(os.environ[throttle.FILE]))
    player.forget_all()
    for rate in player.heavy.volume_rates:
        name = f"{cell} {rate} GB/s" if rate else f"{cell} hung"
        for kind, asked in (
            ("single", [[each] for each in workloads.singles(player.sizes)]),
            ("D", [workloads.arrivals(player.sizes)]),
        ):
            bucket.rate = rate * 1e9
            for requests in asked:
                player.note(f"{name} {kind}", player.ask(requests))
            bucket.rate = bucket.rate or math.inf
            player.forget_all()
    bucket.rate = math.inf


def _kill(player: Player, cell: str) -> None:
    """Kill the engine under traffic, start another, and go on with what was not answered."""
    sizes = player.heavy
    requests = steady(sizes)
    until = sizes.killed_turns_before * sizes.killed_conversations / sizes.killed_per_second
    before = player.ask([request for request in requests if request["start"] < until], until=until)
    player.engine.kill()
    again = [request for request in before["requests"] if request["label"] != "of turn 0"]
    player.note(f"{cell} before", before)
    survived = count_blocks(player.blocks)
    player.start_engine()
    answered = [request["parts"] for request in before["requests"]]
    rest = [request for request in requests if request["parts"] not in answered]
    found = player.ask([{**request, "start": max(0.0, request["start"] - until)} for request in rest])
    old = hit_share(again)
    shares = windows(found["requests"], hit_share)
    back = next((WINDOW_SECONDS * (n + 1) for n, share in enumerate(shares) if share >= BACK * old), None)
    told = {
        "old_hits": old,
        "old_first": mean_first(again),
        "windows": shares,
        "first_windows": windows(found["requests"], mean_first),
        "back_seconds": back,
        "start_seconds": player.engine.start_seconds,
    }
    player.note(cell, {**found, **told, **survived})


_OTHERS: Final[Mapping[str, Callable[[Player, str], None]]] = {
    HeavyCell.KILLED: _kill,
    HeavyCell.RATES: _slow_down,
    HeavyCell.RETURNING: _return,
    HeavyCell.ROUTER: _route,
}


def hit_share(requests: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the prompts' tokens that were not computed."""
    tokens = sum(request["tokens"] for request in requests)
    return sum(request["cached"] for request in requests) / tokens if tokens else 0.0


def windows(requests: Sequence[Request], figure: Callable[[Sequence[Request]], float]) -> list[float]:
    """Return a figure of the requests whose first token came in each window."""
    ends = range(int(max(request["at"] for request in requests) // WINDOW_SECONDS) + 1)
    return [figure([each for each in requests if each["at"] // WINDOW_SECONDS == end]) for end in ends]


def mean_first(requests: Sequence[Request]) -> float:
    """Return the mean seconds to the first token; 0 without requests."""
    return statistics.fmean(request["first"] for request in requests) if requests else 0.0


def count_blocks(blocks: Path) -> dict[str, int]:
    """Count the blocks that journals under the directory call stored, and those of them that are absent or damaged.

    It is empty where there are no journals, as in tiers of others.
    """
    stored: dict[Path, set[BlockKey]] = {}
    for journal in blocks.rglob("*.kvj"):
        data = journal.read_bytes()
        records = (decode_record(data[at : at + RECORD_BYTES]) for at in range(0, len(data), RECORD_BYTES))
        keys = {record.key for record in records if record and record.op == Op.STORED}
        stored.setdefault(journal.parent.parent, set()).update(keys)
    if not stored:
        return {}
    report, found = FsckReport(), 0
    for root, keys in stored.items():
        check_generation(root, report, threads=_CHECKS_AT_ONCE)
        found += len(keys & {entry.key for entry in scan(root) if isinstance(entry, BlockEntry)})
    acknowledged = sum(map(len, stored.values()))
    lost = acknowledged - found + sum(problem.kind in {fault.value for fault in Fault} for problem in report.problems)
    return {"acknowledged_blocks": acknowledged, "found_blocks": report.blocks, "lost_blocks": lost}


class StepCounts:
    """Counts steps of an engine, from the figures that vLLM gives its loggers."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.preemptions = 0
        self.scheduled_tokens = 0
        """Computed in all steps; 0 unless the engine tells of each step."""

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Add up."""
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None and (step := scheduler_stats.iteration_details) is not None:
            self.scheduled_tokens += step.num_ctx_tokens + step.num_generation_tokens

    def log(self, *_: Any) -> None:
        """Print nothing."""

    log_engine_initialized = record_sleep_state = log


TITLES: Final = {
    "agents first": "agents, first step",
    "agents": "agents, later steps",
    "returning": "agents, all at once after a restart",
    "long": "long prompts at once",
    "bursts512 first": "bursts, first pass",
    "bursts512": "bursts, second pass",
    "preemption": "preemption",
    "killed before": "before the kill",
    "killed": "after the kill",
    "router random": "three engines, placed at random",
    "router prefix": "three engines, placed by prefix",
}
"""Of the cells here, in reports."""
HEADERS: Final = (
    "workload: backend",
    "s until done",
    "input tokens/s",
    "output tokens/s",
    "TTFT s",
    "TTFT P50",
    "TTFT P99",
    "hits",
    "preemptions",
    "recomputed tokens",
    "s until hits are back",
    "blocks lost",
    "runs",
)


def figures(record: Mapping[str, Any]) -> list[float]:
    """Return the figures of a cell, in the order of `HEADERS`; NaN for what it does not have."""
    requests, seconds = record["requests"], record["seconds"]
    firsts = sorted(request["first"] for request in requests)
    inputs = sum(request["tokens"] for request in requests)
    outputs = sum(len(request["output"]) for request in requests)
    # Each token of an answer but its first one is computed from the one before.
    needed = inputs - sum(request["cached"] for request in requests) + outputs - len(requests)
    scheduled = record["counts"]["scheduled_tokens"]
    back = record.get("back_seconds", math.nan)
    return [
        seconds,
        inputs / seconds,
        outputs / seconds,
        statistics.fmean(firsts),
        statistics.median(firsts),
        firsts[math.ceil(0.99 * len(firsts)) - 1],
        hit_share(requests),
        record["counts"]["preemptions"],
        scheduled - needed if scheduled else math.nan,
        math.inf if back is None else back,
        record.get("lost_blocks", math.nan),
    ]


def row(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the medians of a cell's repetitions, and their number."""
    medians = [statistics.median(values) for values in zip(*map(figures, records), strict=True)]
    shown = [f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" for value in medians]  # noqa: PLR2004 - digits
    return [*("-" if text == "nan" else "never" if text == "inf" else text for text in shown), str(len(records))]
