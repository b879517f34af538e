# SPDX-License-Identifier: Apache-2.0
"""Every panel shows something of a real run; each alert fires when it should, and says what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import lzma
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from plain_http import is_answered
from waiting import until

from kvtier_connector.store.header import Fault
from kvtier_localcluster.ports import free_port
from kvtier_monitoring import __main__ as generator
from kvtier_monitoring.__main__ import BOARDS
from kvtier_monitoring.panels import ALERTS_PAGE, PLAIN
from kvtier_operator.api.reasons import Reason
from kvtier_operator.parts import crash_causes

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "kvtier" / "rules" / "recording.yaml"
VALUES = {"__rate_interval": "1m", "namespace": "default", "tier": "demo", "price": "2.5", "gib_price": "0.16"}
"""Of the variables, for the tier of the demo."""


def panels_of(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in dashboard["panels"] if each["type"] != "row"]


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values[found[1] or found[2]], expression)


def queries_of(panel: Mapping[str, Any]) -> list[str]:
    return [filled_in(target["expr"], VALUES) for target in panel["targets"]]


RECORDING = Path(__file__).with_name("demo.om.xz")
"""Samples of a run of the demo with more prompts, under a budget that was lowered meanwhile.

A panel about a newer metric needs them taken again. A Prometheus scrapes the pods of a tier of `make cluster` at their
addresses, with jobs and labels as the chart's PodMonitors make them. `promtool tsdb dump-openmetrics` (2.54) writes
them, and `xz -9e` packs them.
"""
STEP_SECONDS = 5

PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']} {panel['id']}")
    for name in BOARDS
    for panel in panels_of(json.loads(generator.render(name)))
]


@dataclass(frozen=True)
class Replay:
    """A Prometheus that runs, and from when to when its samples were taken, in seconds of Unix time."""

    url: str
    start: float
    end: float

    def course(self, expression: str) -> list[dict[str, Any]]:
        return self._ask("query_range", query=expression, start=self.start, end=self.end, step=STEP_SECONDS)

    def at_end(self, expression: str) -> list[dict[str, Any]]:
        return self._ask("query", query=expression, time=self.end)

    def _ask(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:
            return list(json.load(answer)["data"]["result"])


@contextlib.contextmanager
def replayed(rules: Path, folder: Path) -> Iterator[Replay]:
    """Run Prometheus with the samples, and with what these recording rules would have made of them."""
    text = lzma.decompress(RECORDING.read_bytes()).decode()
    moments = [float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")]
    start, end = min(moments), max(moments)
    (folder / "samples.om").write_text(text)
    _promtool("openmetrics", str(folder / "samples.om"), str(folder / "data"))
    with _running(folder) as url:
        limits = [f"--start={start:.0f}", f"--end={end:.0f}", f"--eval-interval={STEP_SECONDS}s"]
        _promtool("rules", *limits, f"--url={url}", f"--output-dir={folder / 'data'}", str(rules))
    with _running(folder) as url:
        yield Replay(url, start, end)


def _promtool(*arguments: str) -> None:
    command = ["promtool", "tsdb", "create-blocks-from", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or done.stdout


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[str]:
    (folder / "prometheus.yml").touch()
    port = free_port()
    command = [
        shutil.which("prometheus") or "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
        # Samples do not say that a series has ended, as a scrape of what is gone does.
        f"--query.lookback-delta={3 * STEP_SECONDS}s",
    ]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: _is_ready(f"http://127.0.0.1:{port}", process), seconds=120)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus ended: see prometheus.log"
    return is_answered(f"{url}/-/ready", seconds=5)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus (Debian: prometheus) is missing")
    with replayed(RULES, tmp_path_factory.mktemp("replay")) as replay:
        yield replay


def shows(query: str, replay: Replay, *, is_table: bool) -> bool:
    if is_table:
        return bool(replay.at_end(query))
    return any(math.isfinite(float(value)) for series in replay.course(query) for _, value in series["values"])


NEWER = ("vllm:kvtier_asked_blocks_total",)
"""Metrics that engines did not have yet when the samples were recorded."""


@pytest.mark.parametrize("panel", PANELS)
def test_no_query_of_a_panel_is_empty(panel: dict[str, Any], replay: Replay) -> None:
    is_table = panel["type"] == "table"
    queries = [query for query in queries_of(panel) if not any(name in query for name in NEWER)]
    assert [query for query in queries if not shows(query, replay, is_table=is_table)] == []


def test_hits_of_each_kind_and_evictions_were_recorded_without_newer_metrics(replay: Replay) -> None:
    assert [name for name in NEWER if replay.at_end(f"count({name})")] == []

    def total(expression: str) -> float:
        return sum(float(series["value"][1]) for series in replay.at_end(expression))

    for found in ("disk", "memory", "nothing"):
        assert total(f'vllm:kvtier_first_tokens_total{{tier="demo", found="{found}"}}') > 0, found
    assert total('kvtier_janitor_evicted_blocks_total{tier="demo", reason="budget"}') > 0
    assert total('vllm:kvtier_disk_read_bytes_total{namespace="default", tier="demo"}') > 0
    assert total('count by (pod) (up{job=~"podMonitor/.*"}) == 1') == 3, "two engines and a janitor, each scraped once"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing")
@pytest.mark.parametrize("name", BOARDS)
def test_prometheus_understands_every_query_of_a_dashboard(name: str, tmp_path: Path) -> None:
    dashboard = json.loads(generator.render(name))
    asked = [query for panel in panels_of(dashboard) for query in queries_of(panel)]
    asked += [filled_in(each["expr"], VALUES) for each in dashboard["annotations"]["list"]]
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


DECLARED = frozenset(
    re.findall(
        r"`((?:vllm:)?kvtier_\w+)`",
        (ROOT / "connector/METRICS.md").read_text() + (ROOT / "docs/operator-metrics.md").read_text(),
    )
)
RECORDED = frozenset(re.findall(r"- record: (\S+)", RULES.read_text()))


VLLM = importlib.util.find_spec("vllm")
SERVED_BY_VLLM = frozenset(
    name
    for folder in (VLLM and VLLM.submodule_search_locations) or ()
    for file in ("v1/metrics/loggers.py", "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py")
    for name in re.findall(r'"(vllm:\w+)"', Path(folder, file).read_text())
)
RULE_QUERIES = [
    rule["expr"]
    for file in sorted(RULES.parent.glob("*.yaml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize(
    "queries", [*(pytest.param(queries_of(each.values[0]), id=each.id) for each in PANELS), RULE_QUERIES]
)
def test_panels_and_rules_ask_only_for_what_is_served_or_recorded(queries: list[str]) -> None:
    for query in queries:
        asked = set(re.findall(r"(?:vllm:|\bkvtier_)\w+", re.sub(r"kvtier:[\w:]+", "", query)))
        ours = {name for name in asked if "kvtier_" in name}
        assert ours <= DECLARED, ours - DECLARED
        theirs = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked - ours}
        assert theirs <= SERVED_BY_VLLM, theirs - SERVED_BY_VLLM
        assert set(re.findall(r"kvtier:[\w:]+", re.sub(r"vllm:\w+", "", query))) <= RECORDED


@pytest.mark.parametrize("name", BOARDS)
def test_panels_of_a_dashboard_do_not_overlap(name: str) -> None:
    dashboard = json.loads(generator.render(name))
    assert dashboard["uid"] == f"kvtier-{name}"
    places = [panel["gridPos"] for panel in panels_of(dashboard)]
    cells = [{(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])} for p in places]
    assert all(not one & other for one, other in combinations(cells, 2))
    assert all(place["x"] + place["w"] <= 24 for place in places)
    identifiers = [panel["id"] for panel in panels_of(dashboard)]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("panel", PANELS)
def test_each_axis_has_a_unit_or_says_what_it_counts_and_each_link_leads_to_an_alert(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] == "timeseries":
        assert defaults["unit"] != PLAIN or defaults["custom"]["axisLabel"]
    page = (ROOT / "docs" / "troubleshooting.md").read_text().lower()
    for link in panel.get("links", ()):
        address, _, anchor = link["url"].partition("#")
        assert address == ALERTS_PAGE
        assert f"\n### {anchor}\n" in page


@pytest.mark.parametrize("name", BOARDS)
def test_alerts_and_rollouts_of_its_tiers_are_marked_on_a_dashboard(name: str) -> None:
    marks = {each["name"]: each["expr"] for each in json.loads(generator.render(name))["annotations"]["list"]}
    assert marks.keys() == {"Alerts", "Rollouts"}
    for expr in marks.values():
        assert ('namespace="$namespace", tier="$tier"' in expr) is (name != "fleet")


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_that_a_query_names_is_one_of_its_dashboard(name: str) -> None:
    dashboard = json.loads(generator.render(name))
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            filled_in(target["expr"], dict.fromkeys({"__rate_interval", *known}, "x"))


RULE_FILES = ROOT / "charts" / "kvtier" / "rules"
ALERTS = [
    rule for group in yaml.safe_load((RULE_FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
TESTS = ("alerts.yaml", "alerts_of_days.yaml")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing")


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=folder, check=False, capture_output=True, text=True)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Copy the rules; alerts keep their summary alone, which the cases of promtool repeat word for word."""
    for path in RULE_FILES.glob("*.yaml"):
        copied = yaml.safe_load(path.read_text())
        for rule in (rule for group in copied["groups"] for rule in group["rules"] if "alert" in rule):
            rule["annotations"] = {"summary": rule["annotations"]["summary"]}
        (tmp_path / path.name).write_text(yaml.safe_dump(copied, width=10_000))
    return tmp_path


@needs_promtool
@pytest.mark.parametrize("tests", TESTS)
def test_alerts_fire_when_they_should_and_not_otherwise(tests: str, rules: Path) -> None:
    shutil.copy(Path(__file__).with_name(tests), rules / "tests.yaml")
    done = promtool("test", "rules", "tests.yaml", folder=rules)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@needs_promtool
def test_no_rule_is_doubtful_to_promtool() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml", "recording.yaml", folder=RULE_FILES)
    assert done.returncode == 0, done.stdout + done.stderr


def fired(name: str) -> list[dict[str, str]]:
    """Return the labels of an alert where a case of promtool sees it fire."""
    tests = [test for file in TESTS for test in yaml.safe_load(Path(__file__).with_name(file).read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", ()) if case["alertname"] == name]
    return [alert["exp_labels"] for case in cases for alert in case.get("exp_alerts", ())]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']} {rule['labels']['severity']}")
def test_each_alert_says_how_bad_it_is_whom_it_hurts_and_what_to_paste(rule: dict[str, Any]) -> None:
    name, annotations = rule["alert"], rule["annotations"]
    labels = [each for each in fired(name) if each["severity"] == rule["labels"]["severity"]]
    assert labels, "no test sees it fire"
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert annotations["impact"]
    for command in annotations["action"].splitlines():
        assert command.startswith("kubectl ")
        assert set(re.findall(r"\$labels\.(\w+)", command)) <= labels[0].keys()
        assert "--yes" not in command, "what cannot be undone is for the page, not for a pager"
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = re.search(rf"^### {name}\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, "docs/troubleshooting.md has no section for it"
    assert all(word in section[1] for word in ("**Means**", "**Look**", "**Do**"))


def test_the_page_begins_with_the_safe_move_and_has_no_section_for_an_alert_that_is_gone() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert page.index("kubectl kvtier mode NAME Bypass -n NAMESPACE") < page.index("## Symptoms")
    sections = re.findall(r"^### (KVTier\w+)$", page, re.MULTILINE)
    assert sections == list(dict.fromkeys(rule["alert"] for rule in ALERTS))


def causes_of(alert: str, label: str) -> set[str]:
    found = " ".join(rule["expr"] for rule in ALERTS if rule["alert"] == alert)
    (choice,) = set(re.findall(rf'{label}=~"([^"]*)"', found))
    return set(choice.split("|"))


def test_each_known_cause_of_an_end_and_all_damage_raise_their_alert() -> None:
    passing = {Reason.HUB_UNREACHABLE, Reason.STALE_SHM}
    known = {reason.value for reason in crash_causes.LASTING | passing}
    # Which engines end again and again for want of a device, too, but have an alert of its own: it names the remedy.
    assert known - causes_of("KVTierCrashLoop", "reason") == {Reason.DEVICE_MISSING.value}
    assert causes_of("KVTierDamagedBlocks", "cause") == {fault.value for fault in Fault if fault.is_damage}
