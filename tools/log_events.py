"""The events that Tierlog logs: found in the code by their calls, explained in a table.

Owns ``found_events``, which the reference page of events is made from, and which a test compares
with the table. Level and fields are those of the code; what an event means is in
``tools.log_event_meanings``.

Invariant: an event's name is a literal; one that is put together at run time is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.log_event_meanings import MEANINGS

ROOT: Final = Path(__file__).resolve().parent.parent
ROOMS: Final = ("shared/tierlog", "services", "pipeline/tierlog_spark")
CALL: Final = re.compile(r"structlog|\blog\.\w+\(")
LEVELS: Final = ("debug", "info", "warning", "error", "exception", "critical")
AREAS: Final = {
    "shared/tierlog/client": "client",
    "services/ingest": "ingest",
    "services/offloader": "offloader",
    "services/reader": "reader",
    "services/scheduler": "scheduler",
    "pipeline": "Spark",
}


@dataclass(slots=True)
class FoundEvent:
    """An event, as all calls that log it have it together."""

    name: str
    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    where: set[str] = field(default_factory=set)


class UnclearNameError(Exception):
    """A call whose event is no literal."""


def found_events() -> dict[str, FoundEvent]:
    """Return every event of all rooms, by name."""
    found: dict[str, FoundEvent] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if CALL.search(text):
                where = path.relative_to(ROOT).as_posix()
                for name, level, fields in events_in(ast.parse(text), where):
                    one = found.setdefault(name, FoundEvent(name))
                    one.levels.add("error" if level in {"exception", "critical"} else level)
                    one.fields |= fields
                    one.where.add(_area(where))
    return found


def events_in(tree: ast.Module, where: str) -> Iterator[tuple[str, str, set[str]]]:
    """Give name, level and fields of each call that logs, in one module."""
    loggers = _loggers(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        bound = _bound_by(node.func.value, loggers)
        if bound is None or node.func.attr not in LEVELS:
            continue
        first = node.args[0] if node.args else None
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            raise UnclearNameError(f"{where}:{node.lineno}: the event's name is no literal")
        named = {one.arg for one in node.keywords if one.arg not in {None, "exc_info"}}
        if node.func.attr == "exception" or any(one.arg == "exc_info" for one in node.keywords):
            named.add("exception")
        yield first.value, node.func.attr, bound | {one for one in named if one is not None}


def _loggers(tree: ast.Module) -> dict[str, set[str]]:
    """Return the names that loggers have, with the fields that are bound to each."""
    loggers: dict[str, set[str]] = {
        one.asname or one.name: set()
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if one.name == "log"  # of the module beside it
    }
    for _ in range(2):  # a logger that is bound from another one stands behind it
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                bound = _made_by(node.value, loggers)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [one.id for one in targets if isinstance(one, ast.Name)]
                if bound is not None:
                    loggers |= dict.fromkeys(names, bound)
    return loggers


def _made_by(call: ast.Call, loggers: dict[str, set[str]]) -> set[str] | None:
    if ast.unparse(call.func) in {"structlog.get_logger", "structlog.wrap_logger"}:
        return set()
    if isinstance(call.func, ast.Attribute) and call.func.attr == "bind":
        before = _bound_by(call.func.value, loggers)
        if before is not None:
            return before | {one.arg for one in call.keywords if one.arg is not None}
    return None


def _bound_by(value: ast.expr, loggers: dict[str, set[str]]) -> set[str] | None:
    """Return what is bound to a logger; None for what is no logger."""
    if isinstance(value, ast.Name):
        return loggers.get(value.id)
    return _made_by(value, loggers) if isinstance(value, ast.Call) else None


def _area(where: str) -> str:
    return next((name for folder, name in AREAS.items() if where.startswith(folder)), "all")


def page() -> str:
    """Return the body of the reference page."""
    text = (
        "# Events in the logs\n\n"
        "Each line is a JSON document on standard error. Its `event` is one of these names;\n"
        "beside the fields below it has `timestamp`, `level`, `service`, and, where it belongs\n"
        "to a request, `request_id` and `trace_id`. Secrets are `***`. With *where* `all`, any\n"
        "process may log it.\n\n"
        "| event | level | where | meaning | fields |\n|---|---|---|---|---|\n"
    )
    for name, one in sorted(found_events().items()):
        fields = ", ".join(f"`{field}`" for field in sorted(one.fields))
        levels, where = ", ".join(sorted(one.levels)), ", ".join(sorted(one.where))
        text += f"| `{name}` | {levels} | {where} | {MEANINGS[name]} | {fields} |\n"
    return text
