# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus on this machine: scraping, or answering from samples that were recorded before."""

from __future__ import annotations

import contextlib
import json
import lzma
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvtier_localcluster.ports import free_port

_START_SECONDS = 120.0
STEP_SECONDS = 5


class QueryFailed(Exception):
    """Prometheus refuses a query; the message is its own."""


@dataclass(frozen=True)
class Span:
    """From when to when samples were taken, in seconds of Unix time."""

    start: float
    end: float


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def ask(self, path: str, **parameters: Any) -> Any:
        """Return the data of an answer.

        Raises:
            QueryFailed: it says no.
        """
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:  # noqa: S310 - ours
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refusal:
            raise QueryFailed(json.load(refusal).get("error", str(refusal))) from refusal

    def course(self, expression: str, span: Span) -> list[dict[str, Any]]:
        """Return the series of a query over time."""
        found = self.ask("query_range", query=expression, start=span.start, end=span.end, step=STEP_SECONDS)
        series: list[dict[str, Any]] = found["result"]
        return series

    def now(self, expression: str, at: float) -> list[dict[str, Any]]:
        """Return the series of a query at one time."""
        series: list[dict[str, Any]] = self.ask("query", query=expression, time=at)["result"]
        return series


@contextlib.contextmanager
def running(folder: Path, config: Mapping[str, Any] | None = None, *options: str) -> Iterator[Prometheus]:
    """Start Prometheus on ``folder``, which keeps its samples, and end it on the way out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config or {})))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
        *options,
    ]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus does not start: see {folder}/prometheus.log")
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:  # noqa: S310 - ours
            return bool(answer.status == 200)  # noqa: PLR2004 - the status itself
    except OSError:
        return False


def export(prometheus: Prometheus, span: Span, file: Path) -> int:
    """Write every raw sample of ours and of vLLM into a file that `promtool` reads, and return how many there are."""
    seconds = round(span.end - span.start) + 1
    count = 0
    with lzma.open(file, "wt", preset=9) as out:
        for name in sorted(prometheus.ask("label/__name__/values")):
            if not name.startswith(("vllm:", "kvtier_", "process_resident", "up")) or name.endswith("_created"):
                continue
            for series in prometheus.now(f"{name}[{seconds}s]", span.end):
                labels = {key: value for key, value in series["metric"].items() if key != "__name__"}
                text = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(labels.items()))
                for moment, value in series["values"]:
                    out.write(f"{name}{{{text}}} {value} {moment}\n")
                    count += 1
        out.write("# EOF\n")
    return count


def span_of(recording: Path) -> Span:
    """Return when a recording begins and ends."""
    with lzma.open(recording, "rt") as lines:
        moments = [float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")]
    return Span(min(moments), max(moments))


@contextlib.contextmanager
def replayed(recording: Path, rules: Path, folder: Path) -> Iterator[tuple[Prometheus, Span]]:
    """Run Prometheus with recorded samples, and with what these recording rules would have made of them."""
    span = span_of(recording)
    samples = folder / "samples.om"
    with lzma.open(recording, "rb") as packed, samples.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    _promtool("tsdb", "create-blocks-from", "openmetrics", str(samples), str(folder / "data"))
    # Exported samples do not say that a series has ended, as a scrape of what is gone does.
    lookback = f"--query.lookback-delta={3 * STEP_SECONDS}s"
    with running(folder, None, lookback) as prometheus:
        limits = [f"--start={span.start:.0f}", f"--end={span.end:.0f}", f"--eval-interval={STEP_SECONDS}s"]
        where = [f"--url={prometheus.url}", f"--output-dir={folder / 'data'}", str(rules)]
        _promtool("tsdb", "create-blocks-from", "rules", *limits, *where)
    with running(folder, None, lookback) as prometheus:
        yield prometheus, span


def _promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"promtool {' '.join(arguments[:3])}: {done.stderr.strip() or done.stdout.strip()}")
