"""The judge of attributes passes good histories, and finds each lie that a register could tell."""

import subprocess

import pytest

from tests.histories.attribute_recorder import verb_name
from tests.histories.doctored_attributes import HEADER, LIES, good
from tests.histories.test_checker import SEEDS, finds, write
from tierlog.format.entry import Verb

ONE = {"key": "k", "verb": "replace", "value": 1}
ANSWERED = {"outcome": "ok", "call_ns": 1, "return_ns": 2}


def test_good_histories_are_linearizable(checker, tmp_path):
    paths = [write(tmp_path / f"{seed}.jsonl", good(seed)) for seed in SEEDS]
    judged = checker.judge(*paths)
    assert [(one.verdict, one.findings) for one in judged] == [("linearizable", [])] * len(paths)
    assert min(one.open for one in judged) > 3
    assert min(one.checks_failed for one in judged) > 20
    assert min(one.acknowledged for one in judged) > 60
    assert min(one.reads for one in judged) > 100
    assert sum(one.failed for one in judged) > 20


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_found_and_named(checker, tmp_path, lie):
    finds(checker, tmp_path, good, LIES[lie])


def test_an_update_whose_answer_was_lost_may_be_there_later_or_never(checker, tmp_path):
    """Three calls that are open: one is seen at once, one late, one not at all."""
    values = [None, 5, 5, 7]
    lines = [HEADER]
    for step, amount in enumerate((5, 2, 9)):
        update = {"key": "k", "verb": "accumulate", "value": amount}
        lost = {"type": "update", "client": step, "outcome": "unknown", "updates": [update]}
        lines.append({**lost, "call_ns": 10 + step})
    for step, value in enumerate(values):
        told = {"type": "get", "outcome": "ok", "registers": [{"key": "k", "value": value}]}
        lines.append({**told, "call_ns": 100 + 10 * step, "return_ns": 105 + 10 * step})
    (good_one,) = checker.judge(write(tmp_path / "good.jsonl", lines))
    assert (good_one.verdict, good_one.open) == ("linearizable", 3)
    lines[-1]["registers"][0]["value"] = 2
    (bad,) = checker.judge(write(tmp_path / "bad.jsonl", lines))
    assert bad.verdict == "violated"


def test_an_attribute_that_was_not_read_at_the_end_is_not_called_linearizable(checker, tmp_path):
    lines = good(1)
    unread = [one for one in lines if one["type"] != "get" or one["registers"][0]["key"] != "sum"]
    (told,) = checker.judge(write(tmp_path / "unread.jsonl", unread))
    assert told.verdict == "incomplete"
    assert told.findings == ["no get of sum after its last update"]


def test_the_judge_knows_the_verbs_there_are(checker, tmp_path):
    lines = [HEADER]
    for number, verb in enumerate(Verb):
        change = {"key": f"k{number}", "verb": verb_name(verb), "value": 1}
        lines.append({"type": "update", "updates": [change], "outcome": "unknown", "call_ns": 1})
    (told,) = checker.judge(write(tmp_path / "verbs.jsonl", lines))
    assert told.verdict == "linearizable"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([{**HEADER, "of": "queues"}], 'a history of "queues"'),
        ([HEADER, {"type": "append", **ANSWERED}], 'type "append" is none of update'),
        ([HEADER, {"type": "update", **ANSWERED}], "an update of nothing"),
        ([HEADER, {"type": "get", **ANSWERED}], "a get of nothing"),
        (
            [HEADER, {"type": "update", **ANSWERED, "updates": [{**ONE, "verb": "add"}]}],
            'verb "add" is none of accumulate',
        ),
        (
            [
                HEADER,
                {"type": "update", "outcome": "unknown", "updates": [ONE], "found": {"key": "k"}},
            ],
            "was answered",
        ),
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
