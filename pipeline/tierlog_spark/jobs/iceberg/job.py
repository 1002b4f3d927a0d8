"""The job ``iceberg``: what an export has that a table lacks, into the table, each file once.

Owns the order: what the table says of itself, then what the log of the export has, then one
commit; and all over again, until nothing is lacking. Does not own the decisions (``state``), nor
PyIceberg (``tables``), which is asked for when the job runs and not before.

Invariants:
    * Nothing is added on top of a number that was not just read.
    * A commit that another one came before, or whose answer was lost, is looked for before
      anything else is done.
    * The table is read before the log: another run may bring it on, never the log back.
"""

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.model.ids import stream_name
from tierlog_spark.jobs.export.committed import Committed, files_of
from tierlog_spark.jobs.export.log import NO_DATE
from tierlog_spark.jobs.export.targets import Target, target_of
from tierlog_spark.jobs.frame import JobReport, Run
from tierlog_spark.jobs.iceberg.options import IcebergOptions
from tierlog_spark.jobs.iceberg.state import (
    EXPORT,
    Known,
    check_owner,
    check_place,
    lacking,
    properties_of,
    together,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from tierlog_spark.jobs.iceberg.tables import Added, Tables

FILES_A_COMMIT: Final = 1000
TRIES: Final = 5
"""How often a commit may come to nothing, one after the other."""


def fill_table(run: Run, options: IcebergOptions) -> JobReport:
    """Add what an export has to its table; not to be called on a running loop."""
    options.identifier()
    if any(importlib.util.find_spec(name) is None for name in ("pyiceberg", "sqlalchemy")):
        raise RefusedError(
            "PyIceberg is not installed",
            remedy="pip install 'tierlog-spark[iceberg]' (requirements-iceberg.lock has versions)",
        )
    from tierlog_spark.jobs.iceberg.tables import opened_catalog  # noqa: PLC0415 - an extra

    with opened_catalog(options.catalog, options.s3) as catalog:
        return fill_with(run, options, catalog)


def fill_with(
    run: Run, options: IcebergOptions, catalog: "Catalog", *, files_max: int = FILES_A_COMMIT
) -> JobReport:
    """Add what an export has to its table, in a catalog that is open."""
    from tierlog_spark.jobs.iceberg.tables import Tables  # noqa: PLC0415 - an extra

    begun_s = run.clock.monotonic_s()
    target = target_of(options.source, options.s3).below(stream_name(options.stream))
    check_place(target.place)
    tables = Tables(catalog, options.identifier())
    done = _Filling(run, tables, target, files_max).fill()
    counts = {
        "files": done.files,
        "events": done.events,
        "file_bytes": done.file_bytes,
        "commits": done.commits,
        "seconds": round(run.clock.monotonic_s() - begun_s, 3),
    }
    row = {
        "stream": options.stream,
        "table": tables.text,
        "from": done.start,
        "to": done.to,
        **{name: counts[name] for name in ("files", "events", "file_bytes", "commits")},
    }
    return JobReport(job="iceberg", dry_run=run.dry_run, counts=counts, rows=[row])


@dataclass(slots=True)
class _Filling:
    """One run; ``start`` and ``to`` are commits of the export that the table has or had."""

    run: Run
    tables: "Tables"
    target: Target
    files_max: int
    start: int | None = field(default=None, init=False)
    to: int = field(default=0, init=False)
    files: int = field(default=0, init=False)
    events: int = field(default=0, init=False)
    file_bytes: int = field(default=0, init=False)
    commits: int = field(default=0, init=False)

    def fill(self) -> "_Filling":
        sent: Added | None = None
        batch: list[Committed] = []
        tries = 0
        while True:
            table = self.tables.load()
            if sent is not None and table is not None and sent.is_in(table):
                self._count(batch, commits=1)
                tries, sent = 0, None
            known = self._known(table)
            new = self._lacking(known)
            if not new:
                return self
            if self.run.dry_run:
                self._count(new, commits=0)
                return self
            if tries == TRIES:
                raise self._ended(sent)
            tries += 1
            batch = list(together(new, files_max=self.files_max))
            then = self._then(batch)
            sent = (
                self._create(batch, then) if table is None else self.tables.add(table, batch, then)
            )

    def _known(self, table: "Table | None") -> Known:
        from tierlog_spark.jobs.iceberg.tables import known_from  # noqa: PLC0415 - an extra

        if table is None:
            return Known()
        check_owner(self.tables.text, table.properties, self.target.place)
        known = known_from(table.metadata)
        if known is None:
            raise RefusedError(
                f"table {self.tables.text} does not say what it has: its property "
                f"{EXPORT}-number is gone",
                remedy="Set it to the number of the newest commit whose files it has, or make "
                "another table",
            )
        return known

    def _lacking(self, known: Known) -> list[Committed]:
        files = files_of(self.target, since=max(known.number - 1, 0))
        new = list(lacking(self.tables.text, known, files, self.target.place))
        if self.start is None:
            self.start = known.number
        self.to = max(self.to, known.number)
        what = f"iceberg {self.tables.text}"
        self.run.progress(what, self.files, self.files + len(new))
        return new

    def _create(self, files: list[Committed], then: Known) -> "Added":
        properties = properties_of(self.target.place)
        dated = not self._name(files[0]).startswith(f"date={NO_DATE}/")
        return self.tables.create(files, then, dated=dated, properties=properties)

    def _then(self, batch: list[Committed]) -> Known:
        return Known(number=batch[-1].commit, file=self._name(batch[-1]))

    def _name(self, file: Committed) -> str:
        return file.path.removeprefix(f"{self.target.place}/")

    def _count(self, files: list[Committed], *, commits: int) -> None:
        self.files += len(files)
        self.events += sum(one.rows for one in files)
        self.file_bytes += sum(one.bytes for one in files)
        self.commits += commits
        self.to = max(self.to, files[-1].commit)

    def _ended(self, sent: "Added | None") -> RetryableError | IndeterminateError:
        from tierlog_spark.jobs.iceberg.tables import Came  # noqa: PLC0415 - an extra

        name, cause = self.tables.text, None if sent is None else sent.error
        if sent is None or sent.came is Came.OVERTAKEN:
            ended: RetryableError | IndeterminateError = RetryableError(
                f"others changed table {name} before each of {TRIES} commits: {cause}",
                remedy="Run it again: it goes on where the table is",
            )
        else:
            ended = IndeterminateError(
                f"it is not known whether files came into table {name}: {cause!r}",
                remedy="Run it again: it looks what is there before it adds anything",
            )
        ended.__cause__ = cause
        return ended
