"""Grafana's JSON model of a dashboard, from plain panels. Knows nothing of Forebay's metrics."""

from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39  # Grafana 10.3 and later
COLUMNS = 24
STAT_HEIGHT, GRAPH_HEIGHT = 4, 8

Json = dict[str, Any]
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression; `legend` names its series by their labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`width` of 24 columns; `unit` is Grafana's name of it."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    help: str = ""


def model(title: str, text: str, variables: list[Json], rows: list[tuple[str, list[Panel]]]) -> Json:
    """The whole dashboard. Its uid is its title in lower case, so importing it again replaces it."""
    return {
        "uid": title.lower(),
        "title": title,
        "description": text,
        "tags": [title.lower()],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource(), *variables]},
        "panels": _placed(rows),
    }


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}


def variable(label: str, source: str) -> Json:
    """A choice among the values that `label` has in the metric `source`; all of them at first."""
    query = f"label_values({source}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _placed(content: list[tuple[str, list[Panel]]]) -> list[Json]:
    """Panels in reading order, filled from left to right; every row title starts a new line."""
    placed: list[Json] = []
    y = 0
    for title, panels in content:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        placed.append({"id": len(placed) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        placed[-1]["panels"] = []
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            height = STAT_HEIGHT if panel.kind == "stat" else GRAPH_HEIGHT
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(panel)})
            x += panel.width
        y += height
    return placed


def _panel(panel: Panel) -> Json:
    style = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
    graph = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    number = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "targets": [_target(i, query) for i, query in enumerate(panel.queries)],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": style if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "options": graph if panel.kind == "timeseries" else number,
    }


def _target(i: int, query: Query) -> Json:
    return {
        "refId": chr(ord("A") + i),
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": True,
        "editorMode": "code",
    }
