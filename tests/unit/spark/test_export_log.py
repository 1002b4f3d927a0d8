"""The log of an export: a file counts when a commit names it, and none is deleted that may yet."""

import pytest

from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog_spark.jobs.export.log import (
    ExportedFile,
    Kind,
    Record,
    checkpoint_name,
    decode_checkpoint,
    decode_record,
    encode_checkpoint,
    encode_record,
    file_name,
    file_number,
    files_of_run,
    left_behind,
    live_numbers,
    record_name,
    record_numbers,
)

RUN, OTHER = "a" * 32, "b" * 32
STREAM = StreamName("orders")


def at(ledger_id, entry_id=0):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def data(number, *, run=RUN, task=0, date="2026-11-22"):
    return file_name(date=date, number=number, run=run, task=task, index=0)


def record(number, kind=Kind.COMMIT, files=(), *, run=RUN, cleaned_below=1):
    return Record(
        number=number,
        kind=kind,
        run=run,
        start={STREAM: at(1)},
        to={STREAM: at(2, 7)},
        incarnations={},
        cleaned_below=cleaned_below,
        written_ms=5,
        files=tuple(ExportedFile(name=one, rows=1, bytes=2, sha256="") for one in files),
    )


def test_what_a_run_wrote_for_a_record_is_its_own():
    mine = [data(7), data(7, task=3)]
    others = [data(6), data(7, run=OTHER), record_name(7), f"date=x/part-{7:020}-{RUN}-left"]
    assert files_of_run([*others, *mine], 7, RUN) == mine


def test_a_record_is_read_as_it_was_written():
    one = record(7, files=[data(7), data(7, task=3)])
    assert decode_record(encode_record(one), number=7, place="here") == one


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no record"),
        (b"[]", "no record"),
        (encode_record(record(7))[:-20], "no record"),
        (encode_record(record(8)), "says that it is record 8"),
        (encode_record(record(7)).replace(b'"kind":"commit"', b'"kind":"other"'), "no record"),
        (encode_record(record(7)).replace(b'"orders":"2:7"', b'"orders":"2"'), "not a position"),
    ],
)
def test_what_is_no_record_is_told_with_its_place(raw, words):
    with pytest.raises((CorruptError, RefusedError), match=f"^here: .*{words}"):
        decode_record(raw, number=7, place="here")


def test_a_record_of_the_future_is_refused():
    raw = encode_record(record(7)).replace(b'"version":1', b'"version":2')
    with pytest.raises(RefusedError, match="here: export log has format version 2") as caught:
        decode_record(raw, number=7, place="here")
    assert "Upgrade" in caught.value.remedy


def test_names_say_what_is_a_record_and_what_is_data():
    names = [record_name(2), record_name(1), data(1), "_tierlog_commits/.half", "notes.txt"]
    assert record_numbers(names) == [1, 2]
    assert [file_number(one) for one in names] == [None, None, 1, None, None]
    assert file_number("date=2026-11-22/part-0.parquet") is None


def test_records_that_are_gone_are_an_error():
    assert live([]) == (0, [])
    assert live([1, 2, 3]) == (0, [1, 2, 3])
    assert live([1, 4, 5, 6], checkpoints=[2, 4]) == (4, [5, 6])
    for numbers, checkpoints in (([2, 3], []), ([1, 3], []), ([6], [4]), ([3], [4])):
        with pytest.raises(CorruptError, match=r"here/_tierlog_commits/0.*the record is gone"):
            live(numbers, checkpoints=checkpoints)


def live(numbers, checkpoints=()):
    names = [*map(record_name, numbers), *map(checkpoint_name, checkpoints)]
    return live_numbers(names, "here")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no checkpoint"),
        (encode_checkpoint(8, []), "says that it is checkpoint 8"),
        (encode_checkpoint(7, []).replace(b"[]", b'[{"name":"x"}]'), "no checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_told_with_its_place(raw, words):
    with pytest.raises(CorruptError, match=f"^here: .*{words}"):
        decode_checkpoint(raw, number=7, place="here")


def test_what_no_commit_names_is_left_behind():
    kept, lost_task, lost_run = data(2), data(2, task=9), data(3, run=RUN)
    records = [record(1, Kind.CLAIM), record(2, files=[kept])]
    names = [kept, lost_task, lost_run, "notes.txt", record_name(1)]
    found = left_behind(names, records, cleaned_below=1, below=4)
    assert found == [lost_task, lost_run]


def test_a_batch_of_a_run_that_was_overtaken_is_left_behind():
    # The claim took the number that the other run's batch was written for.
    mine, theirs = data(4, run=OTHER), data(3)
    records = [record(3, Kind.CLAIM, run=OTHER), record(4, files=[mine], run=OTHER)]
    assert left_behind([mine, theirs], records, cleaned_below=3, below=5) == [theirs]


def test_files_are_safe_that_a_commit_may_still_name_or_that_were_looked_at():
    names = [data(5), data(1)]
    assert left_behind(names, [record(3)], cleaned_below=3, below=5) == []
