"""Exports as the job writes them, without Spark; catalogs on SQLite; and rows, as both read them.

`python -m tests.unit.spark.iceberg_kit OPTIONS` fills tables by processes that are killed before,
in or behind their commits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog

from tests.unit.spark.test_export_log import record
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.committed import committed_files
from tierlog_spark.jobs.export.log import ExportedFile, Kind, encode_record, record_name
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.export.writing import WriteTask, file_of, written
from tierlog_spark.jobs.frame import JobReport, Run
from tierlog_spark.jobs.iceberg import IcebergOptions
from tierlog_spark.jobs.iceberg.job import fill_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

_C = TypeVar("_C", bound=SqlCatalog)
DAY_US = 86_400_000_000
DAY = 20_000
TIMES = pa.timestamp("us", "UTC")
RUN = "c" * 32
TABLE = ("logs", "orders")


def events(
    first: int, count: int, *, day: int | None = DAY, value: Any = None, tz: str = "UTC"
) -> pa.RecordBatch:
    """Events of one day with all columns of the data source; None: of a raw stream."""
    numbers = range(first, first + count)
    raw = day is None
    at = None if day is None else day * DAY_US
    columns = {
        "stream": pa.array(["orders"] * count),
        "ledger_id": pa.array([7] * count, pa.int64()),
        "entry_id": pa.array(numbers, pa.int64()),
        "event_index": pa.array([0] * count, pa.int32()),
        "publish_time": pa.array([at and at + one for one in numbers], pa.timestamp("us", tz)),
        "writer_id": pa.array([None if raw else "w"] * count, pa.string()),
        "event_number": pa.array([None if raw else one for one in numbers], pa.int64()),
        "event_time": pa.array(
            [at if one % 2 else None for one in numbers], pa.timestamp("us", tz)
        ),
        "key": pa.array([None if one % 3 else b"k" for one in numbers], pa.binary()),
        "properties": pa.array(
            [[("a", str(one)), ("b", None)] if one % 2 else [] for one in numbers],
            pa.map_(pa.string(), pa.string()),
        ),
        "payload": pa.array([b"p%d" % one * 9 for one in numbers], pa.binary()),
    }
    if value is not None:
        columns["value"] = value
    return pa.RecordBatch.from_pydict(columns)


@dataclass
class Export:
    """The export of the stream orders into a folder, commit by commit."""

    folder: Path
    number: int = 0
    run: str = RUN
    first: int = field(default=0, init=False)

    @property
    def target(self) -> FolderTarget:
        return FolderTarget(self.folder / "orders")

    def claim(self) -> None:
        self.number += 1
        body = encode_record(record(self.number, Kind.CLAIM))
        assert self.target.put_new(record_name(self.number), body)

    def commit(self, *days: int | None, value: Any = None, files: int = 1, tz: str = "UTC") -> None:
        """Commit files of four events of each day."""
        self.number += 1
        found: list[ExportedFile] = []
        for attempt in range(files):
            for day in days:
                batch = events(self.first, 4, day=day, value=value, tz=tz)
                self.first += 4
                task = WriteTask(
                    target=self.target, number=self.number, run=self.run, file_bytes=10**6
                )
                rows = written(task, [batch], attempt=attempt * 100 + len(found))
                found += map(file_of, rows)
        body = encode_record(replace(record(self.number), files=tuple(found)))
        assert self.target.put_new(record_name(self.number), body)

    def rows(self) -> list[dict[str, Any]]:
        """What the files hold that count, as `exported` lists them."""
        files = committed_files(str(self.folder), "orders", S3Settings(), verify=True)
        return in_order(row for one in files for row in pq.ParquetFile(one.path).read().to_pylist())


def in_order(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["stream"], row["ledger_id"], row["entry_id"]))


def rows_in(table: Table) -> list[dict[str, Any]]:
    """What Iceberg reads."""
    return in_order(iter(table.scan().to_arrow().to_pylist()))


def options_for(folder: Path, **more: Any) -> IcebergOptions:
    given = {"stream": "orders", "source": str(folder), "table": ".".join(TABLE)}
    return IcebergOptions(**given | {"s3": S3Settings()} | more)


def properties_at(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


@contextlib.contextmanager
def catalog_of(folder: Path, kind: type[_C]) -> Iterator[_C]:
    made = kind("test", **properties_at(folder))
    try:
        yield made
    finally:
        made.close()


def catalog_at(folder: Path) -> contextlib.AbstractContextManager[SqlCatalog]:
    return catalog_of(folder, SqlCatalog)


def filled(export: Export, catalog: Catalog, **how: Any) -> JobReport:
    run = how.pop("run", Run())
    return fill_with(run, options_for(export.folder), catalog, **how)


class DeadlyCatalog(SqlCatalog):
    """Is killed at its first commit."""

    def commit_table(self, *given: Any) -> Any:
        if WHERE == "before":
            die()
        done = SqlCatalog.commit_table(self, *given)
        die()
        return done

    @staticmethod
    def _write_metadata(*given: Any, **more: Any) -> None:
        SqlCatalog._write_metadata(*given, **more)
        if WHERE == "in":
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deaths(given: list[tuple[str, str, str]]) -> Iterator[int]:
    """Fill tables, each in a process of its own; iterate over what these ended by."""
    global WHERE  # noqa: PLW0603 - of a process that ends
    for where, source, state in given:
        child = os.fork()
        if child == 0:
            WHERE = where
            with catalog_of(Path(state), DeadlyCatalog) as catalog:
                filled(Export(Path(source)), catalog)
            os._exit(0)
        yield os.waitpid(child, 0)[1]


WHERE = ""

if __name__ == "__main__":
    print(json.dumps(list(deaths(json.loads(sys.argv[1])))))
