"""Each rule that a tool checks is broken here once, and the tool must say so.

A rule that never fails is no rule: import-linter passes when a contract names nothing that exists.
The sources broken are small trees and texts of their own, never those of the repository; the
configuration is the repository's.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINTER = SETTINGS["tool"]["importlinter"]
CONTRACTS = {contract["name"]: contract for contract in LINTER["contracts"]}
PURE = "The pure core has no I/O, no time, no chance, no log"
DOWN = "Inside the library, imports go down"
BESIDE = "Services and the pipeline stand on the library and never beside each other"
WIRING = "Only wiring chooses adapters"
ROOMS = CONTRACTS[DOWN]["layers"]
ADAPTERS = (
    "compression",
    "files",
    "kafka",
    "memory",
    "obstore",
    "otel",
    "redis",
    "s3",
    "tokens",
    "zookeeper",
)


def _run(*command: str, cwd: Path, text: str | None = None) -> tuple[int, str]:
    # Wide, so that no tool breaks a name over two lines.
    environment = dict(os.environ, COLUMNS="300", NO_COLOR="1")
    done = subprocess.run(
        command, cwd=cwd, input=text, capture_output=True, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout + done.stderr


# --------------------------------------------------------------------------- import contracts


@pytest.fixture
def lint(tmp_path):
    """Return a function that lints a tree of empty rooms and the files it is given."""
    for package in LINTER["root_packages"]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for room in [*ROOMS, *(f"adapters/{name}" for name in ADAPTERS)]:
        folder = tmp_path / "tierlog" / room
        folder.mkdir()
        (folder / "__init__.py").touch()
    for module in CONTRACTS[PURE]["source_modules"]:
        if not (path := tmp_path.joinpath(*module.split("."))).is_dir():
            path.with_suffix(".py").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    def lint(files: dict[str, str]) -> tuple[int, str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return _run(str(BIN / "lint-imports"), "--no-cache", cwd=tmp_path)

    return lint


def test_what_the_contracts_allow_passes(lint):
    status, output = lint(
        {
            "tierlog/ledger/writer.py": "import tierlog.ports\nimport tierlog.format\n",
            "tierlog/format/run.py": "import numpy\nimport tierlog.model\n",
            "tierlog/wiring/build.py": "import tierlog.adapters.s3\n",
            "tierlog/adapters/s3/store.py": "import aioboto3\nimport tierlog.runtime\n",
            "tierlog_reader/main.py": "import tierlog.wiring\n",
        }
    )
    assert status == 0, output
    assert f"{len(CONTRACTS)} kept, 0 broken" in output


BREACHES = [
    (BESIDE, "tierlog_ingest/x.py", "import tierlog_reader"),
    (BESIDE, "tierlog_spark/x.py", "import tierlog_offloader"),
    (BESIDE, "tierlog/client/x.py", "import tierlog_scheduler"),
    (DOWN, "tierlog/ledger/x.py", "import tierlog.offload"),
    (DOWN, "tierlog/catalog/x.py", "import tierlog.ledger"),
    (DOWN, "tierlog/runtime/x.py", "import tierlog.client"),
    (DOWN, "tierlog/model/x.py", "import tierlog.proto"),
    (DOWN, "tierlog/attic/__init__.py", ""),
    (PURE, "tierlog/format/x.py", "import asyncio"),
    (PURE, "tierlog/model/x.py", "import random"),
    (PURE, "tierlog/attributes/update.py", "import time"),
    (WIRING, "tierlog/client/x.py", "import tierlog.adapters.memory"),
    (WIRING, "tierlog_ingest/x.py", "from tierlog.adapters.s3 import store"),
    ("The S3 library is its adapter's alone", "tierlog/offload/x.py", "import aioboto3"),
    ("The S3 library is its adapter's alone", "tierlog_spark/x.py", "import botocore"),
    ("The Kafka library is its adapter's alone", "tierlog_ingest/x.py", "import confluent_kafka"),
    ("The ZooKeeper library is its adapter's alone", "tierlog/catalog/x.py", "import kazoo.client"),
    ("The ZooKeeper library is its adapter's alone", "tierlog/adapters/s3/x.py", "import kazoo"),
    ("The Redis library is its adapter's alone", "tierlog_reader/x.py", "import redis.asyncio"),
    ("The library of tokens is its adapter's alone", "tierlog/runtime/x.py", "import jwt"),
    ("obstore is its adapter's alone", "tierlog_reader/x.py", "import obstore"),
    ("PyIceberg is its job's alone", "tierlog_spark/x.py", "import pyiceberg.table"),
    ("PyIceberg is its job's alone", "tierlog_reader/x.py", "import sqlalchemy"),
    ("OpenTelemetry is its adapter's alone", "tierlog/runtime/x.py", "import opentelemetry.trace"),
    ("Libraries of compression are their adapter's alone", "tierlog/client/x.py", "import lz4"),
    ("Libraries of compression are their adapter's alone", "tierlog/cli/x.py", "import zstandard"),
]  # fmt: skip


@pytest.mark.parametrize(("contract", "path", "text"), BREACHES)
def test_a_breach_of_a_contract_is_found(lint, contract, path, text):
    status, output = lint({path: f"{text}\n", "tierlog/adapters/s3/store.py": ""})
    assert status != 0, output
    broken = [line for line in output.splitlines() if line.endswith("BROKEN")]
    assert any(line.startswith(contract) for line in broken), output


def test_each_contract_is_broken_here_at_least_once():
    assert {contract for contract, _, _ in BREACHES} == set(CONTRACTS)


def test_the_pure_core_can_import_none_of_what_is_forbidden_to_it(lint):
    forbidden = CONTRACTS[PURE]["forbidden_modules"]
    text = "".join(f"import {name}\n" for name in forbidden)
    _, output = lint({"tierlog/format/x.py": text})
    assert [name for name in forbidden if f"format.x -> {name} " not in output] == [], output


# ---------------------------------------------------------------------------------- ruff, mypy


BANS = SETTINGS["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]


def _ruff(path: str, text: str, *select: str) -> str:
    rules = ["--select", ",".join(select)] if select else []
    _, output = _run(
        str(BIN / "ruff"), "check", "--no-cache", "--output-format=concise", *rules,
        "--stdin-filename", path, "-", cwd=ROOT, text=text,
    )  # fmt: skip
    return output


def _uses() -> str:
    modules = sorted({name.rpartition(".")[0].split(".")[0] for name in BANS})
    return "".join(f"import {one}\n" for one in modules) + "".join(f"{name}()\n" for name in BANS)


@pytest.mark.parametrize(
    "path",
    ["shared/tierlog/ledger/x.py", "services/ingest/tierlog_ingest/x.py", "pipeline/x.py"],
)
def test_ambient_time_chance_and_threads_are_banned(path):
    output = _ruff(path, _uses(), "TID251")
    assert [name for name in BANS if f"`{name}` is banned" not in output] == [], output


def test_the_real_clock_may_be_read_where_it_is_wrapped():
    assert "TID251" not in _ruff("shared/tierlog/adapters/system/clock.py", _uses(), "TID251")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("TID252", "from . import x\n"),
        ("T201", 'print("x")\n'),
        ("E722", "try:\n    pass\nexcept:\n    pass\n"),
        ("BLE001", "try:\n    pass\nexcept Exception:\n    pass\n"),
        ("RUF006", "import asyncio\nasync def f():\n    asyncio.create_task(f())\n"),
        ("ANN001", "def f(x) -> None: ...\n"),
        ("D100", "X = 1\n"),
        ("E501", f"X = {'1' * 100}\n"),
        ("PLR0913", f"def f({', '.join(f'a{n}: int' for n in range(11))}) -> None: ...\n"),
        ("C901", "def f(x: int) -> None:\n" + "    if x:\n        x += 1\n" * 11),
    ],
)
def test_ruff_finds_what_the_style_forbids(rule, text):
    assert f" {rule} " in _ruff("shared/tierlog/ledger/x.py", text)


def test_each_ignore_says_why():
    lines = (ROOT / "pyproject.toml").read_text().split("ignore = [", 1)[1].split("]\n", 1)[0]
    for line in filter(None, (line.strip() for line in lines.splitlines())):
        assert "#" in line, f"no reason beside {line}"


def test_each_ignore_of_some_files_says_why():
    text = (ROOT / "pyproject.toml").read_text()
    table = text.split("[tool.ruff.lint.per-file-ignores]\n", 1)[1].split("\n[", 1)[0]
    before = ""
    for line in table.splitlines():
        if re.match(r'"[^"]+" = ', line):
            assert "#" in line or before.startswith("#"), f"no reason beside or above {line}"
        before = line


def test_untyped_code_does_not_pass(tmp_path):
    (tmp_path / "x.py").write_text("def f(x):\n    return x\n\n\ny: int = 'text'\n")
    status, output = _run(
        str(BIN / "mypy"), "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir",
        str(ROOT / ".mypy_cache"), "x.py", cwd=tmp_path,
    )  # fmt: skip
    assert status != 0
    assert "[no-untyped-def]" in output
    assert "[assignment]" in output


# --------------------------------------------------------------------------------------- pytest


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import warnings\ndef test_x(): warnings.warn('old', DeprecationWarning)\n", "old"),
        ("import pytest\n@pytest.mark.coverz('A1')\ndef test_x(): ...\n", "coverz"),
        (
            "import pytest\n@pytest.mark.xfail\ndef test_x(): ...\n",
            "[XPASS(strict)]",
        ),
    ],
)
def test_pytest_takes_warnings_and_unknown_marks_for_errors(tmp_path, text, complaint):
    (tmp_path / "test_x.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    status, output = _run(
        str(BIN / "python"), "-m", "pytest", "-p", "no:cacheprovider", "test_x.py", cwd=tmp_path
    )
    assert status != 0
    assert complaint in output
