"""A run of an export that dies at any of its steps leaves each entry in one file that counts."""

import asyncio
import functools
import hashlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.spark.bucket_kit import STREAM, ManifestBucket
from tierlog.ports.files import Buffer
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export import ExportOptions, committed_files, job
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.log import checkpoint_numbers, file_name, record_numbers
from tierlog_spark.jobs.export.records import shorten
from tierlog_spark.jobs.export.steps import Step
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.export.writing import FileRow, WriteTask
from tierlog_spark.jobs.frame import JobRun

S3 = S3Settings(bucket="b")
RUNS_BEFORE = 4
"""Enough for a checkpoint that takes another one's place, and records that go with it."""


class Killed(BaseException):
    """Nobody has the time to clean up."""


@dataclass(frozen=True)
class DyingTarget(FolderTarget):
    """A folder whose writer dies once so many steps are done."""

    left: Counter[str]

    def _step(self) -> None:
        if not self.left["steps"]:
            raise Killed
        self.left["steps"] -= 1

    def put(self, name: str, body: Buffer) -> None:
        self._step()
        FolderTarget.put(self, name, bytes(body)[: len(body) // 2])
        self._step()
        FolderTarget.put(self, name, body)
        self._step()

    def put_new(self, name: str, body: bytes) -> bool:
        self._step()
        if not self.left["steps"]:
            self._die_in(name, body)
        self._step()
        is_ours = FolderTarget.put_new(self, name, body)
        self._step()
        return is_ours

    def _die_in(self, name: str, body: bytes) -> None:
        """Leave what a process leaves that is killed when the file has no name yet."""
        child = os.fork()
        if child == 0:
            try:
                os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                FolderTarget.put_new(self, name, body)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._step()
            FolderTarget.delete(self, [name])


def write_batch(_: JobRun, __: ExportOptions, step: Step, task: WriteTask) -> list[FileRow]:
    """Write a file for each of two tasks, of which one is lost: it says what is in the batch."""
    rows: list[FileRow] = []
    for number in range(2):
        name = file_name(date="2026-11-22", number=task.number, run=task.run, task=number, index=0)
        body = " ".join(f"{one.start} to {one.stop}" for one in step.pieces).encode()
        task.target.put(name, body)
        sha256 = hashlib.sha256(body).hexdigest()
        rows = [{"name": name, "rows": 1, "bad": 0, "bytes": len(body), "sha256": sha256}]
    return rows


def run(target: FolderTarget) -> Any:
    spark = cast("Any", SimpleNamespace())
    # As many bytes as the kit's ledgers have entries: a batch is one of these.
    options = ExportOptions(streams=(STREAM,), to="", s3=S3, batch_bytes=10)
    return export_to(JobRun(spark=spark), options, target)


def killed_at(steps: int, folder: Path) -> bool:
    try:
        run(DyingTarget(folder, Counter(steps=steps)))
    except Killed:
        return True
    return False


def exported(folder: Path) -> list[str]:
    found = committed_files(str(folder), STREAM, S3, verify=True)
    return [Path(one.path).read_text(encoding="utf-8") for one in found]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_run_that_dies_at_any_step_leaves_each_entry_in_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deaths: int
) -> None:
    bucket = ManifestBucket(monkeypatch)
    monkeypatch.setattr(job, "write_batch", write_batch)
    monkeypatch.setattr(job, "shorten", functools.partial(shorten, records_max=2))
    first, before = 11, tmp_path / "before"
    for number in range(RUNS_BEFORE):
        asyncio.run(bucket.write(first + number))
        run(FolderTarget(before))
    asyncio.run(bucket.write(first + RUNS_BEFORE, first + RUNS_BEFORE + 1))
    wanted = [f"{first + number}:0 to {first + number}:10" for number in range(RUNS_BEFORE + 2)]
    checkpoints = checkpoint_numbers(FolderTarget(before / STREAM).names())
    assert checkpoints

    for steps in range(100):
        folder = tmp_path / str(steps)
        shutil.copytree(before, folder)
        died = [killed_at(steps, folder) for _ in range(deaths)]
        # What counts then is a beginning of it, and each file is whole.
        some = exported(folder)
        assert some == wanted[: len(some)]
        # The last one finds what its own predecessor lost.
        for _ in range(2):
            run(FolderTarget(folder))
            assert exported(folder) == wanted
        names = FolderTarget(folder / STREAM).names()
        counting = {one.path for one in committed_files(str(folder), STREAM, S3)}
        lying = {f"{folder / STREAM}/{one}" for one in names if one.endswith(".parquet")}
        assert lying == counting
        assert [one for one in names if "/." in one] == []
        if not died[0]:
            break
    else:
        raise AssertionError("it never came to the end")
    assert steps > 20
    assert checkpoint_numbers(names) > checkpoints
    assert record_numbers(names)[0] > 1
