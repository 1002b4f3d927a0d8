"""A machine that can't compile the streaming cache is told what it lacks, and goes on without."""

import shutil
import sys
from pathlib import Path

import pytest

from tierlog_reader.cache import store
from tools import compile_cache


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Give a function that takes away what a machine may lack."""
    monkeypatch.setattr(store, "COMPILED", False)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    have = {"modules": {"Cython"}, "programs": {"gcc"}, "headers": tmp_path}

    def which(name):
        return f"/usr/bin/{name}" if name in have["programs"] else None

    monkeypatch.setattr(compile_cache, "installed", lambda name: name in have["modules"])
    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setattr(compile_cache, "include", lambda: have["headers"])
    return have


def test_nothing_lacks(machine):
    assert compile_cache.missing() is None
    assert compile_cache.compiler() == ["/usr/bin/gcc"]


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ({"modules": set()}, "Cython is not installed"),
        ({"programs": set()}, "no C compiler: none of cc, gcc, clang on the PATH"),
        ({"headers": Path("nowhere")}, "no Python.h in nowhere"),
    ],
)
def test_what_lacks_is_named_and_is_a_failure_only_where_it_was_asked_for(
    machine, monkeypatch, capsys, lacks, told
):
    machine.update(lacks)
    for options, code in (([], 1), (["--if-possible"], 0)):
        monkeypatch.setattr(sys, "argv", ["compile_cache", *options])
        with pytest.raises(SystemExit) as ended:
            compile_cache.main()
        assert ended.value.code == code
        assert f"runs as plain Python: {told}" in capsys.readouterr().out


def test_another_compiler_is_taken_where_it_is_named_or_is_a_wheel(machine, monkeypatch):
    machine.update(programs=set(), modules={"Cython", "ziglang"})
    assert compile_cache.compiler() == [sys.executable, "-m", "ziglang", "cc"]
    monkeypatch.setenv("CC", "ccache gcc-14")
    assert compile_cache.compiler() == ["ccache", "gcc-14"]


def test_what_was_compiled_is_not_compiled_again(machine, monkeypatch, capsys):
    monkeypatch.setattr(store, "COMPILED", True)
    monkeypatch.setattr(sys, "argv", ["compile_cache"])
    compile_cache.main()
    assert capsys.readouterr().out == "the streaming cache is compiled\n"


def test_what_the_compiler_says_is_shown(tmp_path, capsys):
    with pytest.raises(SystemExit, match="failed, see above"):
        compile_cache.run([sys.executable, "-c", "import sys; sys.exit('no such type')"], tmp_path)
    assert "no such type" in capsys.readouterr().err
