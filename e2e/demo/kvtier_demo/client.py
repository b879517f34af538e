# SPDX-License-Identifier: Apache-2.0
"""Ask an engine through its OpenAI API and measure what the answer says about the cache."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

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
        before = self._counters()
        started = time.perf_counter()
        first = 0.0
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        with self._open("/v1/completions", json.dumps(body).encode()) as response:
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
        after = self._counters()
        return Answer(
            seconds_to_first_token=first - started,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            sources={source: int(after[source] - before[source]) for source in SOURCES},
            disk_bytes=after[DISK_BYTES] - before[DISK_BYTES],
            token_ids=tuple(token_ids),
        )

    def forget_first_tier(self) -> None:
        """Empty the engine's own prefix cache; host memory and the volume keep theirs."""
        with self._open("/reset_prefix_cache", b""):
            pass

    def _counters(self) -> Mapping[str, float]:
        """Return the bytes that were read from the volume, and the cached tokens of each source."""
        with self._open("/metrics", None) as response:
            families = text_string_to_metric_families(response.read().decode())
        found: defaultdict[str, float] = defaultdict(float)
        for sample in (sample for family in families for sample in family.samples):
            if sample.name in {DISK_BYTES, CACHED_BY_SOURCE}:
                found[sample.labels.get("source", sample.name)] += sample.value
        return found

    def _open(self, path: str, data: bytes | None) -> HTTPResponse:
        request = urllib.request.Request(  # noqa: S310 - always http to a pod of ours
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        response: HTTPResponse = urllib.request.urlopen(request, timeout=120)  # noqa: S310 - as above
        return response
