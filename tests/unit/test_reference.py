"""docs/reference says what the code does: the generated pages are up to date and whole."""

import pytest

from tierlog.format.versions import Format
from tierlog.model.errors import Reason
from tools import generate_reference as reference

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


def test_each_command_is_there():
    commands = reference.commands()
    for name in (
        "up", "demo", "append", "read", "stream ls", "stream show", "ledger ls", "ledger show",
        "offload run", "offload status", "object inspect",
    ):  # fmt: skip
        assert f"## `tierlog {name}" in commands, name


def test_a_secret_never_shows_a_default():
    lines = reference.configuration().splitlines()
    secrets = [line for line in lines if "| secret" in line]
    assert secrets
    assert all(line.endswith("| none |") for line in secrets)
