"""The W&B workspace that shows a project's goodput: which panels, and the specification that W&B's server stores. Standard library.

    view_spec(...)  ->  a dict; `strategy/wandb_dashboard.py` hands it over, ``ntp dashboard --out FILE`` writes it down

The form is that of wandb-workspaces 0.4.13, whose models read what is made here (tests/test_dashboard.py, where it is installed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_totals import BADPUT

WALL = "ntp/wall_s"
WIDTH, HEIGHT = 8, 6
COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. kind: as W&B calls it; metrics: what it shows; config: the rest."""

    title: str
    kind: str
    metrics: tuple[str, ...]
    config: dict[str, Any]

    def spec(self, number: int) -> dict[str, Any]:
        """In W&B's form, at its place in a grid."""
        down, across = divmod(number, COLUMNS)
        place = {"x": across * WIDTH, "y": down * HEIGHT, "w": WIDTH, "h": HEIGHT}
        name = hashlib.sha256(self.title.encode()).hexdigest()[:11]
        return {"__id__": name, "layout": place, "viewType": self.kind, "config": {"chartTitle": self.title} | self.config}


def _lines(title: str, *metrics: str, **config: Any) -> Panel:
    shown = {"xAxis": WALL, "metrics": list(metrics)} | config
    return Panel(title, "Run History Line Plot", metrics, shown)


def _number(title: str, metric: str) -> Panel:
    return Panel(title, "Scalar Chart", (metric,), {"metrics": [metric]})


def _pictures(title: str, key: str) -> Panel:
    return Panel(title, "Media Browser", (key,), {"mediaKeys": [key]})


def _table(title: str, key: str) -> Panel:
    return Panel(title, "Weave", (key,), {"panel2Config": {"exp": _summary_table(key) | {"__userInput": True}}})


def parse_project(text: str) -> tuple[str, str]:
    """``ENTITY/PROJECT``.

    Raises:
        ConfigError: it is none.
    """
    entity, _, project = text.partition("/")
    if not entity or not project or "/" in project:
        raise ConfigError(f"a W&B project is ENTITY/PROJECT, as in the address of its page, got {text!r}")
    return entity, project


def view_spec() -> dict[str, Any]:
    """The specification of a workspace with `SECTIONS`, over all runs of its project."""
    sections = [_section(name, panels) for name, panels in SECTIONS]
    rest = _section("Report Panels", ()) | {"isOpen": False, "type": "grid"}
    bank = {
        "state": 1,
        "settings": {"autoOrganizePrefix": 2, "showEmptySections": False, "sortAlphabetically": False},
        "sections": sections,
    }
    section = {
        "panelBankConfig": bank,
        "panelBankSectionConfig": rest,
        "customRunColors": {},
        "name": "",
        "runSets": [_run_set()],
        "settings": _SMOOTHING | {"maxRuns": 10, "shouldAutoGeneratePanels": False},
        "openRunSet": 0,
        "openViz": True,
    }
    return {"section": section, "vizExpanded": False, "libraryExpanded": True}


_SMOOTHING: dict[str, Any] = {
    "smoothingWeight": 0, "smoothingType": "none", "xAxis": "_step", "ignoreOutliers": False, "useRunsTableGroupingInPanels": True,
    "smoothingActive": False, "xAxisActive": False,
}  # fmt: skip


def _section(name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    return {
        "name": name,
        "isOpen": True,
        "type": "flow",
        "flowConfig": {"snapToColumns": True, "columnsPerPage": COLUMNS, "rowsPerPage": 2, "gutterWidth": 16, "boxWidth": 460, "boxHeight": 300},
        "sorted": 0,
        "localPanelSettings": dict(_SMOOTHING),
        "panels": [panel.spec(number) for number, panel in enumerate(panels)],
        "pinned": False,
    }  # fmt: skip


def _run_set() -> dict[str, Any]:
    newest = {"key": {"section": "run", "name": "createdAt"}, "ascending": False}
    feed = {"version": 2, "columnVisible": {}, "columnPinned": {}, "columnWidths": {}, "columnOrder": [], "pageSize": 10, "onlyShowSelected": False}
    return {
        "id": "",
        "runFeed": feed,
        "enabled": True,
        "name": "Run set",
        "search": {"query": ""},
        "filters": {"filterFormat": "filterV2", "filters": []},
        "grouping": [],
        "sort": {"keys": [newest]},
        "selections": {"root": 1, "bounds": [], "tree": []},
        "expandedRowAddresses": [],
    }  # fmt: skip


def _summary_table(key: str) -> dict[str, Any]:
    """W&B's expression for the table `key` in the summaries of the runs that are shown, with the types that it wants to be told."""
    table = {"type": "file", "extension": "json", "wbObjectType": {"type": "table", "columnTypes": {}}}
    runs = _of_project({"type": "list", "objectType": "run", "maxLength": 50})
    times = {"_wandb": _typed(runtime="number")}
    summaries = _union(_typed(**times), _typed(_step="number", table=table, _runtime="number", _timestamp="number", **times))
    summary = {
        "nodeType": "output",
        "type": _of_project({"type": "list", "objectType": _tagged(_typed(run="run"), summaries), "maxLength": 50}),
        "fromOp": {"name": "run-summary", "inputs": {"run": {"nodeType": "var", "type": runs, "varName": "runs"}}},
    }
    return {
        "nodeType": "output",
        "type": _of_project({"type": "list", "objectType": _tagged(_typed(run="run"), _union(table, "none")), "maxLength": 50}),
        "fromOp": {"name": "pick", "inputs": {"obj": summary, "key": {"nodeType": "const", "type": "string", "val": key}}},
    }


def _typed(**properties: Any) -> dict[str, Any]:
    return {"type": "typedDict", "propertyTypes": properties}


def _union(*members: Any) -> dict[str, Any]:
    return {"type": "union", "members": list(members)}


def _tagged(tag: Any, value: Any) -> dict[str, Any]:
    return {"type": "tagged", "tag": tag, "value": value}


def _of_project(value: Any) -> dict[str, Any]:
    names = _typed(entityName="string", projectName="string")
    return _tagged(_tagged(names, _typed(project="project", filter="string", order="string")), value)


SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Goodput",
        (
            _lines("Goodput over the job's age", "goodput/cumulative", "goodput/window", "goodput/capacity_weighted", yAxisMin=0.0, yAxisMax=1.0),
            _lines("Badput: GPU-seconds by cause", *(f"badput_s/{bucket}" for bucket in BADPUT), plotType="stacked-area"),
            _lines("GPUs: owned and at work", "ntp/owned_gpus", "ntp/live_gpus", "ntp/degree_min", yAxisMin=0.0),
            _number("Goodput so far", "goodput/cumulative"),
            _number("Losses", "ntp/num_losses"),
            _lines("Generations", "ntp/generation"),
        ),
    ),
    (
        "Throughput",
        (
            _lines("Tokens per second", "throughput/tokens_per_s"),
            _lines("Useful FLOPs per second and GPU", "throughput/useful_flops_per_s_per_live_gpu", "throughput/useful_flops_per_s_per_owned_gpu"),
            _lines("MFU", "throughput/mfu_live", "throughput/mfu_owned", yAxisMin=0.0, yAxisMax=1.0),
        ),
    ),
    (
        "What happened",
        (
            _lines(
                "Recoveries: GPU-seconds", "badput_s/detection", "badput_s/regroup", "badput_s/reshard", "badput_s/lost_step",
                plotType="stacked-area",
            ),
            _pictures("Live capacity and badput", "ntp/timeline"),
            _table("Events", "ntp/events"),
        ),
    ),
)  # fmt: skip
"""What a workspace shows."""
