"""A log of many records stays short, and says the same of which files count, whoever reads when."""

import pytest

from tests.unit.spark.test_export_log import data, record
from tierlog.model.errors import CorruptError
from tierlog_spark.jobs.export.committed import files_of
from tierlog_spark.jobs.export.log import Kind, encode_record, record_name, record_numbers
from tierlog_spark.jobs.export.records import files_that_count, shorten
from tierlog_spark.jobs.export.targets import FolderTarget

KEPT = 4


def written(target, number, *, run_begins):
    """Write a run's claim, or a commit of two files."""
    if run_begins:
        one = record(number, Kind.CLAIM)
    else:
        one = record(number, files=[data(number), data(number, task=1)])
    target.put_new(record_name(number), encode_record(one))


def counting(target, **how):
    return [(one.commit, one.file.name) for one in files_that_count(target, target.names(), **how)]


def test_checkpoints_stand_for_records_and_a_reader_finds_what_it_listed(tmp_path):
    target, wanted, listed = FolderTarget(tmp_path), [], []
    for number in range(1, 41):
        # A run: a claim, and two batches.
        begins = number % 3 == 1
        written(target, number, run_begins=begins)
        if begins:
            shorten(target, target.names(), cleaned_below=number - 2, records_max=KEPT)
        else:
            wanted += [(number, data(number)), (number, data(number, task=1))]
        assert counting(target) == wanted
        for since in (0, 7, number):
            assert counting(target, since=since) == [one for one in wanted if one[0] > since]
        # Who listed the log a while ago reads what it listed.
        listed.append((target.names(), len(wanted)))
        names, count = listed[max(0, len(listed) - KEPT)]
        assert len(files_that_count(target, names)) == count
    assert len(record_numbers(target.names())) <= 3 * KEPT
    assert [(one.commit, one.rows) for one in files_of(target)] == [(n, 1) for n, _ in wanted]


def test_a_record_that_comes_under_a_number_of_before_does_not_count(tmp_path):
    target = FolderTarget(tmp_path)
    for number in range(1, 20):
        written(target, number, run_begins=number == 1)
        shorten(target, target.names(), cleaned_below=number - 1, records_max=KEPT)
    before = counting(target)
    assert record_numbers(target.names())[0] > 2
    late = record(2, files=[data(2, task=9)])
    assert target.put_new(record_name(2), encode_record(late))
    assert counting(target) == before


def test_a_run_that_ends_behind_the_checkpoint_leaves_what_the_next_one_deletes(tmp_path):
    target = FolderTarget(tmp_path)

    class Dies(FolderTarget):
        def delete(self, names):
            raise ConnectionError

    for number in range(1, 11):
        written(target, number, run_begins=number == 1)
    shorten(target, target.names(), cleaned_below=6, records_max=KEPT)
    with pytest.raises(ConnectionError):
        shorten(Dies(tmp_path), target.names(), cleaned_below=10, records_max=KEPT)
    wanted = counting(target)
    assert wanted[-1] == (10, data(10, task=1))
    for number in range(11, 21):
        written(target, number, run_begins=False)
    shorten(target, target.names(), cleaned_below=20, records_max=KEPT)
    assert [one for one in counting(target) if one[0] <= 10] == wanted
    assert record_numbers(target.names()) == list(range(10, 21))


def test_a_log_without_a_record_behind_its_checkpoint_is_damaged(tmp_path):
    target = FolderTarget(tmp_path)
    for number in range(1, 8):
        written(target, number, run_begins=number == 1)
    shorten(target, target.names(), cleaned_below=7, records_max=KEPT)
    target.delete([record_name(7)])
    with pytest.raises(CorruptError, match="the record is gone"):
        files_of(target)
