# SPDX-License-Identifier: Apache-2.0
"""Simulates one engine and one volume: which part of a hit is computed and which is loaded, by several policies.

``python -m e2e.bench.split_sim --out DIRECTORY --trace FILE`` prints tables and draws one split hit. Simulated: steps
with decodes and chunks of prefill, one volume that serves requests in order of arrival, rows of the CPU tier, and the
price of a join. Not simulated: a full GPU pool, several engines at one volume.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from e2e.bench import report

STEP_TOKENS: Final = 8192
"""vLLM's budget of a step."""
HEAD_TOKENS: Final = 2048
"""Largest chunk of the head of a hit that is split: a join waits for the end of a chunk."""
BLOCK_TOKENS: Final = 64
MOST_RUNNING: Final = 128
CPU_TIER_TOKENS: Final = 200_000
FLOOR_SECONDS: Final = 0.008
"""Shortest step with decodes."""
DECODE_SECONDS: Final = 6e-5
"""Cost of one more decode in a step."""
JOIN_SECONDS: Final = 0.004
"""Cost of stopping a request and scheduling it anew."""
COPY_RATE: Final = 55e9
"""Bytes per second from host memory to the GPU."""
TOKEN_BYTES: Final = 131_072
TRACE_BLOCK: Final = 512
"""Tokens of a block in Mooncake's trace."""
GPU_POOL_TOKENS: Final = 400_000
ROUNDING: Final = 1e-6
LONGEST_TOKENS: Final = 125_000
"""Of an agent's history, which then begins anew."""

POLICIES: Final = ("compute all", "load all", "quicker one", "split by arrival", "split, misses first")
"""`quicker one` knows both queues and decides once. With `misses first`, heads of hits get what misses leave."""


def computing(begin: float, end: float) -> float:
    """Return the seconds that the tokens between two positions take: an 8B model in bf16, as measured on one H200."""
    return 2.18e-5 * (end - begin) + 4.68e-10 * (end * end - begin * begin)


@dataclass(eq=False)
class Prompt:
    """One request, and how far it is."""

    at: float
    tokens: int
    hit: int
    """Tokens on the volume, from the beginning."""
    output: int
    local: int = 0
    """Tokens of these that the GPU holds."""
    computed: float = 0.0
    """From the beginning."""
    loaded: float = 0.0
    """From the end of the hit, backwards."""
    is_reading: bool = False
    has_joined: bool = False
    goes_on_at: float = 0.0
    """When the tail is in the GPU."""
    first_at: float = math.inf
    left: int = 0
    """Output tokens after the first one."""

    @property
    def wanted(self) -> float:
        """Tokens that are neither computed nor loaded."""
        left = self.hit - self.computed - self.loaded
        return left if left > ROUNDING else 0.0


Follow = Callable[[Prompt, float], Iterable[Prompt]]
"""Returns the prompts that a finished one leads to."""


@dataclass
class Simulation:
    """One run of one policy, and its figures."""

    prompts: Iterable[Prompt]
    policy: str
    rate: float
    """Tokens per second of the volume."""
    follow: Follow | None = None
    watch: Callable[[float, Prompt], None] = lambda _now, _prompt: None
    """Called with each prompt that waits for its first token, after each step."""
    now: float = 0.0
    done: list[Prompt] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between output tokens, and how many came after so long."""
    joins: int = 0
    thrown: float = 0.0
    """Tokens that were loaded and computed as well."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _coming: list[tuple[float, int, Prompt]] = field(default_factory=list)
    _waiting: list[Prompt] = field(default_factory=list)
    _decoding: list[Prompt] = field(default_factory=list)
    _volume: deque[Prompt] = field(default_factory=deque)
    _rows: float = 0.0

    def run(self) -> Self:
        """Go on until all prompts are answered."""
        self._add(self.prompts)
        while self._coming or self._waiting or self._decoding:
            if not self._waiting and not self._decoding:
                self.now = max(self.now, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.now:
                self._arrive(heapq.heappop(self._coming)[2])
            self._join()
            chunks = self._choose()
            steps, seconds = self._pace(chunks)
            self._read(seconds * steps)
            self.now += seconds * steps
            self._advance(chunks, steps, seconds)
            for prompt in self._waiting:
                self.watch(self.now, prompt)
        return self

    def first(self, share: float | None = None, *, wants: Callable[[Prompt], bool] = lambda _: True) -> float:
        """Return the mean seconds to the first token, or a percentile of them."""
        found = [each.first_at - each.at for each in self.done if wants(each)] or [math.nan]
        return statistics.fmean(found) if share is None else report.percentile(found, share)

    def means(self) -> str:
        """Return mean seconds to the first token: of all, of hits and of misses."""
        hits, misses = self.first(wants=lambda each: each.hit > 0), self.first(wants=lambda each: not each.hit)
        return " / ".join("-" if math.isnan(value) else f"{value:.2f}" for value in (self.first(), hits, misses))

    def details(self) -> str:
        """Return the figures of a trace, as cells of a table."""
        tokens = sum(each.tokens for each in self.done)
        gap = report.percentile([gap for gap, count in self.gaps for _ in range(count)], 0.99)
        return (
            f"{self.first(0.5):.2f} | {self.first():.2f} | {self.first(0.99):.1f} | {1000 * gap:.0f} | "
            f"{tokens / self.now / 1000:.1f}k | {self.joins} | {100 * self.thrown / tokens:.2f} %"
        )

    def _add(self, prompts: Iterable[Prompt]) -> None:
        for prompt in prompts:
            heapq.heappush(self._coming, (prompt.at, next(self._numbers), prompt))

    def _arrive(self, prompt: Prompt) -> None:
        prompt.computed = prompt.local
        self._waiting.append(prompt)
        if self.policy == "compute all" or not prompt.wanted:
            return
        if self.policy == "quicker one":
            loading = (sum(each.wanted for each in self._volume) + prompt.wanted) / self.rate
            others = [each for each in self._waiting if not each.is_reading]
            if loading > sum(computing(each.computed, each.tokens) for each in others):
                return
        prompt.is_reading = True
        self._volume.append(prompt)

    def _join(self) -> None:
        """Let prompts go on whose computed head meets the loaded tail."""
        for prompt in self._waiting:
            if prompt.is_reading and not prompt.has_joined and not prompt.wanted:
                prompt.has_joined = True
                self.joins += prompt.computed > prompt.local
                self.thrown += prompt.computed + prompt.loaded - prompt.hit
                price = JOIN_SECONDS if prompt.computed > prompt.local else 0.0
                prompt.goes_on_at = self.now + price + prompt.loaded * TOKEN_BYTES / COPY_RATE
                prompt.computed = prompt.hit

    def _choose(self) -> list[tuple[Prompt, float]]:
        """Return the chunks of prefill of the next step."""
        order = list(self._waiting)
        if self.policy == "split, misses first":
            order.sort(key=lambda each: each.is_reading and not each.has_joined)
        elif self.policy != "split by arrival":
            order = [each for each in order if not each.is_reading or each.has_joined]
        chunks: list[tuple[Prompt, float]] = []
        budget = float(STEP_TOKENS - len(self._decoding))
        for prompt in order:
            if budget <= 0 or len(self._decoding) + len(chunks) >= MOST_RUNNING:
                break
            size = min(budget, prompt.tokens - prompt.computed)
            if prompt.has_joined and self.now < prompt.goes_on_at:
                continue
            if prompt.is_reading and not prompt.has_joined:
                size = self._head(prompt, budget)
            if size > 0:
                chunks.append((prompt, size))
                budget -= size
        return chunks

    def _head(self, prompt: Prompt, budget: float) -> float:
        """Return the size of the next chunk of a head: none that the reading overtakes."""
        before = sum(each.wanted for each in self._volume if each.at <= prompt.at)
        size = min(HEAD_TOKENS, budget, prompt.wanted)
        while size >= BLOCK_TOKENS and before / self.rate < computing(prompt.computed, prompt.computed + size):
            size //= 2
        return size if size >= BLOCK_TOKENS else 0.0

    def _pace(self, chunks: Sequence[tuple[Prompt, float]]) -> tuple[int, float]:
        """Return how many equal steps come next, and the seconds of each."""
        seconds = sum(computing(each.computed, each.computed + size) for each, size in chunks)
        until = self._coming[0][0] - self.now if self._coming else math.inf
        if self._decoding:
            seconds = max(FLOOR_SECONDS, seconds + len(self._decoding) * DECODE_SECONDS)
            steps = 1 if self._waiting else int(min(*(each.left for each in self._decoding), until // seconds))
            return max(1, steps), seconds
        if chunks:
            return 1, seconds
        # The volume alone works: until its next prompt is read, a tail is copied, or another prompt arrives.
        ends = [each.goes_on_at - self.now for each in self._waiting if each.goes_on_at > self.now]
        ends += [each.wanted / self.rate for each in self._volume if each.wanted][:1]
        return 1, max(1e-5, min([until, *ends]))

    def _read(self, seconds: float) -> None:
        tokens = seconds * self.rate
        while tokens > 0 and self._volume:
            prompt = self._volume[0]
            if not prompt.wanted:
                self._volume.popleft()
                continue
            if (size := min(tokens, prompt.wanted, CPU_TIER_TOKENS - self._rows)) <= 0:
                return
            prompt.loaded += size
            self._rows += size
            tokens -= size

    def _advance(self, chunks: Sequence[tuple[Prompt, float]], steps: int, seconds: float) -> None:
        for prompt in self._decoding:
            prompt.left -= steps
        ended = [prompt for prompt in self._decoding if prompt.left <= 0]
        if self._decoding:
            self.gaps.append((seconds, steps * len(self._decoding)))
        for prompt, size in chunks:
            prompt.computed += size
            if prompt.computed >= prompt.tokens - ROUNDING:
                prompt.first_at, prompt.left = self.now, prompt.output - 1
                self._waiting.remove(prompt)
                self._rows -= prompt.loaded
                (self._decoding if prompt.left else ended).append(prompt)
        self._decoding = [prompt for prompt in self._decoding if prompt.left > 0]
        self.done += ended
        if self.follow is not None:
            self._add(more for prompt in ended for more in self.follow(prompt, self.now))


def poisson(rate: float, *, misses: float, load: float, count: int = 300) -> list[Prompt]:
    """Return prompts of 16k tokens, at so large a share of the most that engine and volume could serve together."""
    source, tokens, now = random.Random(1), 16_000, 0.0
    computes = tokens / computing(0, tokens)
    most = min(computes / misses if misses else math.inf, computes + (rate if misses < 1 else 0.0))
    prompts = []
    for _ in range(count):
        now += source.expovariate(load * most / tokens)
        prompts.append(Prompt(now, tokens + 100, 0 if source.random() < misses else tokens, 64))
    return prompts


def mooncake(trace: Path, *, share: int = 3) -> list[Prompt]:
    """Return one of ``share`` conversations of Mooncake's hour, for a volume that keeps all and a GPU that evicts."""
    volume: set[int] = set()
    pool: OrderedDict[int, None] = OrderedDict()
    prompts = []
    for line in trace.read_text().splitlines():
        asked = json.loads(line)
        blocks = asked["hash_ids"]
        if blocks[min(1, len(blocks) - 1)] % share:
            continue
        whole = blocks[: (asked["input_length"] - 1) // TRACE_BLOCK]
        hit, local = (
            TRACE_BLOCK * sum(1 for _ in itertools.takewhile(known.__contains__, whole)) for known in (volume, pool)
        )
        volume.update(whole)
        for block in whole:
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > GPU_POOL_TOKENS // TRACE_BLOCK:
            pool.popitem(last=False)
        prompts.append(Prompt(asked["timestamp"] / 1000, asked["input_length"], hit, asked["output_length"], local))
    return prompts


def agents(*, users: int = 16, turns: int = 12) -> tuple[list[Prompt], Follow]:
    """Return users whose history, which is on the volume alone, grows by a twentieth a turn, with gaps for tools."""
    source, left = random.Random(2), users * (turns - 1)

    def turn(at: float, history: int) -> Prompt:
        return Prompt(at, history * 20 // 19, history // BLOCK_TOKENS * BLOCK_TOKENS, 200)

    def follow(prompt: Prompt, now: float) -> list[Prompt]:
        nonlocal left
        left -= 1
        gap, history = source.expovariate(1 / 5), prompt.tokens + prompt.output
        return [turn(now + gap, history if history < LONGEST_TOKENS else 60_000)] if left >= 0 else []

    return [turn(source.uniform(0, 20), source.randint(60, 100) * 1000) for _ in range(users)], follow


def draw(path: Path, *, tokens: int = 32_768, rate: float = 4e9) -> None:
    """Draw one split hit over time."""
    course = [(0.0, 0.0, float(tokens))]
    goes_on: list[float] = []

    def watch(now: float, prompt: Prompt) -> None:
        if prompt.has_joined:
            goes_on.append(prompt.goes_on_at)
        else:
            course.append((now, prompt.computed, max(prompt.computed, prompt.hit - prompt.loaded)))

    prompt = Prompt(0.0, tokens + 100, tokens, 1)
    Simulation([prompt], "split by arrival", rate / TOKEN_BYTES, watch=watch).run()
    computed, loaded = computing(0, tokens + 100), tokens * TOKEN_BYTES / rate
    times, heads, tails = zip(*course, strict=True)

    def picture(axes: Any) -> None:
        axes.fill_between(times, 0, heads, label="head: computed by the GPU", color="#e8710a", alpha=0.7)
        axes.fill_between(times, tails, tokens, label="tail: read from the volume", color="#1a73e8", alpha=0.7)
        axes.axvspan(times[-1], goes_on[0], color="#9334e6", alpha=0.5, label="join: the tail is copied to the GPU")
        axes.axvline(loaded, color="#1a73e8", linestyle="--", label="the volume alone would have read all")
        axes.axvline(computed, color="#e8710a", linestyle="--", label="the GPU alone would have computed all")
        axes.set_xlim(0, 1.04 * max(computed, loaded))

    ends = f"first token at {prompt.first_at:.2f} s"
    title = f"One split hit: {tokens:,} tokens, 8B on an H200, {rate / 1e9:g} GB/s; {ends}"
    axis = "position in the prompt, tokens"
    report.chart(path, picture, title=title, xlabel="seconds since the request", ylabel=axis, ylim=(0, tokens))


def main() -> None:
    """Simulate all, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the picture")
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")
    options = parser.parse_args()
    draw(options.out / "split-hit.png")
    print(f"| misses, volume, load | {' | '.join(POLICIES)} |\n|{'---|' * (1 + len(POLICIES))}")
    for misses, rate, load in itertools.product((0.0, 0.3, 0.7), (1e9, 4e9, 16e9), (0.4, 0.8)):
        tokens = rate / TOKEN_BYTES
        runs = [Simulation(poisson(tokens, misses=misses, load=load), policy, tokens) for policy in POLICIES]
        cells = [run.run().means() for run in runs]
        print(f"| {misses:.0%}, {rate / 1e9:g} GB/s, {load} | {' | '.join(cells)} |", flush=True)
    print("\n| requests, volume | policy | TTFT median | mean | P99 | gap P99, ms | input tokens/s | joins | thrown |")
    print(f"|{'---|' * 9}")
    for name, rate, policy in itertools.product(("Mooncake", "agents"), (1e9, 4e9, 16e9), POLICIES):
        prompts, follow = agents() if name == "agents" else (mooncake(options.trace), None)
        found = Simulation(prompts, policy, rate / TOKEN_BYTES, follow).run()
        print(f"| {name}, {rate / 1e9:g} GB/s | {policy} | {found.details()} |", flush=True)


if __name__ == "__main__":
    main()
