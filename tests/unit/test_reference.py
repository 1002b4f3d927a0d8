"""docs/reference says what the code does: the generated pages are up to date and whole."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tierlog.format.versions import Format
from tierlog.model.errors import SURFACES, Reason
from tools import access_matrix
from tools import generate_reference as reference

ROOT = Path(__file__).resolve().parents[2]
PAGES: Final[dict[str, Callable[[], str]]] = {
    "formats.md": reference.formats,
    "configuration.md": reference.configuration,
    "errors.md": reference.errors,
    "cli.md": reference.commands,
    "log-events.md": reference.log_events,
    "access.md": access_matrix.page,
    "openapi-scheduler.json": functools.partial(reference.openapi, "scheduler"),
    "openapi-reader.json": functools.partial(reference.openapi, "reader"),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_what_the_code_says(name):
    committed = (reference.REFERENCE / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), "run: make reference"


def test_each_format_error_and_setting_is_there():
    formats, errors = reference.formats(), reference.errors()
    assert all(f"| {kind.name} |" in formats for kind in Format)
    assert all(f"| {reason} |" in errors for reason in Reason)
    configuration = reference.configuration()
    for variable in ("TIERLOG_S3__BUCKET", "TIERLOG_INGEST__LISTEN__WIRE_PORT"):
        assert f"`{variable}`" in configuration
    assert "`deletion_lag_ms` | `14400000`" in configuration


def test_choices_are_named_as_they_are_set_and_no_type_is_shown_as_python_has_it():
    configuration = reference.configuration()
    assert "| `TIERLOG_S3__READ_BACK` | `none`, `sample` or `full` | `sample` |" in configuration
    assert "| `TIERLOG_SECURITY__MODE` | `enforced` or `open` | none |" in configuration
    assert "| any of `collector`, `kafka`, `redis`, `s3` or `zookeeper` |" in configuration
    rows = [one.split(" | ") for one in configuration.splitlines() if one.startswith("| `TIERLOG_")]
    assert [one for one in rows if re.search(r"typing|pathlib|Literal|Optional", one[1])] == []


VARIABLE = re.compile(r"\bTIERLOG_[A-Z0-9]+(?:_[A-Z0-9]+)*(?:__[A-Z0-9]+(?:_[A-Z0-9]+)*)+\b")


def test_each_variable_that_a_document_names_is_a_setting():
    configuration = reference.configuration()
    known = set(VARIABLE.findall(configuration))
    of_maps = tuple(re.findall(r"`(TIERLOG_\w+__)<id>`", configuration))
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (path.name, name) for path in pages for name in VARIABLE.findall(path.read_text("utf-8"))
    }
    assert len(named) > 100
    unknown = {one for one in named if one[1] not in known and not one[1].startswith(of_maps)}
    assert unknown == set()


def test_each_command_is_there():
    commands = reference.commands()
    for name in (
        "up", "demo", "append", "read", "stream ls", "stream show", "ledger ls", "ledger show",
        "offload run", "offload status", "object inspect", "node fsck", "node recover",
        "node ledgers", "node format", "node decommission", "cluster nodes",
        "cluster underreplicated", "ledger create", "ledger recover", "journal dump",
        "entrylog dump", "doctor",
    ):  # fmt: skip
        assert f"## `tierlog {name}" in commands, name


@pytest.mark.parametrize("service", ["scheduler", "reader"])
def test_an_api_tells_of_its_errors_as_they_are(service):
    document = json.loads(reference.openapi(service))
    assert document["openapi"].startswith("3.1")
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert operations
    ids = [one["operationId"] for one in operations]
    assert len(ids) == len(set(ids))
    for one in operations:
        assert "422" not in one["responses"]
        assert set(one["responses"]["default"]["content"]) == {"application/problem+json"}
        assert one["summary"]
    problem = document["components"]["schemas"]["Problem"]
    assert problem["properties"]["reason"]["enum"] == [reason.value for reason in Reason]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= set(document["components"]["schemas"])


def test_the_api_of_the_scheduler_has_what_the_commands_need():
    paths = json.loads(reference.openapi("scheduler"))["paths"]
    stream = "/v1/streams/{name}"
    for path, method in (
        (f"{stream}/offload", "post"), (f"{stream}/offload", "get"),
        (f"{stream}/offload/pause", "post"), (f"{stream}/offload/resume", "post"),
        (f"{stream}/attempts", "get"), (f"{stream}/leftovers", "get"),
        ("/v1/dead-letters", "get"), ("/v1/dead-letters/{place}/replay", "post"),
    ):  # fmt: skip
        assert method in paths[path], path


def test_each_exit_code_of_an_error_is_told():
    lines = reference.commands().splitlines()
    for reason, surface in SURFACES.items():
        line = next(one for one in lines if one.startswith(f"| {surface.exit_code} |"))
        assert reason.value in line


def test_a_secret_never_shows_a_default():
    lines = reference.configuration().splitlines()
    secrets = [line for line in lines if "| secret" in line]
    assert secrets
    assert all(line.endswith("| none |") for line in secrets)
