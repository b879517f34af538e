# SPDX-License-Identifier: Apache-2.0
"""The few kinds of panels that the dashboards are made of, so that each is one line there: title, unit and queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH: Final = 24
AnyPanel = timeseries.Panel | stat.Panel | table.Panel
Queries = Mapping[str, str]
"""By what its series are called; ``{{label}}`` stands for the value of a label."""


def _target(name: str, expr: str, number: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(expr).legend_format(name).datasource(SOURCE)


def graph(title: str, unit: str, queries: Queries, *, about: str = "", parts: int = 2) -> timeseries.Panel:
    """Return lines over time; ``parts`` of them fill a row."""
    legend = (
        common_builders.VizLegendOptions()
        .show_legend(show_legend=True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
    )
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .min(0)
        .datasource(SOURCE)
        .span(_WIDTH // parts)
        .height(8)
        .line_width(2)
        .fill_opacity(10)
        .show_points(common.VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    for number, (name, expr) in enumerate(queries.items()):
        panel.with_target(_target(name, expr, number))
    return panel


def figure(title: str, unit: str, expr: str, *, about: str = "", decimals: int | None = None) -> stat.Panel:
    """Return one number, as of now, with its course behind it; six of them fill a row."""
    panel = (
        stat.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .datasource(SOURCE)
        .span(_WIDTH // 6)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target("", expr, 0))
    )
    return panel if decimals is None else panel.decimals(decimals)


def listing(title: str, expr: str, hidden: tuple[str, ...] = (), *, about: str = "") -> table.Panel:
    """Return a table with a row for each series and a column for each label."""
    query = _target("", expr, 0).instant().format(PromQueryFormat.TABLE)
    dropped = dict.fromkeys(("Time", "__name__", *hidden), True)
    organize = models.DataTransformerConfig(id_val="organize", options={"excludeByName": dropped})
    return (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(_WIDTH)
        .height(8)
        .with_target(query)
        .with_transformation(organize)
    )


def board(uid: str, title: str, about: str, *, since: str = "now-6h") -> dashboards.Dashboard:
    """Return an empty dashboard that lets one choose where the metrics come from."""
    return (
        dashboards.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["kvtier"])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(since, "now")
        .refresh("30s")
        .timezone("browser")
        .link(
            dashboards.DashboardLink("kvtier")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["kvtier"])
            .keep_time(keep_time=True)
            .include_vars(include_vars=True)
        )
        .with_variable(dashboards.DatasourceVariable("datasource").label("Source").type("prometheus"))
    )


def choice(name: str, label: str, query: str, *, is_many: bool = False) -> dashboards.QueryVariable:
    """Return a variable with the values that a query finds."""
    made = (
        dashboards.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    return made.multi(multi=True).include_all(include_all=True).all_value(".*") if is_many else made


def amount(name: str, label: str, default: str) -> dashboards.TextBoxVariable:
    """Return a variable that people type."""
    return dashboards.TextBoxVariable(name).label(label).default_value(default)
