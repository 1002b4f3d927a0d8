"""Every event that is logged has a meaning, and every meaning an event."""

import ast

import pytest

from tools.log_event_meanings import MEANINGS
from tools.log_events import LEVELS, UnclearNameError, events_in, found_events, page


def test_each_event_in_the_code_is_explained_and_nothing_else_is():
    found = found_events()
    assert len(found) > 200
    assert sorted(found.keys() - MEANINGS.keys()) == [], "say what these mean"
    assert sorted(MEANINGS.keys() - found.keys()) == [], "nobody logs these any more"


def test_each_meaning_is_one_short_sentence_of_its_own():
    assert [name for name, text in MEANINGS.items() if not 15 < len(text) < 90] == []
    assert [name for name, text in MEANINGS.items() if text[0].islower() or text[-1] == "."] == []
    assert len(set(MEANINGS.values())) == len(MEANINGS)


def test_names_are_of_one_form():
    odd = {name for name in MEANINGS if not all(part.isidentifier() for part in name.split("."))}
    assert odd == set()
    assert {name for name in MEANINGS if name.count(".") != 1} == {"unexpected_error"}


def test_an_event_at_a_place_where_people_look_says_why():
    """A warning or an error has a cause, or fields that say what it is about."""
    bare = [
        name
        for name, one in found_events().items()
        if one.levels & {"warning", "error"} and not one.fields
    ]
    assert bare == []


def _found(text):
    head = "import structlog\nlog = structlog.get_logger()\n"
    return list(events_in(ast.parse(head + text), "here.py"))


@pytest.mark.parametrize("level", LEVELS)
def test_calls_of_each_level_are_found(level):
    fields = {"cause", "exception"} if level == "exception" else {"cause"}
    assert _found(f"log.{level}('a.b', cause=1)") == [("a.b", level, fields)]


def test_what_is_bound_to_a_logger_counts_as_its_field():
    assert _found("def f():\n    told = log.bind(x=1)\n    told.info('a.b', y=2)") == [
        ("a.b", "info", {"x", "y"})
    ]
    assert _found("log.bind(x=1).warning('a.b')") == [("a.b", "warning", {"x"})]
    assert _found("log.error('a.b', exc_info=e)") == [("a.b", "error", {"exception"})]


@pytest.mark.parametrize("text", ["log.info(name)", "log.info(f'a.{x}')", "log.info()"])
def test_a_name_that_is_made_at_run_time_is_refused(text):
    with pytest.raises(UnclearNameError, match=r"here\.py:3"):
        _found(text)


def test_the_logger_of_another_module_counts():
    text = "from tierlog.adapters.kafka.common import log\nlog.info('a.b', x=1)"
    assert list(events_in(ast.parse(text), "here.py")) == [("a.b", "info", {"x"})]


def test_what_is_no_logger_is_left_alone():
    assert _found("other.info('a.b')\nmath.log.warning('x')") == []


def test_the_page_has_a_row_for_each():
    text = page()
    assert all(f"| `{name}` |" in text for name in MEANINGS)
    assert "| `offload.requested` | info | scheduler |" in text
