"""The habits of this repository that no linter checks: sizes, docstrings, words that must not be.

Sizes are a ratchet: they may be lowered here, and are never raised.
"""

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
LINE_LEN_MAX = 100

# What is said to a tool at a line's end does not count, as with ruff.
PRAGMA = re.compile(r"\s+# (?:noqa|type: ignore|fmt:).*$")
MADE_BY_TOOLS = frozenset({"__pycache__", "build", "dist", "node_modules"})
GENERATED = ROOT / "shared" / "tierlog" / "proto"

HOME_OF_SOMEONE = re.compile(r"(?<![\w.~-])/(?:home|Users|root|work)/\w")
# Spelled as patterns, so that this file does not hold the names either.
REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|maven\.org|maven\.apache\.org|npmjs\.(?:org|com)"
    r"|golang\.org|crates\.io|docker\.io|ghcr\.io|quay\.io",
    re.IGNORECASE,
)
ADDRESS = re.compile(
    r"://|--(?:extra-)?index-url|--find-links|--trusted-host|^-[if] ", re.MULTILINE
)


def _files() -> list[Path]:
    found: list[Path] = []
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(
            name
            for name in names
            if name not in MADE_BY_TOOLS
            and not name.endswith(".egg-info")
            and not Path(folder, name, "pyvenv.cfg").exists()
            and (not name.startswith(".") or name in {".ci", ".github"})
        )
        found += [Path(folder) / name for name in sorted(files) if name != ".venv.lock"]
    return found


FILES = _files()
SOURCES = [path for path in FILES if path.suffix == ".py" and GENERATED not in path.parents]


def _named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path), filename=_named(path))


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 150
    assert all((ROOT / name).exists() for name in ("README.md", "LICENSE", "ARCHITECTURE.md"))


def test_no_function_is_longer_than_a_screen():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = [
        f"{_named(path)}:{node.lineno} {node.name} has {length} lines"
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, functions)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_no_file_and_no_line_is_too_long():
    long = []
    for path in SOURCES:
        lines = _text(path).splitlines()
        if len(lines) > FILE_LINES_MAX:
            long.append(f"{_named(path)} has {len(lines)} lines")
        long += [
            f"{_named(path)}:{number} has {len(line)} characters"
            for number, line in enumerate(lines, 1)
            if len(PRAGMA.sub("", line)) > LINE_LEN_MAX
        ]
    assert long == []


def test_no_file_names_a_place_on_someones_machine():
    found = [
        f"{_named(path)}: {match[0]}"
        for path in FILES
        for match in HOME_OF_SOMEONE.finditer(_text(path))
    ]
    assert found == []


def test_no_file_names_a_registry():
    """Where packages come from is the machine's settings, not the repository's."""
    found = [
        f"{_named(path)}: {match[0]}"
        for path in FILES
        for match in REGISTRIES.finditer(_text(path))
    ]
    assert found == []


def test_locks_hold_versions_and_hashes_and_no_address():
    locks = sorted(ROOT.glob("requirements*.lock"))
    assert len(locks) >= 2
    for path in locks:
        text = _text(path)
        assert ADDRESS.search(text) is None, _named(path)
        pins = re.findall(r"^[a-z0-9][^\s=]*==\S+", text, re.MULTILINE)
        assert pins, _named(path)
        assert text.count("--hash=sha256:") >= len(pins), _named(path)
    assert not (ROOT / "uv.lock").exists() or "uv.lock" in _text(ROOT / ".gitignore").split()


def test_conftest_lists_plugins_and_nothing_else():
    for path in FILES:
        if path.name != "conftest.py":
            continue
        for node in _tree(path).body:
            is_list = (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "pytest_plugins"
            )
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            assert is_list or is_docstring or is_import, f"{_named(path)}:{node.lineno}"


def test_each_module_says_what_it_owns():
    silent = [
        _named(path)
        for path in SOURCES
        if not ast.get_docstring(_tree(path)) and path.name != "__main__.py"
    ]
    assert silent == []


def test_each_room_is_a_package_with_types():
    packages = [path for path in ROOT.glob("services/*/tierlog_*") if path.is_dir()]
    packages += [ROOT / "shared" / "tierlog", ROOT / "pipeline" / "tierlog_spark"]
    assert len(packages) == 6
    for package in packages:
        assert (package / "py.typed").exists(), _named(package)
        folders = {path.parent for path in package.rglob("*.py")}
        assert [_named(one) for one in folders if not (one / "__init__.py").exists()] == []


PURE_IMPORTS = frozenset(
    {
        "abc", "array", "base64", "binascii", "bisect", "collections", "dataclasses", "datetime",
        "enum", "functools", "hashlib", "hmac", "itertools", "json", "math", "re", "struct",
        "typing", "uuid", "crc32c", "google", "numpy",
        "tierlog.format", "tierlog.model", "tierlog.proto",
    }
)  # fmt: skip


def test_the_pure_rooms_import_nothing_but_what_is_listed():
    """No I/O, no clock, no chance; of outer libraries numpy, protobuf and crc32c alone."""
    found = set()
    for path in SOURCES:
        if path.parent not in {ROOT / "shared/tierlog/model", ROOT / "shared/tierlog/format"}:
            continue
        for node in ast.walk(_tree(path)):
            modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                depth = 2 if module.startswith("tierlog") else 1
                name = ".".join(module.split(".")[:depth])
                if name not in PURE_IMPORTS:
                    found.add(f"{_named(path)} imports {module}")
    assert found == set()


OTHER_TONGUES = frozenset(
    {
        "cbor2", "csv", "http", "httpx", "aiohttp", "json", "marshal", "msgpack", "orjson",
        "pickle", "plistlib", "requests", "shelve", "ujson", "urllib", "xml", "xmlrpc", "yaml",
    }
)  # fmt: skip
ADMIN_CLIENTS = (
    "tierlog.client", "tierlog.adapters.rpc.admin", "tierlog.adapters.rpc.rest",
    "tierlog.adapters.rpc.reader", "tierlog.wiring.client", "tierlog.wiring.costs",
)  # fmt: skip
CROSSING = ("services", "shared/tierlog/catalog", "shared/tierlog/ledger", "shared/tierlog/offload",
            "shared/tierlog/wire", "shared/tierlog/wiring", "shared/tierlog/adapters/kafka",
            "shared/tierlog/adapters/rpc")  # fmt: skip
"""Where what one service says to another is made, sent and understood."""
FOR_PEOPLE = frozenset(
    {
        # HTTP for clients: documents of JSON, and runs as they are; and that of a node's bytes.
        "services/reader/tierlog_reader/documents.py",
        "shared/tierlog/adapters/rpc/admin.py",
        "shared/tierlog/adapters/rpc/reader.py",
        "shared/tierlog/adapters/rpc/rest.py",
        "shared/tierlog/wiring/client.py",
        "shared/tierlog/wiring/costs.py",
        "shared/tierlog/wiring/reads.py",
    }
)
BARE_HTTP = frozenset({"http.HTTPStatus", "urllib.parse.quote", "urllib.parse.urlencode"})


def _foreign_words(tree: ast.Module) -> set[str]:
    """Return imports by which a service would say something that is not protobuf."""
    found = set()
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        for name in names:
            is_admin = any(f"{name}.".startswith(f"{one}.") for one in ADMIN_CLIENTS)
            if is_admin or (name.partition(".")[0] in OTHER_TONGUES and name not in BARE_HTTP):
                found.add(name)
    return found


def test_services_say_to_each_other_nothing_but_protobuf():
    """No other encoding, no HTTP call of one's own, no client of what is there for people."""
    looked_at = [
        path
        for path in SOURCES
        if _named(path).startswith(CROSSING)
        and _named(path) not in FOR_PEOPLE
        and "cli" not in path.parts
    ]
    assert len(looked_at) > 100
    assert all((ROOT / one).exists() for one in (*CROSSING, *FOR_PEOPLE))
    found = {_named(path): words for path in looked_at if (words := _foreign_words(_tree(path)))}
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import json",
        "from orjson import dumps",
        "import pickle as p",
        "from urllib.request import urlopen",
        "from aiohttp import ClientSession",
        "from tierlog.client import Client",
        "from tierlog.adapters.rpc import rest",
        "def f():\n    from tierlog.wiring.client import open_client_connections",
    ],
)
def test_another_tongue_is_found(line):
    assert _foreign_words(ast.parse(line))


def test_the_architecture_names_every_module_of_the_storage_node():
    text = _text(ROOT / "ARCHITECTURE.md")
    section = text.partition("## The storage node")[2].partition("\n## ")[0]
    modules = (ROOT / "services/ingest/tierlog_ingest/storage").glob("*.py")
    missing = {one.stem for one in modules if f"`{one.stem}`" not in section}
    assert missing == {"__init__"}


def test_decision_records_that_code_cites_exist():
    records = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    for path in FILES:
        for match in re.finditer(r"ADR-(\d{4})", _text(path)):
            is_example = path.parent == Path(__file__).parent
            assert match[1] in records or is_example, f"{_named(path)}: {match[0]}"


def test_each_decision_record_is_short_and_listed():
    folder = ROOT / "docs" / "adr"
    listed = _text(folder / "README.md")
    for path in folder.glob("[0-9]*.md"):
        text = _text(path)
        assert f"]({path.name})" in listed, path.name
        assert text.startswith(f"# ADR-{path.name[:4]}: "), path.name
        assert len(text.splitlines()) <= 60, path.name
        for part in ("**Context.**", "**Decision.**", "**Consequences.**"):
            assert part in text or path.name.startswith("0012"), f"{path.name}: {part}"


@pytest.mark.parametrize("name", sorted(p.name for p in FILES if p.suffix == ".md"))
def test_links_inside_the_documents_lead_somewhere(name):
    for path in (one for one in FILES if one.name == name):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", _text(path)):
            assert (path.parent / target).exists(), f"{_named(path)} -> {target}"


def test_the_patterns_find_what_they_look_for():
    assert HOME_OF_SOMEONE.search('"' + "/ho" + 'me/someone/x"')
    assert not HOME_OF_SOMEONE.search("a/wo" + "rk/b and $HOME/x")
    assert REGISTRIES.search("https://py" + "pi.org/simple")
    assert ADDRESS.search("x==1\n-i somewhere\n")
    assert ADDRESS.search("x @ ht" + "tps://host/x.whl")
