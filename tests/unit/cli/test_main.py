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
    *(["config", verb] for verb in ("show", "profiles")),
    ["debug", "bundle"],
    *(["cost", verb] for verb in ("show", "what-if")),
    *(["topics", verb] for verb in ("show", "apply")),
    *(["attributes", verb] for verb in ("get", "set", "list")),
    *(["perf", verb] for verb in ("write", "read")),
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


def test_a_room_that_is_not_installed_says_how_it_is(monkeypatch, capsys):
    bare = typer.Typer()
    bare.callback()(lambda: None)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    monkeypatch.setattr(main, "app", bare)
    monkeypatch.setattr(sys, "argv", ["tierlog", "spark", "export", "orders", "--to", "x"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "tierlog spark is not installed here" in said
    assert "pip install tierlog-spark" in said


def test_commands_on_spark_need_no_spark_for_their_help():
    code = (
        "import sys; import tierlog_spark.cli.main; "
        "print([m for m in ('pyspark', 'pyarrow', 'pandas', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_help_imports_no_library_that_only_commands_need():
    code = (
        "import sys; import tierlog.cli.main; "
        "print([m for m in ('grpc', 'aiohttp', 'numpy', 'pydantic', 'aioboto3', 'rich') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
