"""The tree of commands: all there, each with help, and open to commands of other rooms."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tierlog.cli import main

COMMANDS = [
    ["up"],
    ["demo"],
    ["append"],
    ["read"],
    ["restore"],
    ["scrub"],
    *(["scrub", verb] for verb in ("list", "show")),
    *(["stream", verb] for verb in ("ls", "show", "create", "seal", "delete")),
    *(
        ["ledger", verb]
        for verb in ("ls", "show", "create", "append", "read", "close", "recover", "delete")
    ),
    *(["cluster", verb] for verb in ("underreplicated", "nodes")),
    *(["offload", verb] for verb in ("run", "status", "attempts", "gc")),
    *(["offload", verb] for verb in ("export", "pause", "resume")),
    *(["policy", verb] for verb in ("show", "set", "explain")),
    ["object", "inspect"],
    *(["cost", verb] for verb in ("show", "what-if")),
    *(["topics", verb] for verb in ("show", "apply")),
    *(["dlq", verb] for verb in ("list", "show", "replay", "dismiss")),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_command_has_help(words):
    done = CliRunner().invoke(main.app, [*words, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output


def test_the_commands_that_need_no_search_are_those_that_are_there():
    assert {words[0] for words in COMMANDS} == main.OWN


def test_other_rooms_add_commands_by_entry_points(monkeypatch):
    extra = typer.Typer()

    @extra.command()
    def greet():
        print("hello from another room")

    class Point:
        name = "extra"

        def load(self):
            return extra

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    monkeypatch.setattr(main, "app", typer.Typer())
    monkeypatch.setattr(sys, "argv", ["tierlog", "extra", "greet"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 0


def test_help_imports_no_library_that_only_commands_need():
    code = (
        "import sys; import tierlog.cli.main; "
        "print([m for m in ('grpc', 'aiohttp', 'numpy', 'pydantic', 'aioboto3', 'rich') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
