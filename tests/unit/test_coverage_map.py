"""The coverage map is whole, true to the markers, and refuses what would make it lie."""

from pathlib import Path
from textwrap import dedent

import pytest

from tools import coverage_map
from tools.coverage_map import Exceptions, MapError, Row, Showing

ROOT = Path(__file__).resolve().parents[2]
REAL = coverage_map.read_rows(ROOT / "docs" / "seed-checklist.tsv")


def test_the_map_of_this_repository_is_whole():
    """No row absent, no unknown id, each erratum decided, no stale exception."""
    _, _, wrong = coverage_map.generate(ROOT)
    assert wrong == []


def test_the_committed_map_is_up_to_date():
    text, _, _ = coverage_map.generate(ROOT)
    committed = (ROOT / "docs" / "coverage.toml").read_text(encoding="utf-8")
    assert committed == text, "run: make coverage"


def test_the_checklist_is_read_whole():
    assert len(REAL) == 297
    assert {row_id[0] for row_id in REAL} == set(coverage_map.DOCUMENTS)
    assert {row_id for row_id, row in REAL.items() if row.is_erratum} == {
        "A25", "A48", "A64", "A68", "A70", "B23", "C59", "D45", "D55", "E20", "E56",
    }  # fmt: skip


def _markers(tmp_path: Path, text: str):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(dedent(text))
    return coverage_map.read_markers(tmp_path / "tests")


def test_markers_are_found_on_functions_classes_modules_and_parameters(tmp_path):
    found = _markers(
        tmp_path,
        '''
        import pytest

        pytestmark = [pytest.mark.integration, pytest.mark.covers("A1")]

        @pytest.mark.covers("A2")
        class TestIt:
            pytestmark = pytest.mark.covers("A3")

            @pytest.mark.covers("A4", "A5")
            async def test_in_a_class(self):
                """Shows in two lines
                what it shows.

                And more.
                """

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.covers("A6"))])
        def test_a_parameter(x): ...

        def helper(): ...
        ''',
    )
    where = "tests/test_it.py"
    in_class = Showing(f"{where}::TestIt::test_in_a_class", "Shows in two lines what it shows.")
    parameter = Showing(f"{where}::test_a_parameter", "a parameter")
    assert found == {
        "A1": [in_class, parameter],
        "A2": [in_class],
        "A3": [in_class],
        "A4": [in_class],
        "A5": [in_class],
        "A6": [parameter],
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("@pytest.mark.covers(ROWS)\ndef test_x(): ...", "plain strings"),
        ("@pytest.mark.covers('A1', rows='A2')\ndef test_x(): ...", "plain strings"),
        ("@pytest.mark.covers()\ndef test_x(): ...", "plain strings"),
        ("@pytest.mark.covers('A1')\ndef helper(): ...", "attached to no test"),
    ],
)
def test_a_marker_that_can_not_be_counted_is_an_error(tmp_path, text, complaint):
    with pytest.raises(MapError, match=complaint):
        _markers(tmp_path, text)


ROWS = {
    "A1": Row("A1", "promise", "one"),
    "A2": Row("A2", "ERRATUM", "two"),
    "A3": Row("A3", "format", "three (ERRATUM)"),
}
SHOWN = [Showing("tests/test_x.py::test_x", "x")]


def _whole() -> Exceptions:
    return Exceptions(
        not_applicable={"A2": ("settled", "ADR-0001")},
        missing={"A3": "the thing"},
        decided={"A2": "ADR-0001", "A3": "ADR-0001"},
    )


def test_a_whole_map_has_nothing_wrong_and_prints_each_row_once():
    assert coverage_map.check(ROWS, {"A1": SHOWN}, _whole(), {"ADR-0001"}) == []
    text = coverage_map.render(ROWS, {"A1": SHOWN}, _whole())
    for line in ("[A1]", "[A2]", "[A3]", 'missing = "the thing"', 'not_applicable = "settled"'):
        assert text.count(line) == 1
    assert "3      1     1        1" in coverage_map.summary(ROWS, {"A1": SHOWN}, _whole())


def test_each_way_to_be_wrong_is_named():
    def wrong(markers, exceptions, adrs=frozenset({"ADR-0001"})):
        return "\n".join(coverage_map.check(ROWS, markers, exceptions, set(adrs)))

    assert "A1 is absent" in wrong({}, _whole())
    assert "A9 is not in the checklist" in wrong({"A1": SHOWN, "A9": SHOWN}, _whole())
    assert "A2 is said not to apply, yet shown" in wrong({"A1": SHOWN, "A2": SHOWN}, _whole())
    assert "drop the exception" in wrong({"A1": SHOWN, "A3": SHOWN}, _whole())
    assert "ADR-0001 is not in docs/adr" in wrong({"A1": SHOWN}, _whole(), ())
    undecided = _whole()
    del undecided.decided["A3"]
    assert "A3 is an erratum that no" in wrong({"A1": SHOWN}, undecided)


def test_an_exception_names_rows_that_exist_and_each_once(tmp_path):
    path = tmp_path / "exceptions.toml"
    path.write_text('[[missing]]\nrows = ["C10-C14"]\nwhat = "x"\n')
    assert list(coverage_map.read_exceptions(path, REAL).missing) == [
        "C10", "C11", "C12", "C13", "C14",
    ]  # fmt: skip
    path.write_text('[[missing]]\nrows = ["C10-C99"]\nwhat = "x"\n')
    with pytest.raises(MapError, match="no row C99"):
        coverage_map.read_exceptions(path, REAL)
    path.write_text('[[missing]]\nrows = ["C10", "C09-C11"]\nwhat = "x"\n')
    with pytest.raises(MapError, match="C10 stands there twice"):
        coverage_map.read_exceptions(path, REAL)
