"""What is read is printed as it comes: a long table a piece at a time, also before an error."""

import json

import pytest

from tierlog.cli import read
from tierlog.cli.read import ReadOutput, Shown


def shown(output):
    return Shown(
        output,
        ("number",),
        payload_of=str.encode,
        row_of=lambda text: {"number": text},
        document_of=lambda text: {"number": text},
    )


def test_a_long_table_is_printed_a_piece_at_a_time(monkeypatch, capsys):
    monkeypatch.setattr(read, "ROWS_AT_ONCE", 3)
    table = shown(ReadOutput.TABLE)
    with table:
        for number in range(7):
            table.add(f"<{number}>")
            assert len(table._rows) < 3
            came = capsys.readouterr().out if number in {2, 5} else ""
            assert all(f"<{one}>" in came for one in range(number - 2, number + 1) if came)
            assert bool(came) == (number in {2, 5})
    assert "<6>" in capsys.readouterr().out


@pytest.mark.parametrize("output", ReadOutput)
def test_what_came_before_an_error_is_printed(output, capsysbinary):
    def read_in_part():
        with shown(output) as printed:
            printed.add("<1>")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        read_in_part()
    out = capsysbinary.readouterr().out
    assert b"<1>" in out
    if output is ReadOutput.JSON:
        with pytest.raises(json.JSONDecodeError):
            json.loads(out)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_list_that_was_ended_is_json_and_a_table_has_a_head(count, capsysbinary):
    for output in (ReadOutput.JSON, ReadOutput.TABLE):
        with shown(output) as printed:
            for number in range(count):
                printed.add(f"<{number}>")
        out = capsysbinary.readouterr().out
        if output is ReadOutput.JSON:
            assert json.loads(out) == [{"number": f"<{number}>"} for number in range(count)]
        else:
            assert out.count(b"number") == 1
