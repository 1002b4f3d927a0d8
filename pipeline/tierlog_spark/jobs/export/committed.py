"""What an export holds: the files that its commits name, and nothing else in its folder.

Invariant: a file that is listed was written whole, and its events are in no other that is listed.
"""

import hashlib
from dataclasses import dataclass

from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import stream_name
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.log import CommittedFile, record_numbers
from tierlog_spark.jobs.export.records import files_that_count
from tierlog_spark.jobs.export.targets import Target, target_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A file of an export; ``path`` is whole, a file's or s3://BUCKET/KEY."""

    path: str
    commit: int
    rows: int
    bytes: int
    sha256: str


def committed_files(
    to: str, stream: str, s3: S3Settings, *, since: int = 0, verify: bool = False
) -> list[Committed]:
    """Return the files of an exported stream, those of commits behind ``since``, in their order.

    ``verify`` reads all of them. Not to be called on a running loop.
    """
    return files_of(target_of(to, s3).below(stream_name(stream)), since=since, verify=verify)


def files_of(target: Target, *, since: int = 0, verify: bool = False) -> list[Committed]:
    """Return the files of an exported stream's place."""
    names = target.names()
    counting = files_that_count(target, names, since=since)
    if not record_numbers(names):
        raise RefusedError(
            f"there is no export at {target.place}",
            reason=Reason.NO_SUCH_ENTRY,
            remedy="Name the place that was exported to, and the stream",
        )
    found = [(one.file.name, _committed(target, one)) for one in counting]
    if verify:
        for name, one in found:
            _verify(target.get([name])[0], one)
    return [one for _, one in found]


def _committed(target: Target, found: CommittedFile) -> Committed:
    file = found.file
    return Committed(
        path=f"{target.place}/{file.name}",
        commit=found.commit,
        rows=file.rows,
        bytes=file.bytes,
        sha256=file.sha256,
    )


def _verify(body: bytes | None, file: Committed) -> None:
    if body is not None and hashlib.sha256(body).hexdigest() == file.sha256:
        return
    raise CorruptError(
        f"{file.path} is {'gone' if body is None else 'not what was written'}",
        remedy="Export the stream to another place, and read that",
    )
