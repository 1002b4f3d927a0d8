"""docs/reference says what the code does: the generated pages are up to date and whole."""

import re
from pathlib import Path

import pytest

from tierlog.format.versions import Format
from tierlog.model.errors import SURFACES, Reason
from tools import generate_reference as reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "formats.md": reference.formats,
    "configuration.md": reference.configuration,
    "errors.md": reference.errors,
    "cli.md": reference.commands,
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
