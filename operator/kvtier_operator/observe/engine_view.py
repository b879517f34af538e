# SPDX-License-Identifier: Apache-2.0
"""Metrics of engines as people ask for them: sources of prompt tokens, and a look into one engine. Pure.

Counters run since the start of an engine. Numbers of several engine cores in one pod are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvtier_operator.api.generations_spec import COMPARED
from kvtier_operator.observe.pod_reports import samples, why_unsupported
from kvtier_operator.quantity import show_bytes

Document = dict[str, Any]
SOURCES: Final = {"device": "GPU", "host": "CPU", "disk": "disk", "p2p": "peers"}
"""vLLM's names for the sources of cached tokens, and those of the pages."""
_PROMPT: Final = "vllm:prompt_tokens_total"
_CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"
_SAVED: Final = "vllm:kvtier_disk_saved_seconds_total"
_COMPUTE_RATE: Final = "vllm:kvtier_disk_compute_tokens_per_second"
_LOAD_RATE: Final = "vllm:kvtier_disk_load_tokens_per_second"
_MODES: Final = dict(enumerate(("ReadWrite", "ReadOnly", "Bypass")))
_BREAKER: Final = dict(enumerate(("let through", "on trial", "not let through")))
_MOST_CAUSES: Final = 6


def hits(expositions: Sequence[str]) -> Document:
    """Return the sums of the engines' counters of prompt tokens since their start; empty without an exposition."""
    if not expositions:
        return {}
    values: defaultdict[str, list[float]] = defaultdict(list)
    cached: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in (sample for text in expositions for sample in samples(text)):
        values[name].append(value)
        if name == _CACHED:
            cached[labels.get("source", "")] += value
    return {
        "promptTokens": round(sum(values[_PROMPT])),
        "bySource": {source: round(count) for source, count in cached.items() if count},
        "computeTokensPerSecond": _mean_rate(values[_COMPUTE_RATE]),
        "loadTokensPerSecond": _mean_rate(values[_LOAD_RATE]),
        "prefillSecondsNotSpent": round(sum(values[_SAVED], 0.0), 1),
    }


def _mean_rate(rates: Sequence[float]) -> float:
    known = [rate for rate in rates if rate > 0]
    return round(sum(known) / len(known), 1) if known else 0.0


def shares(found: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Return the sources of prompt tokens with their tokens and share, the computed ones last; see `hits`."""
    prompt, by_source = found["promptTokens"], found["bySource"]
    rows = [
        (name, by_source.get(source, 0)) for source, name in SOURCES.items() if source != "p2p" or by_source.get(source)
    ]
    rows.append(("computed", max(0, prompt - sum(by_source.values()))))
    return [(name, count, f"{count / prompt:.1%}" if prompt else "") for name, count in rows]


def look(text: str) -> Document:
    """Return what the metrics of one engine say."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    labelled: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    release = {"version": "", "support": ""}
    for name, labels, value in samples(text):
        short = name.removeprefix("vllm:kvtier_").removeprefix("vllm:").removesuffix("_total")
        values[short].append(value)
        if short == "vllm_release":
            release = {field: labels.get(field, "") for field in release}
        for label in ("cause", "verdict", "field"):
            if value and label in labels:
                labelled[short][labels[label]] += value

    def total(name: str) -> int:
        return round(sum(values[name]))

    def counts(name: str) -> dict[str, int]:
        return {key: round(value) for key, value in sorted(labelled[name].items(), key=lambda each: -each[1])}

    def share(name: str) -> float | None:
        return sum(values[name]) / len(values[name]) if values[name] else None

    def rate(moved: str, way: str) -> int:
        seconds = sum(values[f"disk_{way}_seconds"])
        return round(sum(values[f"disk_{moved}_bytes"]) / seconds) if seconds else 0

    return {
        "vllm": release,
        "volume": {
            "isUsed": bool(values["disk_active"]) and min(values["disk_active"]) > 0,
            "isKnown": bool(values["disk_active"]),
            "isCompared": max(values["disk_release"], default=0) == COMPARED,
            "mode": _MODES.get(round(max(values["disk_mode"], default=0)), "unknown"),
            "refused": list(counts("disk_refused")),
            "isKeyMissing": total("disk_key_missing") > 0,
            "processes": total("disk_io_processes"),
            "stuckProcesses": total("disk_stuck_threads"),
            "loads": _BREAKER.get(round(max(values["disk_load_breaker"], default=0)), "unknown"),
            "stores": _BREAKER.get(round(max(values["disk_store_breaker"], default=0)), "unknown"),
        },
        "requests": {
            "running": total("num_requests_running"),
            "waiting": total("num_requests_waiting"),
            "waitingForVolume": total("disk_waiting_requests"),
        },
        "use": {"gpu": share("kv_cache_usage_perc"), "cpu": share("kv_offload_cpu_cache_usage_perc")},
        "blocks": {
            **{name: total(f"disk_{name}_blocks") for name in ("read", "written", "present")},
            "bytes": round(max(values["chunk_bytes"], default=0)),
            "tokenBytes": round(max(values["token_bytes"], default=0)),
        },
        "hits": hits([text]),
        "verdicts": counts("disk_verdicts"),
        "splits": {"joined": total("disk_split_joins"), **counts("disk_split_tokens")},
        "queue": {
            "jobs": total("disk_queued_jobs"),
            "loadBytes": total("disk_queued_load_bytes"),
            "storeBytes": total("disk_queued_store_bytes"),
            "oldestSeconds": round(max(values["disk_oldest_job_seconds"], default=0.0), 1),
        },
        "rates": {"readBytesPerSecond": rate("read", "read"), "writeBytesPerSecond": rate("written", "write")},
        "misses": counts("disk_misses"),
        "notStored": counts("disk_shed_stores"),
    }


def describe(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what an engine is doing, in plain words: a name, and a sentence's worth; see `look`."""
    yield "vLLM", f"{found['vllm']['version'] or 'unknown'} {found['vllm']['support']}".strip()
    yield "volume", _volume(found["volume"], why_unsupported(found["vllm"]))
    requests, use, blocks = found["requests"], found["use"], found["blocks"]
    held_up = f"{requests['waitingForVolume']} of them for room to be loaded"
    yield "requests", f"{requests['running']} running, {requests['waiting']} waiting, {held_up}"
    for name, field in (("GPU", "gpu"), ("CPU tier", "cpu")):
        if use[field] is not None:
            yield name, f"{use[field]:.0%} of its KV in use"
    sizes = f"; one has {show_bytes(blocks['bytes'])}, a token {show_bytes(blocks['tokenBytes'])}"
    size = sizes if blocks["bytes"] else ""
    yield "blocks", f"{blocks['read']} read, {blocks['written']} written, {blocks['present']} were there already{size}"
    tokens = ", ".join(f"{share} {name}" for name, _, share in shares(found["hits"]) if share)
    yield "prompts", f"{found['hits']['promptTokens']:,} tokens{': ' if tokens else ''}{tokens}"
    yield "hits", _listed(found["verdicts"]) or "none on the volume"
    if found["verdicts"].get("split"):
        words = _listed({name: count for name, count in found["splits"].items() if name != "joined"})
        yield "splits", f"{found['splits']['joined']} met their tail; tokens {words}"
    queue, rates, hit = found["queue"], found["rates"], found["hits"]
    waiting = f"{show_bytes(queue['loadBytes'])} to load, {show_bytes(queue['storeBytes'])} to store"
    yield "queue", f"{queue['jobs']} jobs: {waiting}; the oldest waits {queue['oldestSeconds']:g} s"
    measured = [
        f"{verb} {show_bytes(rates[f'{field}BytesPerSecond'])}/s in a process"
        for verb, field in (("reading", "read"), ("writing", "write"))
        if rates[f"{field}BytesPerSecond"]
    ]
    measured += [
        f"{verb} {hit[f'{field}TokensPerSecond']:,.0f} tokens/s"
        for verb, field in (("loading", "load"), ("computing", "compute"))
        if hit[f"{field}TokensPerSecond"]
    ]
    yield "measured", ", ".join(measured) or "nothing yet"
    for name, field in (("not loaded", "misses"), ("not stored", "notStored")):
        if found[field]:
            yield name, f"{_listed(found[field])} (blocks, by cause)"


def is_without_volume(found: Mapping[str, Any]) -> bool:
    """Say whether an engine of kvtier's serves without the volume although it may use it; see `look`."""
    volume = found["volume"]
    may_use = (volume["isKnown"] or volume["refused"]) and volume["mode"] != "Bypass" and not volume["isCompared"]
    return bool((may_use and not volume["isUsed"]) or why_unsupported(found["vllm"]))


def _volume(volume: Mapping[str, Any], unsupported: str) -> str:
    if not (volume["isKnown"] or volume["refused"]):
        none = "this engine reports none: it has another connector, or no metrics of kvtier yet"
        return f"not used: {unsupported}" if unsupported else none
    if not volume["isUsed"]:
        why = f"the directory has another {', '.join(volume['refused'])}" if volume["refused"] else "see its log"
        why = "it compares the blocks of another release first" if volume["isCompared"] else why
        return f"not used, mode {volume['mode']}" + ("" if volume["mode"] == "Bypass" else f": {why}")
    words = [f"used, mode {volume['mode']}, {volume['processes']} processes"]
    words += [f"{volume['stuckProcesses']} of them held up"] if volume["stuckProcesses"] else []
    words += ["no key to encrypt with"] if volume["isKeyMissing"] else []
    words += [f"{what} are {volume[what]}" for what in ("loads", "stores") if volume[what] != _BREAKER[0]]
    return ", ".join(words)


def _listed(counts: Mapping[str, int]) -> str:
    shown = [f"{count:,} {name}" for name, count in list(counts.items())[:_MOST_CAUSES]]
    return ", ".join(shown) + (" …" if len(counts) > _MOST_CAUSES else "")
