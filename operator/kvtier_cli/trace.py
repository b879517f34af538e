# SPDX-License-Identifier: Apache-2.0
"""The page of ``plan --trace``: how much of recorded traffic each tier of an engine would serve, and how fast.

Every tier is simulated by itself: it holds the blocks that were used last. Requests go to the replicas in turn. Each
replica has accelerators and host memory of its own, and all share the volume.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from kvtier_cli import output, warm
from kvtier_operator.api import TierSpec
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.api.status_schema import Capacity
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.plan import chunks
from kvtier_operator.plan.decisions import kv_of
from kvtier_operator.plan.model_layout import KvUnknown, ModelLayout
from kvtier_operator.quantity import show_bytes

MOONCAKE_TOKENS: Final = 512
"""Tokens of a block in Mooncake's traces."""

BYTES_PER_TOKEN: Final = 4
"""Bytes of text that count as a token: the model's tokenizer is not at hand."""

VOLUMES: Final = (1 << 39, 1 << 40, 1 << 41, 1 << 42)
"""Sizes of volumes that every page shows, in bytes, beside the tier's own."""

RATES: Final = (1.0, 4.0, 16.0)
"""Rates of volumes that every page shows, in GB/s."""

_CURVE: Final = 24
"""Sizes of volumes in the picture."""
_MINUTE: Final = 60.0
_HOST: Final = "host memory"
_VOLUME: Final = "volume"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``plan --trace``."""

    trace: Path
    lines: Sequence[tuple[int, str]]
    """Of the trace, with their numbers. They are read once, for a trace may come through a pipe."""
    rate: tuple[float, ...]
    """GB/s of volumes; empty for a usual choice."""
    prefill_rate: float | None
    """Prompt tokens that one engine computes in a second."""
    picture: Path | None


class _Rate(click.FloatRange):
    """A finite number; ``nan`` is in every range, and ``inf`` in those without an end."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value} is no finite number", param, ctx)


def options(function: output.Function) -> output.Function:
    """Give a verb the options of a trace, which `parse_options` takes."""
    positive = _Rate(min=0, min_open=True)
    picture, file = (click.Path(exists=old, dir_okay=False, allow_dash=old, path_type=Path) for old in (False, True))
    described: list[tuple[str, dict[str, Any]]] = [
        ("--picture", {"type": picture, "help": "draw it over the volume's size, with --trace"}),
        ("--prefill-rate", {"type": positive, "help": "prompt tokens/s that one engine computes, with --trace"}),
        ("--rate", {"type": positive, "multiple": True, "help": "GB/s of the volume, with --trace (may be repeated)"}),
        ("--trace", {"type": file, "help": "show what of this traffic each tier would serve: Mooncake's or prompts"}),
    ]
    for name, words in described:
        function = click.option(name, **words)(function)
    return function


def parse_options(*, trace: Path | None, **others: Any) -> Options | None:
    """Return the options; None where no trace is given.

    Raises:
        UsageError: there is one of the others without a trace, which cannot be read, or no matplotlib for the picture.
    """
    if trace is None and any(others.values()):
        raise click.UsageError("--rate, --prefill-rate and --picture go with --trace FILE")
    if others["picture"] is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--picture needs matplotlib: pip install matplotlib")
    return None if trace is None else Options(trace=trace, lines=list(warm.lines(trace)), **others)


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    seconds: float | None
    """Time since the first request; None where the trace has no times."""
    tokens: int
    """Of its prompt."""
    blocks: tuple[Hashable, ...]
    """Names of its blocks that can be found again: whole ones, for vLLM computes the last token of each prompt."""


@dataclass(frozen=True)
class Trace:
    """Recorded requests in their order."""

    requests: Sequence[Request]
    block_tokens: int
    is_estimated: bool
    """The tokens were estimated from the length of texts."""

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(each.tokens for each in self.requests)

    @property
    def seconds(self) -> float | None:
        """Time from the first request to the last one; None where the trace has no times."""
        times = [each.seconds for each in self.requests if each.seconds is not None]
        return max(times) - min(times) if len(times) == len(self.requests) and max(times) > min(times) else None


class BlockCache:
    """As many blocks as fit. Those used longest ago are evicted first, ends of prompts before their beginnings."""

    def __init__(self, blocks: int, *, least_uses: int = 1) -> None:
        """Start empty; a block is kept from its `least_uses`-th use on."""
        self._limit = blocks
        self._least = least_uses
        self._held: OrderedDict[Hashable, None] = OrderedDict()
        self._uses = Counter[Hashable]()

    def serve(self, blocks: Sequence[Hashable]) -> int:
        """Return how many blocks from the beginning of a prompt are here, and use all of its blocks."""
        found = sum(1 for _ in itertools.takewhile(self._held.__contains__, blocks))
        if self._least > 1:
            self._uses.update(blocks)
            blocks = [each for each in blocks if self._uses[each] >= self._least]
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._limit:
            self._held.popitem(last=False)
        return found


class TierSizes(NamedTuple):
    """Sizes of a tier, as far as a simulation needs them."""

    spec: TierSpec
    capacity: Capacity
    layout: ModelLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedTier:
    """Tokens of each request that a tier had, or a tier above it, in the order of the trace."""

    name: str
    size_bytes: int | None
    """Bytes of the tier; None for one without a limit."""
    tokens: Sequence[int]


def read(file: Path, lines: Sequence[tuple[int, str]], *, block_tokens: int) -> Trace:
    """Read a trace in Mooncake's format, or prompts as ``kvtier warm`` takes them.

    Each line has one JSON value. Blocks in Mooncake's format have a size of their own.

    Raises:
        UsageError: a line is neither; the message has its number and never its text.
    """
    if not lines:
        raise click.UsageError(f"{file}: holds no request")
    if '"hash_ids"' in lines[0][1]:
        return Trace([_of_row(file, *line) for line in lines], MOONCAKE_TOKENS, is_estimated=False)
    requests = [_of_prompt(warm.parse(file, *line).body, block_tokens) for line in lines]
    return Trace(requests, block_tokens, is_estimated=True)


def _of_row(file: Path, number: int, line: str) -> Request:
    where = f"{file}: line {number}: must have "
    try:
        tokens, names, seconds = _fields(json.loads(line))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        fields = "timestamp (ms), input_length (tokens) and hash_ids (a list of numbers)"
        raise click.UsageError(f"{where}{fields} as Mooncake's traces do") from error
    if abs(len(names) - tokens / MOONCAKE_TOKENS) > 1:
        found = f"{len(names):,} in hash_ids for {tokens:,} tokens of input_length"
        raise click.UsageError(f"{where}blocks of {MOONCAKE_TOKENS} tokens as Mooncake's traces do; there are {found}")
    return Request(seconds, tokens, names[: (tokens - 1) // MOONCAKE_TOKENS])


def _fields(found: Mapping[str, Any]) -> tuple[int, tuple[Hashable, ...], float]:
    tokens, names, seconds = int(found["input_length"]), found["hash_ids"], float(found["timestamp"]) / 1000
    if tokens < 1 or not isinstance(names, list) or not math.isfinite(seconds):
        raise ValueError
    hash(tuple(names))
    return tokens, tuple(names), seconds


def _of_prompt(body: Mapping[str, Any], block_tokens: int) -> Request:
    content = body.get("messages") or body["prompt"]
    if isinstance(content, list) and all(isinstance(each, int) for each in content):
        text, width = b"".join((each % (1 << 64)).to_bytes(8, "little") for each in content), 8
    else:
        text = (content if isinstance(content, str) else json.dumps(content)).encode(errors="surrogatepass")
        width = BYTES_PER_TOKEN
    size = block_tokens * width
    # The name of a block says all that is before it, as the engine's does.
    chain = hashlib.blake2b(f"{body.get('model', '')}\0".encode(), digest_size=16)
    blocks = []
    for start in range(0, len(text) - width + 1 - size, size):
        chain.update(text[start : start + size])
        blocks.append(chain.digest())
    return Request(None, max(1, len(text) // width), tuple(blocks))


def simulate(trace: Trace, sizes: TierSizes, *, volumes: Iterable[int]) -> list[SimulatedTier]:
    """Return what each tier would serve: accelerators, host memory, volumes by size, and one without a limit."""
    spec, capacity, layout, per_block = sizes.spec, sizes.capacity, sizes.layout, trace.block_tokens
    cpu_tokens, device_tokens = capacity.cpu_tokens or 0, capacity.device_kv_tokens
    above: list[tuple[str, int | None, int]] = [(_HOST, cpu_tokens * layout.token_bytes, cpu_tokens)]
    if device_tokens is not None:
        above.insert(0, ("accelerators", capacity.device_kv_bytes, device_tokens))
    best = [0] * len(trace.requests)
    found = []
    for name, size, tokens in above:
        best = _serve(trace, [BlockCache(tokens // per_block) for _ in range(max(1, spec.replicas))], best)
        found.append(SimulatedTier(name=name, size_bytes=size, tokens=best))
    if spec.connector.uses_volume:
        for size in volumes:
            held = chunks.held_tokens(size, layout, chunk_tokens=capacity.chunk_tokens or per_block, on_disk=True)
            cache = BlockCache(held // per_block, least_uses=spec.disk.admission.min_reuse)
            got = _serve(trace, [cache], best, least=spec.disk.admission.min_tokens)
            found.append(SimulatedTier(name=_VOLUME, size_bytes=size, tokens=got))
    return [*found, SimulatedTier(name="any size", size_bytes=None, tokens=_serve(trace, [BlockCache(1 << 62)], best))]


def _serve(trace: Trace, caches: Sequence[BlockCache], above: Sequence[int], *, least: int = 0) -> list[int]:
    """Return tokens of each request that caches have, each in its turn; at least what the tiers above have."""
    served = []
    for request, cache, had in zip(trace.requests, itertools.cycle(caches), above, strict=False):
        found = cache.serve(request.blocks) * trace.block_tokens
        served.append(found if found - had >= max(1, least) else had)
    return served


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds in which a volume of some rate gives the tokens that it serves."""

    rate: float
    """GB/s."""
    tokens_per_second: float
    """That it gives: loading pays where the engine computes fewer."""
    mean_seconds: float
    """To read the tokens of a request, on average over those that read any."""
    long_seconds: float
    """The same at the 99th percentile."""
    busy: float | None
    """Share of the trace's time that the volume reads; None where the trace has no times."""
    computing_seconds: float | None = None
    """On average to compute the same tokens, where the engine's rate is given."""
    split_seconds: float | None = None
    """On average where head and tail are computed and read at once."""

    def document(self) -> dict[str, float | None]:
        """Return the figures for JSON."""
        seconds = (self.mean_seconds, self.long_seconds, self.busy, self.computing_seconds, self.split_seconds)
        rounded = (None if each is None else round(each, 3) for each in seconds)
        fields = ("meanSeconds", "p99Seconds", "busyShare", "computingSeconds", "splitSeconds")
        rate = {"rateGBs": self.rate, "tokensPerSecond": round(self.tokens_per_second)}
        return rate | dict(zip(fields, rounded, strict=True))


def paces(
    read: Sequence[int], token_bytes: int, *, seconds: float | None, rates: Iterable[float], prefill_rate: float | None
) -> list[Pace]:
    """Return what rates of a volume (GB/s) make of the tokens that requests read from it.

    An engine computes `prefill_rate` prompt tokens in a second, if that is known.
    """
    if not read:
        return []
    mean, long = statistics.fmean(read), sorted(read)[math.ceil(0.99 * len(read)) - 1]
    return [
        Pace(
            rate=rate,
            tokens_per_second=pace,
            mean_seconds=mean / pace,
            long_seconds=long / pace,
            busy=None if seconds is None else sum(read) / pace / seconds,
            computing_seconds=None if prefill_rate is None else mean / prefill_rate,
            split_seconds=None if prefill_rate is None else mean / (pace + prefill_rate),
        )
        for rate, pace in ((rate, rate * 1e9 / token_bytes) for rate in rates)
    ]


def busiest_minute(trace: Trace, read: Iterable[int]) -> float:
    """Return the tokens per second that are read in the minute that reads most."""
    minutes = Counter[int]()
    for request, tokens in zip(trace.requests, read, strict=True):
        minutes[int((request.seconds or 0.0) // _MINUTE)] += tokens
    return max(minutes.values()) / _MINUTE


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Tokens of a trace that each tier would serve."""

    file: str
    trace: Trace
    replicas: int
    tiers: Sequence[SimulatedTier]
    paces: Sequence[Pace]
    busiest: float | None
    """GB/s that its busiest minute asks of the volume; None where the trace has no times."""
    own_bytes: int | None
    """Size of the tier's own volume, whose rates are shown."""
    has_unknown_accelerators: bool
    """It is not known how many tokens they hold."""

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        trace, rows = self.trace, zip(self.tiers, self._shares(), strict=True)
        return {"trace": self.file, "requests": len(trace.requests), "promptTokens": trace.tokens} | {
            "isEstimated": trace.is_estimated,
            "seconds": trace.seconds,
            "served": [{"tier": each.name, "bytes": each.size_bytes, "share": round(of, 4)} for each, of in rows],
            "volumeBytes": self.own_bytes,
            "busiestMinuteGBs": None if self.busiest is None else round(self.busiest, 3),
            "rates": [each.document() for each in self.paces],
        }

    def page(self) -> str:
        """Return the text for people."""
        trace = self.trace
        lasts = "" if trace.seconds is None else f" in {output.duration(trace.seconds)}"
        lines = [f"{self.file}: {len(trace.requests):,} requests, {trace.tokens:,} prompt tokens{lasts}"]
        if self.replicas > 1:
            shared = "" if self.own_bytes is None else "; all share the volume"
            lines.append(f"requests go to the {self.replicas} replicas in turn{shared}")
        if trace.is_estimated:
            lines.append(f"a token is {BYTES_PER_TOKEN} bytes of text here; requests are taken in the file's order")
        if self.has_unknown_accelerators:
            lines.append("accelerators are left out; without --trace, kvtier plan says what their memory needs")
        rows = [("SERVED BY", "SIZE", "OF ALL TOKENS", "MORE THAN ABOVE IT")]
        for each, share, more in zip(self.tiers, self._shares(), self._gains(), strict=True):
            size = "" if each.size_bytes is None else show_bytes(each.size_bytes)
            rows.append((each.name, size, f"{share:.1%}", "" if more is None else f"+{more:.1%}"))
        lines += ["", output.columns(rows)]
        if self.paces and self.own_bytes is not None:
            lines.append(self._pace_page(show_bytes(self.own_bytes)))
        elif self.own_bytes is not None:
            lines.append(f"No request would read anything from a volume of {show_bytes(self.own_bytes)}.\n")
        return "\n".join(lines)

    def _pace_page(self, size: str) -> str:
        has_computing = self.paces[0].computing_seconds is not None
        more = ("COMPUTED", "BOTH AT ONCE") if has_computing else ()
        rows = [("VOLUME GIVES", "TOKENS/S", "READS", "MEAN HIT", "P99", *more)]
        for each in self.paces:
            busy = "" if each.busy is None else f"{each.busy:.0%} of the time"
            row = [f"{each.rate:g} GB/s", f"{each.tokens_per_second:,.0f}", busy]
            times = [each.mean_seconds, each.long_seconds, each.computing_seconds, each.split_seconds]
            rows.append((*row, *(f"{value:.2f} s" for value in times if value is not None)))
        asks = "" if self.busiest is None else f"; the busiest minute asks for {self.busiest:.2g} GB/s"
        pays = "" if has_computing else "Reading is quicker where one engine computes fewer tokens a second.\n"
        return f"Volume of {size}{asks}\n{output.columns(rows)}{pays}"

    def _shares(self) -> list[float]:
        return [sum(each.tokens) / self.trace.tokens for each in self.tiers]

    def _gains(self) -> list[float | None]:
        """Return what each tier serves beyond the last one that is no volume; None for the first."""
        shares, base = self._shares(), 0
        gains: list[float | None] = [None]
        for place, share in enumerate(shares[1:], 1):
            base = base if self.tiers[place - 1].name == _VOLUME else place - 1
            gains.append(share - shares[base])
        return gains


def forecast(given: Options, spec: TierSpec, capacity: Capacity) -> Forecast:
    """Read a trace, simulate the tiers, and draw the picture if one is wanted.

    Raises:
        SpecInvalid: the bytes of a token are unknown.
    """
    layout = kv_of(spec)
    if isinstance(layout, KvUnknown):
        remedy = "give the model's config.json with --config"
        raise SpecInvalid("spec.model", f"the KV bytes of a token are unknown ({layout.why}): {remedy}")
    sizes = TierSizes(spec=spec, capacity=capacity, layout=layout)
    trace = read(given.trace, given.lines, block_tokens=capacity.chunk_tokens or MOONCAKE_TOKENS)
    own = capacity.disk_bytes if spec.connector.uses_volume else None
    tiers = simulate(trace, sizes, volumes=sorted({*VOLUMES, *(() if own is None else (own,))}))
    host = next(each for each in tiers if each.name == _HOST)
    volume = next((each for each in tiers if each.name == _VOLUME and each.size_bytes == own), host)
    loaded = [got - had for got, had in zip(volume.tokens, host.tokens, strict=True)]
    loads, rates = [tokens for tokens in loaded if tokens], given.rate or RATES
    found = Forecast(
        file=str(given.trace),
        trace=trace,
        replicas=spec.replicas,
        tiers=tiers,
        paces=paces(loads, layout.token_bytes, seconds=trace.seconds, rates=rates, prefill_rate=given.prefill_rate),
        busiest=None if trace.seconds is None else busiest_minute(trace, loaded) * layout.token_bytes / 1e9,
        own_bytes=own,
        has_unknown_accelerators=spec.engine.accelerator.resource != NO_ACCELERATOR
        and capacity.device_kv_tokens is None,
    )
    if given.picture is not None:
        draw(given.picture, found, sizes)
    return found


def draw(path: Path, found: Forecast, sizes: TierSizes) -> None:
    """Draw the share of tokens that is served over the size of the volume.

    Raises:
        UsageError: the file cannot be written, or its suffix is no kind of picture.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  an option of one verb

    trace, largest = found.trace, max(each.size_bytes or 0 for each in found.tiers)
    curve = simulate(trace, sizes, volumes=[largest * step // _CURVE for step in range(1, _CURVE + 1)])
    shares = {each: 100 * sum(each.tokens) / trace.tokens for each in curve}
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    points = [(0.0, shares[next(each for each in curve if each.name == _HOST)])]
    points += [((each.size_bytes or 0) / (1 << 40), share) for each, share in shares.items() if each.name == _VOLUME]
    axes.plot(*zip(*points, strict=True), color="#1a73e8", label="with a volume of this size")
    fixed = [each for each in curve if each.name != _VOLUME]
    for each, colour in zip(fixed, ("#e8710a", "#9334e6", "#5f6368")[-len(fixed) :], strict=True):
        size = "ceiling: every block kept" if each.size_bytes is None else f"{each.name}, {show_bytes(each.size_bytes)}"
        axes.axhline(shares[each], linestyle="--", color=colour, label=size)
    axes.set(xlabel="size of the volume, TiB", ylabel="prompt tokens served, %", xlim=(0, None), ylim=(0, 100))
    axes.set_title(f"{Path(found.file).name}: what tiers serve of {trace.tokens / 1e6:,.1f} million prompt tokens")
    axes.legend()
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise click.UsageError(f"--picture {path}: {error}; name it .svg or .png") from error
    except OSError as error:
        remedy = "name a file in a folder that is there and that you may write to"
        raise click.UsageError(f"--picture {path}: cannot be written ({error.strerror}); {remedy}") from error
