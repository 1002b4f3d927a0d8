"""Places for exports at which something happens at a wished moment; and a run that dies there.

`python -m tests.integration.spark_targets OPTIONS` exports with a worker that is killed behind its
first file, once, and a driver that is killed right before its second commit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierlog.ports.files import Buffer
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.log import record_name
from tierlog_spark.jobs.export.options import ExportOptions
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.jobs.session import job_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CLAIM, FIRST, SECOND = (record_name(number) for number in (1, 2, 3))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class DeadlyTarget(FolderTarget):
    """`marks` remembers that the worker was killed already."""

    marks: Path

    def put(self, name: str, body: Buffer) -> None:
        FolderTarget.put(self, name, body)
        try:
            (self.marks / "worker").touch(exist_ok=False)
        except FileExistsError:
            return
        die()

    def put_new(self, name: str, body: bytes) -> bool:
        if name == SECOND:
            die()
        return FolderTarget.put_new(self, name, body)


@dataclass(frozen=True)
class OvertakenTarget(FolderTarget):
    """Before its first commit, somebody else does something."""

    first: Callable[[], object]

    def put_new(self, name: str, body: bytes) -> bool:
        if name == FIRST:
            self.first()
        return FolderTarget.put_new(self, name, body)

    def __reduce__(self) -> tuple[object, ...]:
        # Tasks only write files.
        return FolderTarget, (self.folder,)


@dataclass(frozen=True)
class WatchedTarget(FolderTarget):
    """Notes what the driver deletes."""

    deleted: list[str]

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        self.deleted.extend(wanted)
        FolderTarget.delete(self, wanted)

    def __reduce__(self) -> tuple[object, ...]:
        # Tasks only write files.
        return FolderTarget, (self.folder,)


@dataclass(frozen=True)
class DeafTarget(FolderTarget):
    """Writes records, and the answer is lost."""

    error: Exception

    def put_new(self, name: str, body: bytes) -> bool:
        FolderTarget.put_new(self, name, body)
        raise self.error


def main() -> None:
    given = json.loads(sys.argv[1])
    options = ExportOptions(
        streams=("s",),
        to=given["to"],
        s3=S3Settings.model_validate(given["s3"]),
        batch_bytes=given["batch_bytes"],
        file_bytes=given["file_bytes"],
    )
    target = DeadlyTarget(Path(given["to"]), Path(given["marks"]))
    with job_session(cores=2, memory_mb=512) as spark:
        export_to(JobRun(spark=spark), options, target)


if __name__ == "__main__":
    main()
