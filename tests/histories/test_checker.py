"""The judge of histories passes good ones, and each lie that a log could tell is found.

protocols.md section 1, "Must hold": an acknowledged entry is never lost; no two owners both get
acknowledgements; every reader sees the same entry under the same id for ever.
"""

import copy
import json
import subprocess

import pytest

from tests.histories.doctored import HEADER, LIES, good

SEEDS = range(1, 9)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_good_histories_are_linearizable(checker, tmp_path):
    paths = [write(tmp_path / f"{seed}.jsonl", good(seed)) for seed in SEEDS]
    judged = checker.judge(*paths)
    assert [(one.verdict, one.findings) for one in judged] == [("linearizable", [])] * len(paths)
    assert sum(one.unknown_there for one in judged) > 5
    assert sum(one.unknown_not_there for one in judged) > 5
    assert sum(one.failed for one in judged) > 5


def finds(checker, folder, good, lie):
    """Judge good histories of which one thing was made a lie, and look at what is said of it."""
    doctor, words = lie
    paths = []
    for seed in SEEDS:
        lines = good(seed)
        doctored = copy.deepcopy(lines)
        doctor(doctored)
        assert doctored != lines
        paths.append(write(folder / f"{seed}.jsonl", doctored))
    for told in checker.judge(*paths):
        assert told.verdict == "violated", told
        assert any(finding.startswith(words) for finding in told.findings), told


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_found_and_named(checker, tmp_path, lie):
    finds(checker, tmp_path, good, LIES[lie])


def test_a_history_that_was_not_read_to_its_end_is_not_called_linearizable(checker, tmp_path):
    lines = good(1)
    no_end = [one for one in lines if not one.get("final")]
    no_read = [one for one in lines if one["type"] != "read" or one["from"] != "earliest"]
    judged = checker.judge(
        write(tmp_path / "no_end.jsonl", no_end), write(tmp_path / "no_read.jsonl", no_read)
    )
    assert [one.verdict for one in judged] == ["incomplete", "incomplete"]
    assert "no final bounds" in judged[0].findings[0]
    assert "begins at earliest" in judged[1].findings[0]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        ([{**HEADER, "version": 2}], "version 2"),
        ([{"type": "event"}], "line 1: the first line"),
        ([HEADER, {"type": "purge", "outcome": "ok", "return_ns": 1}], 'type "purge"'),
        ([HEADER, {"type": "append", "outcome": "perhaps"}], 'outcome "perhaps"'),
        ([HEADER, {"type": "append", "outcome": "ok", "return_ns": 1, "values": ["x"]}], "ranges"),
        ([HEADER, {"type": "read", "outcome": "ok", "call_ns": 2, "return_ns": 1}], "after its"),
        ([HEADER, {"type": "bounds", "outcome": "ok", "return_ns": 1, "next": "x"}], '"x" is not'),
    ],
)
def test_what_is_not_of_the_schema_is_refused(checker, tmp_path, lines, complaint):
    path = write(tmp_path / "history.jsonl", lines)
    done = subprocess.run(
        [str(checker.program), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "remedy:" in done.stderr
