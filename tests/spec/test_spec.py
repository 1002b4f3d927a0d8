"""The protocol as a model (protocols.md section 1): what must hold does, and mistakes show.

This is a share of ``make spec``: small models as a whole, and some of the mistakes. The code has
the same steps under the same names.
"""

from __future__ import annotations

import pytest

from tests.spec.models import FOLDER, MODELS, check_mistake, check_model, mistakes, source
from tests.spec.tlc import Tlc, TlcError, read_output

MISTAKES = {one.name: one for one in mistakes()}
CI_MODELS = ("Ledger-pair", "Ledger-live", "Stream-owners", "Drain-node")
CI_MISTAKES = (
    "a late acknowledgement of a replaced node counts",
    "a recovery read does not fence (only the LAC read does)",
    "recovery starts after the LAC, before the last segment (an invalid fragment)",
    "absent said by fewer than Qw - Qa + 1",
    "retiring leaves the cookie as it is",
)


@pytest.fixture(scope="module")
def tlc() -> Tlc:
    return Tlc()


@pytest.mark.parametrize("model", CI_MODELS)
def test_what_must_hold_holds_in_the_whole_space_of_a_small_model(tlc: Tlc, model: str):
    verdict = check_model(tlc, model)
    assert verdict.broken is None, verdict.output
    assert verdict.distinct > 100


@pytest.mark.parametrize("name", CI_MISTAKES)
def test_a_mistake_gives_a_counterexample(tlc: Tlc, name: str):
    verdict = check_mistake(tlc, MISTAKES[name])
    assert MISTAKES[name].is_caught(verdict), verdict.output
    assert verdict.steps > 1


def test_every_mistake_is_a_change_of_one_line():
    for mistake in MISTAKES.values():
        right = source(mistake.model)
        wrong = mistake.made_in(right)
        changed = [
            (a, b) for a, b in zip(right.splitlines(), wrong.splitlines(), strict=True) if a != b
        ]
        assert len(changed) == 1, mistake.name


def test_the_readme_names_every_model_and_every_mistake():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    missing = [name for name in (*MISTAKES, *MODELS) if name not in readme]
    assert missing == []


def test_the_readme_s_table_says_what_each_mistake_breaks_and_which_breaks_nothing_on_purpose():
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    for mistake in MISTAKES.values():
        (row,) = (line for line in lines if line.startswith(f"| {mistake.name} |"))
        _, model, breaks, steps = (cell.strip() for cell in row.strip("|").split("|"))
        assert model == f"`{mistake.model}`"
        assert ("(breaks nothing)" in mistake.name) is mistake.breaks_nothing
        if mistake.breaks_nothing:
            assert (breaks, steps) == ("**nothing, on purpose**", "none")
        else:
            assert breaks.strip("`") in mistake.breaks.split("|")
            assert int(steps) > 1


def test_a_run_that_came_to_no_verdict_is_not_taken_for_one():
    with pytest.raises(TlcError, match="no verdict"):
        read_output("Error: Parsing or semantic analysis failed.\n")
    with pytest.raises(TlcError):
        read_output("10 states generated, 5 distinct states found, 2 states left on queue.\n")
