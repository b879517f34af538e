# SPDX-License-Identifier: Apache-2.0
"""Every panel shows something of a real run, which a real Prometheus scraped as the chart's monitors say."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_monitoring import __main__ as generator
from kvtier_monitoring.boards import BOARDS
from kvtier_monitoring.panels import ALERTS_PAGE, PLAIN
from kvtier_monitoring.pictures import RECORDING, RULES
from kvtier_monitoring.prometheus import Prometheus, Span, replayed
from kvtier_monitoring.queries import VALUES, Query, filled_in, panels_of, queries_of

PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']} {panel['id']}")
    for name in BOARDS
    for panel in panels_of(json.loads(generator.render(name)))
]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Span]]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus (Debian: prometheus) is missing")
    if not RECORDING.exists():
        pytest.skip(f"there is no {RECORDING.name}: `make dashboards` records it")
    with replayed(RECORDING, RULES, tmp_path_factory.mktemp("replay")) as replay:
        yield replay


def shows(query: Query, prometheus: Prometheus, span: Span) -> bool:
    if query.is_table:
        return bool(prometheus.now(query.expression, span.end))
    values = [value for series in prometheus.course(query.expression, span) for _, value in series["values"]]
    return any(math.isfinite(float(value)) for value in values)


@pytest.mark.parametrize("panel", PANELS)
def test_no_query_of_a_panel_is_empty(panel: dict[str, Any], replay: tuple[Prometheus, Span]) -> None:
    empty = [query for query in queries_of(panel, VALUES) if not shows(query, *replay)]
    assert empty == []


def test_hits_of_each_kind_and_evictions_were_recorded(replay: tuple[Prometheus, Span]) -> None:
    prometheus, span = replay

    def total(expression: str) -> float:
        return sum(float(series["value"][1]) for series in prometheus.now(expression, span.end))

    for found in ("disk", "memory", "nothing"):
        assert total(f'vllm:kvtier_first_tokens_total{{tier="demo", found="{found}"}}') > 0, found
    assert total('kvtier_janitor_evicted_blocks_total{tier="demo", reason="budget"}') > 0
    assert total('vllm:kvtier_disk_read_bytes_total{namespace="default", tier="demo"}') > 0
    assert total('count by (pod) (up{job=~"podMonitor/.*"}) == 1') == 3, "two engines and a janitor, each scraped once"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing")
@pytest.mark.parametrize("name", BOARDS)
def test_prometheus_understands_every_query_of_a_dashboard(name: str, tmp_path: Path) -> None:
    dashboard = json.loads(generator.render(name))
    asked = [query.expression for panel in panels_of(dashboard) for query in queries_of(panel, VALUES)]
    asked += [filled_in(each["expr"], VALUES) for each in dashboard["annotations"]["list"]]
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


DECLARED = frozenset(
    re.findall(
        r"`((?:vllm:)?kvtier_\w+)`",
        (generator.DASHBOARDS.parents[2] / "connector/METRICS.md").read_text()
        + (generator.DASHBOARDS.parents[2] / "docs/operator-metrics.md").read_text(),
    )
)
RECORDED = frozenset(re.findall(r"- record: (\S+)", RULES.read_text()))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_only_for_what_is_served_or_recorded(panel: dict[str, Any]) -> None:
    for query in queries_of(panel, VALUES):
        asked = set(re.findall(r"(?:vllm:)?kvtier_\w+", re.sub(r"kvtier:[\w:]+", "", query.expression)))
        assert asked <= DECLARED, asked - DECLARED
        assert set(re.findall(r"kvtier:[\w:]+", re.sub(r"vllm:\w+", "", query.expression))) <= RECORDED


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
    page = (generator.DASHBOARDS.parents[2] / "docs" / "troubleshooting.md").read_text().lower()
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
            filled_in(target["expr"], dict.fromkeys(known, "x"))
