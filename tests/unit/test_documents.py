"""What documents tell people to type and look at is there: commands, options, settings, metrics.

Pages that are generated are left out: they are the code's own. Variables are in ``test_reference``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from tierlog.runtime.naming import all_names
from tierlog.runtime.settings import Settings
from tools.access_matrix import surfaces
from tools.generate_reference import MADE_BY, _app
from tools.log_event_meanings import MEANINGS
from tools.monitoring.metric_names import metric_names

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS, REFERENCE = ROOT / "docs" / "runbooks", ROOT / "docs" / "reference"
METHODS = {"client.append"}
"""Of the library."""
WATCHING = ("http.md", "s3-permissions.md", "service-levels.md")
PAGES = [
    path
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    if not path.read_text("utf-8").startswith(MADE_BY)
]
COMMAND = re.compile(
    r"(?:run --rm --entrypoint tierlog spark|(?<![\w./\[-])tierlog|run --rm (?:-T )?cli)"
    r" (?!up:)(\S.*)"
)
END = re.compile(r"[|<>;)'\"`]|&&| #|  |:? …")
DOTTED = re.compile(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+)(?:=[^`]*)?`")
METRIC = re.compile(r"\btierlog_[a-z0-9_]*[a-z0-9](?!\w)")
METHODS_OF_ROUTES = ("GET ", "POST ", "PUT ", "PATCH ", "DELETE ")
ROUTE = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) (/v1/[\w/{}.-]*[\w}])")


def snippets(path: Path) -> Iterator[str]:
    """Give the lines of code of a page, and what stands as code in its texts."""
    texts, fenced = [], False
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line
        else:
            texts.append(line)
    yield from re.findall(r"`([^`]+)`", " ".join(texts))


def commands() -> list[tuple[str, str]]:
    return [
        (path.name, " ".join(END.split(match[1])[0].split()))
        for path in PAGES
        for text in snippets(path)
        for match in COMMAND.finditer(text)
    ]


def faults(words: list[str]) -> str:
    """Return what of a command there is not; empty: it is one."""
    command: Any = typer.main.get_command(_app())
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word.startswith("-") and word not in {"-", "--", "--help"}:
            name, _, value = word.partition("=")
            found = [one for one in command.params if name in [*one.opts, *one.secondary_opts]]
            if not found:
                return f"{command.name} has no {name}"
            if not value and not getattr(found[0], "is_flag", False) and waiting:
                waiting.pop(0)
        elif getattr(command, "commands", None):
            if word in command.commands:
                command = command.commands[word]
            elif re.fullmatch(r"[a-z-]+", word):
                return f"{command.name} has no {word}"
    return ""


def test_each_command_that_a_document_names_is_there():
    found = commands()
    assert len({words for _, words in found}) > 100
    assert [one for one in found if faults(one[1].split())] == []


@pytest.mark.parametrize(
    "words", ["offload runn x", "offload run x --waitt", "scrubb", "append --fromat lines x"]
)
def test_one_that_is_not_there_is_found(words):
    assert faults(words.split())


def test_each_setting_that_a_document_names_is_there():
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    values = yaml.safe_load((ROOT / "deploy/helm/tierlog/values.yaml").read_text("utf-8"))
    paths = all_names(Settings)
    known = {".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)}

    def of_the_chart(name: str) -> bool:
        below = values
        for part in name.split("."):
            if not isinstance(below, dict) or part not in below:
                return False
            below = below[part]
        return True

    named = {
        (path.name, name)
        for path in PAGES
        for name in DOTTED.findall(path.read_text("utf-8"))
        if name.partition(".")[0] in Settings.model_fields
    }
    assert len(named) > 50
    unknown = {
        one
        for one in named
        if one[1] not in known | METHODS | set(MEANINGS) and not of_the_chart(one[1])
    }
    assert unknown == set()


def test_each_metric_that_a_document_names_is_there():
    known = metric_names()
    pages = [*RUNBOOKS.glob("*.md"), *(REFERENCE / name for name in WATCHING)]
    named = {(page.name, one) for page in pages for one in METRIC.findall(page.read_text("utf-8"))}
    assert len(named) > 20
    whole = known | {re.sub("_(bucket|count|sum)$", "", one) for one in known}
    assert {one for one in named if one[1] not in whole} == set()


def test_each_route_that_a_document_names_is_there():
    known = [
        re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name)))
        for surface in surfaces()
        for name in surface.operations
    ]
    named = {
        (path.name, f"{method} {route}")
        for path in PAGES
        for method, route in ROUTE.findall(path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert {one for one in named if not any(route.fullmatch(one[1]) for route in known)} == set()


def test_each_route_that_there_is_stands_in_the_page_of_routes():
    page = re.sub(r"\{\w+\}", "{}", (REFERENCE / "http.md").read_text("utf-8"))
    lacking = {
        name
        for surface in surfaces()
        for name in surface.operations
        if name.startswith(METHODS_OF_ROUTES) and not name.endswith("-redirect")
        if not _is_told(re.sub(r"\{\w+\}", "{}", name), page)
    }
    assert lacking == set()


def _is_told(route: str, page: str) -> bool:
    """Tell whether a route is in a page: whole, by its end, or by its method behind its GET."""
    method, _, path = route.partition(" ")
    ways = [route, f"…/{path.rpartition('/')[2]}"]
    if any(re.search(rf"`{re.escape(one)}[`?]", page) for one in ways):
        return True
    return any(f"`GET {path}`" in row and f"`{method} …`" in row for row in page.splitlines())


def test_each_place_that_the_architecture_sends_to_is_there():
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = page.partition("## Where a thing is\n")[2].partition("\n## ")[0]
    places = re.findall(r"`([^`…]+)`", table.partition("|---|---|\n")[2])
    assert len(places) > 60
    rooms = [ROOT / "shared" / "tierlog", *ROOT.glob("services/*/tierlog_*"), ROOT, ROOT / "tests"]
    assert [one for one in places if not any(_leads(room, one) for room in rooms)] == ["tierlog up"]


def _leads(room: Path, place: str) -> bool:
    """Tell whether a room, or one of its folders, has a module, a folder or a file of that name."""
    where = place.rstrip("/")
    names = (where, f"{where}.py", f"*/{where}", f"*/{where}.py")
    return any(True for name in names for _ in room.glob(name))
