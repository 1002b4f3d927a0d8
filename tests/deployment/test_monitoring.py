"""Alerts and dashboards name metrics that there are, and every alert has its page."""

from __future__ import annotations

import json
import math
import operator
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.deployment.rendering import CHART, COMPONENTS, ROOT
from tierlog_scheduler.manifests import RESTORED, UNREAD
from tools.monitoring.alerts import ALERTS, Alert, alerts_file
from tools.monitoring.dashboards import BOARDS, board, boards
from tools.monitoring.metric_names import metric_names

RUNBOOKS = ROOT / "docs" / "runbooks"
NAMED = re.compile(r"\btierlog_[a-z0-9_]+")
PARTS = ("## What it means", "## Look", "## Do")


@pytest.fixture(scope="module")
def known() -> set[str]:
    return metric_names()


def test_the_metrics_are_found(known: set[str]):
    assert len(known) > 80
    for name in (
        "tierlog_journal_fsync_duration_seconds_sum",
        "tierlog_disk_free_bytes",
        "tierlog_offload_oldest_pending_age_seconds",
        "tierlog_offload_attempt_duration_seconds_bucket",
        "tierlog_reads_total",
        "tierlog_s3_requests_total",
        "tierlog_scheduler_unexpected_errors_total",
    ):
        assert name in known
    assert "tierlog_reads" not in known


@pytest.mark.parametrize("alert", ALERTS, ids=lambda one: one.name)
def test_an_alert_names_metrics_that_there_are(alert: Alert, known: set[str]):
    named = set(NAMED.findall(alert.expr))
    assert named or alert.expr.startswith("up{")
    assert named <= known
    assert alert.expr.count("(") == alert.expr.count(")")
    assert re.fullmatch(r"\d+m", alert.lasting)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda one: one.name)
def test_an_alert_has_a_page_that_says_what_to_do(alert: Alert):
    text = (RUNBOOKS / alert.page).read_text(encoding="utf-8")
    assert text.startswith(f"# {alert.name}\n")
    assert [part for part in PARTS if f"\n{part}\n" not in text] == []


def test_no_page_is_left_over_and_each_is_listed():
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    assert pages == {alert.page for alert in ALERTS}
    listed = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    assert [alert.name for alert in ALERTS if f"[{alert.name}]({alert.page})" not in listed] == []


@pytest.mark.parametrize("cause", [RESTORED, UNREAD])
def test_why_deletions_are_stopped_is_told_apart_where_the_alert_leads(cause: str):
    assert f"`{cause}`" in (RUNBOOKS / "deletions-stopped.md").read_text(encoding="utf-8")


def test_what_is_late_goes_by_its_policy_and_not_by_its_age():
    rules = {one.name: one.expr for one in ALERTS}
    for name in ("TierlogOffloadLate", "TierlogOffloadStopped"):
        assert NAMED.findall(rules[name]) == ["tierlog_offload_overdue_seconds"]


def test_the_rule_file_is_yaml_that_says_the_same():
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    rules = [one for group in yaml.safe_load(alerts_file())["groups"] for one in group["rules"]]
    assert [(one["alert"], one["expr"]) for one in rules] == [
        (alert.name, alert.expr) for alert in ALERTS
    ]
    assert all((ROOT / one["annotations"]["runbook"]).exists() for one in rules)


Series = dict[frozenset[tuple[str, str]], float]
"""Samples by their labels, of which one is the name."""


MAKES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "group": lambda _: 1}


def _parts(expr: str, word: str) -> list[str]:
    """Return what stands between an operator, outside of parentheses."""
    parts, depth = [""], 0
    for piece in re.split(rf"( {word} |[()])", expr):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == f" {word} " and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _value(expr: str, series: Series) -> Series:
    """Evaluate the few operators that these alerts have, as Prometheus does."""
    expr = expr[1:-1] if expr.startswith("(") else expr
    if len(parts := _parts(expr, "or")) > 1:
        return {labels: one for part in parts for labels, one in _value(part, series).items()}
    if len(parts := _parts(expr, "unless")) > 1:
        without = _value(parts[1], series)
        return {key: one for key, one in _value(parts[0], series).items() if key not in without}
    if found := re.fullmatch(r"(.*) (==|!=|>) ([\d* ]+)", expr):
        limit, inner = math.prod(map(int, found[3].split("*"))), _value(found[1], series)
        holds = {"==": operator.eq, "!=": operator.ne, ">": operator.gt}[found[2]]
        return {key: one for key, one in inner.items() if holds(one, limit)}
    if found := re.fullmatch(r'label_replace\((.*), "(\w+)", "(\w+)", "", ""\)', expr):
        return {key | {(found[2], found[3])}: one for key, one in _value(found[1], series).items()}
    if found := re.fullmatch(r"(sum|group|max) by \(namespace\) \((.*)\)", expr):
        together: dict[frozenset[tuple[str, str]], list[float]] = {}
        for labels, one in _value(found[2], series).items():
            key = frozenset(pair for pair in labels if pair[0] == "namespace")
            together.setdefault(key, []).append(one)
        return {key: MAKES[found[1]](values) for key, values in together.items()}
    name, _, asked = expr.partition("{")
    wanted = {("__name__", name), *re.findall(r'(\w+)="([^"]*)"', asked)}
    return {key: one for key, one in series.items() if wanted <= key}


def _fires(name: str, *samples: tuple[str, dict[str, str], float]) -> list[dict[str, str]]:
    """Return the labels with which an alert fires in the namespace of these samples."""
    own = {"namespace": "n"}
    series = {
        frozenset({"__name__": metric, **own, **labels}.items()): value
        for metric, labels, value in samples
    }
    (expr,) = (one.expr for one in ALERTS if one.name == name)
    found = [dict(labels) for labels in _value(expr, series)]
    assert all(one.pop("namespace") == "n" for one in found)
    return found


def _up(component: str, value: float = 1) -> tuple[str, dict[str, str], float]:
    return "up", {"job": "tierlog", "component": component}, value


def _leads(pod: str, value: float) -> tuple[str, dict[str, str], float]:
    return "tierlog_scheduler_leading", {"pod": pod}, value


def test_nobody_leads_also_where_there_is_no_scheduler():
    name = "TierlogSchedulerWithoutLeader"
    assert _fires(name, _up("ingest")) == [{}]
    assert _fires(name, _up("ingest"), _up("scheduler", 0)) == [{}]
    assert _fires(name, _up("scheduler"), _leads("a", 0), _leads("b", 0)) == [{}]
    assert _fires(name, _up("scheduler"), _leads("a", 1), _leads("b", 1)) == [{}]
    assert _fires(name, _up("scheduler"), _leads("a", 1), _leads("b", 0)) == []
    assert _fires(name) == []


def test_down_is_also_what_has_no_process_that_could_be_asked():
    all_of_them = [_up(one) for one in COMPONENTS]
    assert _fires("TierlogDown", *all_of_them) == []
    for index, component in enumerate(COMPONENTS):
        others = [*all_of_them[:index], *all_of_them[index + 1 :]]
        assert _fires("TierlogDown", *others) == [{"component": component}]
        (down,) = _fires("TierlogDown", *others, _up(component, 0))
        assert down["component"] == component
    assert _fires("TierlogDown") == []


def test_there_are_four_boards():
    assert len(boards()) == 4
    for name, text in boards().items():
        assert json.loads((CHART / "dashboards" / name).read_text()) == json.loads(text)


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_names_metrics_that_there_are(name: str, known: set[str]):
    found = board(name)
    panels = [one for one in found["panels"] if one["type"] != "row"]
    assert len(panels) >= 8
    assert len({one["id"] for one in found["panels"]}) == len(found["panels"])
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            named = set(NAMED.findall(target["expr"]))
            assert named, panel["title"]
            assert named <= known, panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")")


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_lie_over_each_other(name: str):
    taken: set[tuple[int, int]] = set()
    for panel in board(name)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


SHOW = (
    "import sys, prometheus_client, tools.monitoring.metric_names as names;"
    "names.metric_names(); sys.stdout.buffer.write(prometheus_client.generate_latest())"
)
GROWS = re.compile(r"(?:rate|increase)\((tierlog_\w+_total)(?:\{(\w+)=~?\"([^\"]*)\"\})?\[")


def test_what_alerts_see_grow_is_there_before_it_does():
    """Of a counter that appears with its first increase Prometheus sees none."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, check=True
    )
    asked = {found for alert in ALERTS for found in GROWS.findall(alert.expr)}
    assert len(asked) >= 5
    for name, label, values in asked:
        if f"# TYPE {name} counter" not in done.stdout:
            continue  # a collector's: it has no labels
        for value in values.split("|") if label else [""]:
            of = rf'\{{{label}="{value}"\}}' if label else r"(\{.*\})?"
            wanted = rf"^{name}{of} 0\.0$"
            assert re.search(wanted, done.stdout, re.MULTILINE), (name, value)


@pytest.mark.parametrize(
    ("name", "metric", "hours"),
    [
        ("TierlogOffloadLate", "tierlog_offload_overdue_seconds", 6),
        ("TierlogOffloadStopped", "tierlog_offload_overdue_seconds", 24),
        ("TierlogOffloadUnbounded", "tierlog_offload_unbounded_age_seconds", 24),
        ("TierlogDeletionsBehind", "tierlog_scheduler_deletions_behind_seconds", 6),
        ("TierlogDeletionsFailing", "tierlog_scheduler_deletions_failing_seconds", 6),
        ("TierlogScrubsIncomplete", "tierlog_scheduler_scrub_incomplete_seconds", 48),
    ],
)
def test_what_is_late_is_told_from_a_number_of_hours_on(name: str, metric: str, hours: int):
    def told(*seconds: float) -> list[dict[str, str]]:
        return _fires(name, *((metric, {"pod": f"s{at}"}, one) for at, one in enumerate(seconds)))

    assert told(0, hours * 3600) == []
    assert told(0, hours * 3600 + 1) == [{}]
    assert told() == []
