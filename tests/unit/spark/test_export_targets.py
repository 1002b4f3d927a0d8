"""A folder as the place of an export: whole files, and a name that is given once."""

import errno
import os
import pickle
from pathlib import Path

import pytest

from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.targets import BucketTarget, FolderTarget, target_of


def test_a_folder_keeps_whole_files_and_gives_a_name_once(tmp_path):
    target = FolderTarget(tmp_path / "a").below("s")
    assert target.names() == []
    assert target.put_new("log/1", b"one")
    assert target.put_new("log/1", b"one"), "the same again is the answer that got lost"
    assert not target.put_new("log/1", b"two")
    target.put("date=x/f", b"data")
    again = pickle.loads(pickle.dumps(target))
    assert again.names() == ["date=x/f", "log/1"]
    assert again.get(["log/1", "nothing", "date=x/f"]) == [b"one", None, b"data"]
    target.delete(["date=x/f", "nothing"])
    assert target.names() == ["log/1"]


def test_a_writer_whose_file_was_cleaned_away_meanwhile_is_told_who_has_the_name(
    tmp_path, monkeypatch
):
    target, link = FolderTarget(tmp_path), os.link

    def late(beside, path):
        target.put_new(Path(path).name, b"theirs")
        Path(beside).unlink()
        link(beside, path)

    def put_late(name):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "link", lambda *given: (patch.setattr(os, "link", link), late(*given))
            )
            return target.put_new(name, b"mine")

    assert not put_late("1.json")
    assert target.get(["1.json"]) == [b"theirs"]
    assert target.names() == ["1.json"]


@pytest.mark.parametrize("hidden", ["_tierlog_commits", "s"])
def test_a_folder_that_can_not_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch, hidden):
    target = FolderTarget(tmp_path / "s")
    target.put_new("_tierlog_commits/1.json", b"one")
    target.put("date=x/f", b"data")
    listed = os.scandir

    def scandir(folder):
        if Path(folder).name == hidden:
            raise OSError(errno.EIO, "I/O error", folder)
        return listed(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(OSError, match=f"I/O error.*{hidden}"):
            target.names()
    assert target.names() == ["_tierlog_commits/1.json", "date=x/f"]


def test_places_are_folders_or_parts_of_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    s3 = S3Settings(bucket="logs")
    assert target_of("out", s3) == FolderTarget(tmp_path / "out")
    found = target_of("s3://other/some/where/", s3)
    assert isinstance(found, BucketTarget)
    assert (found.s3.bucket, found.prefix) == ("other", "some/where/")
    assert found.below("orders").place == "s3://other/some/where/orders"
    bare = target_of("s3://other", s3).below("orders")
    assert isinstance(bare, BucketTarget)
    assert (bare.prefix, bare.place) == ("orders/", "s3://other/orders")
    for text in ("", "  ", "s3://", "gs://bucket/x"):
        with pytest.raises(RefusedError) as caught:
            target_of(text, s3)
        assert caught.value.remedy
