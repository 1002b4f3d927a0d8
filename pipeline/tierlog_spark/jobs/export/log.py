"""The log of an export: which files are of it, and as of which positions (pure).

    <stream>/_tierlog_commits/00000000000000000007.json      one record, a JSON document
    <stream>/date=2026-11-22/part-00000000000000000007-<run>-<task>-<file>.parquet

    version        of this format
    number         the record's, from 1, without a gap
    kind           claim: a run begins; commit: a batch is exported
    run            the run that wrote it, 32 hexadecimal digits
    from, to       for each stream the next position to export, before and after; those of a claim
                   differ where entries went unexported
    incarnations   of each stream
    cleaned_below  among files of records with lower numbers are none that no commit names
    written_ms
    rows, bad      events in the files; those whose payload is not of the schema
    files          name (below <stream>/), rows, bytes, sha256

    <stream>/_tierlog_commits/checkpoint-00000000000000000100.json

has version, number, and files: those of all records up to that number, each with its commit. It
stands for these records from then on; they are deleted once the next checkpoint is there, so that
who listed the log before it finds what it listed. A record that comes under such a number later,
from a run that was overtaken long ago, does not count.

A run claims a number before it writes, and its batches take the numbers behind that. Whoever wants
to write a record under a number that is taken has been overtaken by another run, and ends. So a
file whose number is below that of a claim, and which no commit names, never will be named.

Invariants:
    * A record is written once, as a whole, under the number behind the newest.
    * ``from`` of a record is ``to`` of the one before it: no event is in two commits or in none.
    * There is a record behind each checkpoint.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import StreamName
from tierlog_spark.offsets import Offsets, from_json, to_json

FOLDER: Final = "_tierlog_commits"
_NUMBER_LEN: Final = 20
_RECORD: Final = re.compile(rf"{FOLDER}/(\d{{{_NUMBER_LEN}}})\.json", re.ASCII)
_CHECKPOINT: Final = re.compile(rf"{FOLDER}/checkpoint-(\d{{{_NUMBER_LEN}}})\.json", re.ASCII)
# What a record or a checkpoint was in a folder before it got its name (``targets``).
_BESIDE: Final = re.compile(
    rf"{FOLDER}/\.(?:checkpoint-)?(\d{{{_NUMBER_LEN}}})\.json\.[0-9a-f]{{16}}", re.ASCII
)
_FILE: Final = re.compile(
    rf"date=[^/]+/part-(\d{{{_NUMBER_LEN}}})-[0-9a-f]{{32}}-\d+-\d+\.parquet", re.ASCII
)
# What Spark and Hive call a partition of rows that have no value there: raw entries have no time.
NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"


class Kind(StrEnum):
    """What a record says."""

    CLAIM = "claim"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file that a commit names, below its stream's folder."""

    name: str
    rows: int
    bytes: int
    sha256: str


class CommittedFile(NamedTuple):
    """A file, and the number of the commit that names it."""

    commit: int
    file: ExportedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of the log."""

    number: int
    kind: Kind
    run: str
    start: Offsets
    to: Offsets
    incarnations: Mapping[StreamName, UUID]
    cleaned_below: int
    written_ms: int
    bad: int = 0
    files: tuple[ExportedFile, ...] = ()


def record_name(number: int) -> str:
    """Return the name of a record, below its stream's folder."""
    return f"{FOLDER}/{number:0{_NUMBER_LEN}}.json"


def record_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the records among names, in order."""
    return _numbers(_RECORD, names)


def checkpoint_name(number: int) -> str:
    """Return the name of a checkpoint, below its stream's folder."""
    return f"{FOLDER}/checkpoint-{number:0{_NUMBER_LEN}}.json"


def checkpoint_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the checkpoints among names, in order."""
    return _numbers(_CHECKPOINT, names)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def file_name(*, date: str, number: int, run: str, task: int, index: int) -> str:
    """Return the name of a data file, below its stream's folder: no other attempt has it."""
    return f"date={date}/part-{number:0{_NUMBER_LEN}}-{run}-{task}-{index}.parquet"


def file_number(name: str) -> int | None:
    """Return the number of the record that a data file was written for; None: it is none."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def files_of_run(names: Iterable[str], number: int, run: str) -> list[str]:
    """Return the data files that a run wrote for a record, whether it was written or not."""
    part = f"/part-{number:0{_NUMBER_LEN}}-{run}-"
    return [name for name in names if part in name and file_number(name) == number]


def left_behind(
    names: Iterable[str], records: Iterable[Record], *, cleaned_below: int, below: int
) -> list[str]:
    """Return files of data that no commit names, and those of records, that none ever will be.

    ``records`` has all of the numbers from ``cleaned_below`` up to ``below``, which is a claim's.
    """
    named = {one.name for record in records for one in record.files}

    def is_left(name: str) -> bool:
        if (beside := _BESIDE.fullmatch(name)) is not None:
            return int(beside[1]) < below
        number = file_number(name)
        return number is not None and cleaned_below <= number < below and name not in named

    return sorted(filter(is_left, names))


def encode_record(record: Record) -> bytes:
    """Return a record as it is kept."""
    document = {
        "version": current(Format.EXPORT_LOG),
        "number": record.number,
        "kind": record.kind,
        "run": record.run,
        "from": to_json(record.start),
        "to": to_json(record.to),
        "incarnations": {name: str(one) for name, one in sorted(record.incarnations.items())},
        "cleaned_below": record.cleaned_below,
        "written_ms": record.written_ms,
        "rows": sum(one.rows for one in record.files),
        "bad": record.bad,
        "files": [_document(one) for one in record.files],
    }
    return orjson.dumps(document) + b"\n"


def decode_record(raw: bytes, *, number: int, place: str) -> Record:
    """Read a record, or raise an error that names the place."""
    try:
        found: dict[str, Any] = orjson.loads(raw)
        check_version(Format.EXPORT_LOG, int(found["version"]))
        record = Record(
            number=int(found["number"]),
            kind=Kind(found["kind"]),
            run=str(found["run"]),
            start=from_json(found["from"]),
            to=from_json(found["to"]),
            incarnations={
                StreamName(name): UUID(one) for name, one in found["incarnations"].items()
            },
            cleaned_below=int(found["cleaned_below"]),
            written_ms=int(found["written_ms"]),
            bad=int(found["bad"]),
            files=_files(found["files"]),
        )
    except TierlogError as error:
        raise type(error)(
            f"{place}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(place, f"it is no record of an export: {error!r}") from error
    if record.number != number:
        raise _damaged(place, f"it says that it is record {record.number}")
    return record


def _files(found: Iterable[Mapping[str, Any]]) -> tuple[ExportedFile, ...]:
    return tuple(
        ExportedFile(
            name=str(one["name"]),
            rows=int(one["rows"]),
            bytes=int(one["bytes"]),
            sha256=str(one["sha256"]),
        )
        for one in found
    )


def _damaged(place: str, what: str) -> CorruptError:
    return CorruptError(
        f"{place}: {what}",
        remedy="Bring the export's folder back from a backup, or export to another place",
    )


def _document(file: ExportedFile) -> dict[str, Any]:
    return {"name": file.name, "rows": file.rows, "bytes": file.bytes, "sha256": file.sha256}


def encode_checkpoint(number: int, files: Iterable[CommittedFile]) -> bytes:
    """Return a checkpoint as it is kept; whoever makes it makes the same bytes."""
    document = {
        "version": current(Format.EXPORT_LOG),
        "number": number,
        "files": [{"commit": one.commit, **_document(one.file)} for one in files],
    }
    return orjson.dumps(document) + b"\n"


def decode_checkpoint(raw: bytes, *, number: int, place: str) -> list[CommittedFile]:
    """Read a checkpoint, or raise an error that names the place."""
    try:
        found: dict[str, Any] = orjson.loads(raw)
        check_version(Format.EXPORT_LOG, int(found["version"]))
        commits = [int(one["commit"]) for one in found["files"]]
        files = [CommittedFile(*one) for one in zip(commits, _files(found["files"]), strict=True)]
        named = int(found["number"])
    except TierlogError as error:
        raise type(error)(
            f"{place}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(place, f"it is no checkpoint of an export: {error!r}") from error
    if named != number:
        raise _damaged(place, f"it says that it is checkpoint {named}")
    return files


def live_numbers(names: Sequence[str], place: str) -> tuple[int, list[int]]:
    """Return the newest checkpoint's number, 0 for none, and those of the records behind it.

    Refuses a log from which records are gone: what they name is not known.
    """
    checkpoint = max(checkpoint_numbers(names), default=0)
    numbers = [one for one in record_numbers(names) if one > checkpoint]
    # There is one behind each checkpoint.
    end = checkpoint + max(len(numbers), 1 if checkpoint else 0)
    known, wanted = set(numbers), range(checkpoint + 1, end + 1)
    missing = next((one for one in wanted if one not in known), None)
    if missing is not None:
        raise _damaged(f"{place}/{record_name(missing)}", "the record is gone")
    return checkpoint, numbers
