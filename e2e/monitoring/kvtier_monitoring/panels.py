# SPDX-License-Identifier: Apache-2.0
"""The few kinds of panels that the dashboards consist of: a dashboard lists titles, units, limits and queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog import builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
ALERTS_PAGE: Final = "https://github.com/kvtier/kvtier/blob/main/docs/troubleshooting.md"
"""Panels link to sections of this page. The chart replaces the address by its value `metrics.rules.runbookUrl`."""
PLAIN: Final = "short"
"""Unit of plain numbers; a graph with it names its axis."""
_WIDTH: Final = 24
_STATUS_COLORS: Final = {"True": "green", "False": "red", "Unknown": "yellow"}
AnyPanel = timeseries.Panel | stat.Panel | table.Panel
Queries = Mapping[str, str]
"""Queries by the name of their series; ``{{label}}`` in a name stands for the value of a label."""


@dataclass(frozen=True)
class Limits:
    """Values at which a panel turns yellow and red; if `yellow` is above `red`, low values are bad."""

    red: float
    yellow: float | None = None

    def steps(self) -> list[models.Threshold]:
        """Return the colours from low values to high ones."""
        if self.yellow is not None and self.yellow > self.red:
            marks = [(None, "red"), (self.red, "yellow"), (self.yellow, "green")]
        else:
            marks = [(None, "green"), (self.yellow, "yellow"), (self.red, "red")]
        return [
            models.Threshold(value, color) for at, (value, color) in enumerate(marks) if not at or value is not None
        ]


def _thresholds(limits: Limits | None) -> dashboards.ThresholdsConfig:
    steps = [models.Threshold(None, "green")] if limits is None else limits.steps()
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _links(alert: str) -> list[builder.Builder[models.DashboardLink]]:
    if not alert:
        return []
    return [
        dashboards.DashboardLink(f"{alert}: remedies")
        .url(f"{ALERTS_PAGE}#{alert.lower()}")
        .target_blank(target_blank=True)
    ]


def _target(name: str, expr: str, number: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(expr).legend_format(name).datasource(SOURCE)


def graph(  # noqa: PLR0913 - keywords
    title: str,
    unit: str,
    queries: Queries,
    *,
    axis: str = "",
    about: str = "",
    parts: int = 2,
    limits: Limits | None = None,
    alert: str = "",
) -> timeseries.Panel:
    """Return lines over time.

    Args:
        title: of the panel.
        unit: Grafana's name of the unit.
        queries: the series.
        axis: what the axis counts, required with `PLAIN`.
        about: description.
        parts: panels that fill a row.
        limits: drawn as dashed lines.
        alert: whose section of the page the panel links to.
    """
    assert axis or unit != PLAIN, title
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
        .axis_label(axis)
        .min(0)
        .datasource(SOURCE)
        .span(_WIDTH // parts)
        .height(8)
        .line_width(2)
        .fill_opacity(10)
        .show_points(common.VisibilityMode.NEVER)
        .thresholds(_thresholds(limits))
        .links(_links(alert))
        .legend(legend)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if limits is not None:
        dashed = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(dashed)
    for number, (name, expr) in enumerate(queries.items()):
        panel.with_target(_target(name, expr, number))
    return panel


def figure(  # noqa: PLR0913 - keywords
    title: str,
    unit: str,
    expr: str,
    *,
    about: str = "",
    decimals: int | None = None,
    limits: Limits | None = None,
    alert: str = "",
) -> stat.Panel:
    """Return the latest value, with its history behind it; six of them fill a row."""
    panel = (
        stat.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .datasource(SOURCE)
        .span(_WIDTH // 6)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .thresholds(_thresholds(limits))
        .links(_links(alert))
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target("", expr, 0))
    )
    return panel if decimals is None else panel.decimals(decimals)


def listing(title: str, expr: str, hidden: tuple[str, ...] = (), *, about: str = "") -> table.Panel:
    """Return a table with a row for each series and a column for each label; the column ``status`` has colours."""
    query = _target("", expr, 0).instant().format(PromQueryFormat.TABLE)
    dropped = dict.fromkeys(("Time", "__name__", *hidden), True)
    organize = models.DataTransformerConfig(id_val="organize", options={"excludeByName": dropped})
    colors = {status: {"color": color, "index": at} for at, (status, color) in enumerate(_STATUS_COLORS.items())}
    return (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(_WIDTH)
        .height(8)
        .override_by_name(
            "status",
            [
                models.DynamicConfigValue("mappings", [{"type": "value", "options": colors}]),
                models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
            ],
        )
        .with_target(query)
        .with_transformation(organize)
    )


class _Marks(models.AnnotationQuery):
    """Marks on the time axis of every panel, with a title that the SDK leaves out."""

    def __init__(self, name: str, expr: str, *, title: str, color: str) -> None:
        super().__init__(name=name, expr=expr, datasource=SOURCE, enable=True, icon_color=color)
        self._title = title

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "titleFormat": self._title, "step": "60s"}


class _Marked(builder.Builder[models.AnnotationQuery]):
    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def build(self) -> models.AnnotationQuery:
        return self._marks


def board(uid: str, title: str, about: str, *, where: str) -> dashboards.Dashboard:
    """Return an empty dashboard with a choice of data source, and marks for alerts and rollouts.

    Args:
        uid: of the dashboard.
        title: shown above it.
        about: description.
        where: label matchers of the tiers whose alerts and rollouts are marked; empty for all.
    """
    comma = ", " if where else ""
    alerts = f'ALERTS{{alertname=~"KVTier.*", alertstate="firing"{comma}{where}}}'
    rollouts = (
        f'max by (namespace, tier) (kvtier_tier_condition{{condition="Reconciling", status="True"{comma}{where}}}) == 1'
    )
    return (
        dashboards.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["kvtier"])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .annotation(_Marked(_Marks("Alerts", alerts, title="{{alertname}} {{namespace}}/{{tier}}", color="red")))
        .annotation(_Marked(_Marks("Rollouts", rollouts, title="rollout of {{namespace}}/{{tier}}", color="blue")))
        .link(
            dashboards.DashboardLink("kvtier")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["kvtier"])
            .keep_time(keep_time=True)
            .include_vars(include_vars=True)
        )
        .link(
            dashboards.DashboardLink("Alerts and remedies")
            .type(models.DashboardLinkType.LINK)
            .url(ALERTS_PAGE)
            .target_blank(target_blank=True)
        )
        .with_variable(dashboards.DatasourceVariable("datasource").label("Source").type("prometheus"))
    )


def choice(name: str, label: str, query: str) -> dashboards.QueryVariable:
    """Return a variable with the values that a query finds."""
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def amount(name: str, label: str, default: str) -> dashboards.TextBoxVariable:
    """Return a variable that the reader types."""
    return dashboards.TextBoxVariable(name).label(label).default_value(default)
