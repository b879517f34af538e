# SPDX-License-Identifier: Apache-2.0
"""Ask an engine through its OpenAI API and measure what the answer says about the cache."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse

DISK_BYTES = "vllm:kvtier_disk_read_bytes_total"
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
SOURCES = ("device", "host", "disk")
"""vLLM's own names for where cached prompt tokens came from."""


@dataclass(frozen=True)
class Answer:
    """One greedy completion."""

    seconds_to_first_token: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was not computed, whichever tier they came from."""
    sources: Mapping[str, int]
    """The same tokens by where vLLM says they came from, see `SOURCES`."""
    disk_bytes: float
    """Bytes that the shared-volume tier read into host memory for it."""
    token_ids: tuple[int, ...]


class Engine:
    """The OpenAI API and metrics of one vLLM pod."""

    def __init__(self, name: str, url: str) -> None:
        """Remember where the pod listens, for example ``http://127.1.0.2:8000``."""
        self.name = name
        self.url = url.rstrip("/")

    def ask(self, model: str, prompt: str, *, max_tokens: int = 8) -> Answer:
        """Stream a completion; the time to first token is measured from the send to the first token's arrival."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        before, sources_before = self.metric(DISK_BYTES), self._sources()
        started = time.perf_counter()
        first = 0.0
        token_ids: list[int] = []
        usage: dict[str, object] = {}
        with self._open("/v1/completions", json.dumps(body).encode(), timeout=120) as response:
            for line in response:
                event = line.decode().removeprefix("data: ").strip()
                if not event or event == "[DONE]":
                    continue
                part = json.loads(event)
                for choice in part.get("choices", ()):
                    if choice.get("token_ids"):
                        first = first or time.perf_counter()
                        token_ids += choice["token_ids"]
                usage = part.get("usage") or usage
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        after, sources_after = self.metric(DISK_BYTES), self._sources()
        return Answer(
            seconds_to_first_token=first - started,
            prompt_tokens=int(str(usage.get("prompt_tokens", 0))),
            cached_tokens=int(cached or 0),
            sources={source: sources_after[source] - sources_before[source] for source in SOURCES},
            disk_bytes=after - before,
            token_ids=tuple(token_ids),
        )

    def forget_first_tier(self) -> None:
        """Empty the engine's own prefix cache; host memory and the volume keep theirs."""
        with self._open("/reset_prefix_cache", b"", timeout=30):
            pass

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry all the given labels; 0 when there is none yet."""
        with self._open("/metrics", None, timeout=30) as response:
            text = response.read().decode()
        return sum(value for found, value in _samples(text, name) if labels.items() <= found.items())

    def _sources(self) -> dict[str, int]:
        return {source: int(self.metric(CACHED_BY_SOURCE, source=source)) for source in SOURCES}

    def _open(self, path: str, data: bytes | None, *, timeout: float) -> HTTPResponse:
        request = urllib.request.Request(  # noqa: S310 - always http to a pod of ours
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310 - as above
        return response


def _samples(text: str, name: str) -> list[tuple[Mapping[str, str], float]]:
    samples: list[tuple[Mapping[str, str], float]] = []
    for line in text.splitlines():
        if match := re.fullmatch(re.escape(name) + r"(?:\{(.*)\})? (\S+)", line):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[1] or ""))
            samples.append((labels, float(match[2])))
    return samples
