"""A table holds each exported event once: whatever was killed, raced, lost or expired meanwhile.

Rows are read back with Iceberg's own scan, and compared with those of the files that `exported`
lists.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from tests.unit.spark.iceberg_kit import (
    DAY,
    TABLE,
    Export,
    catalog_at,
    catalog_of,
    events,
    filled,
    rows_in,
)
from tierlog.model.errors import CorruptError, IndeterminateError, RefusedError, RetryableError
from tierlog_spark.jobs.export.log import record_name
from tierlog_spark.jobs.export.records import shorten
from tierlog_spark.jobs.frame import Run
from tierlog_spark.jobs.iceberg.state import FILE, NUMBER

ROOT = Path(__file__).parents[3]


@pytest.fixture
def export(tmp_path):
    made = Export(tmp_path / "exports")
    made.claim()
    made.commit(DAY, DAY + 1)
    return made


@pytest.fixture
def catalog(tmp_path):
    with catalog_at(tmp_path / "state") as made:
        yield made


def of(catalog):
    return catalog.load_table(TABLE)


def same(export, catalog):
    """Compare the table with the export, row for row."""
    wanted = export.rows()
    table = of(catalog)
    columns = {field.name: None for field in table.schema().fields}
    assert rows_in(table) == [columns | row for row in wanted]
    assert table.properties[NUMBER] == str(export.number)
    paths = [one["file_path"] for one in table.inspect.files().to_pylist()]
    assert len(paths) == len(set(paths))


def test_runs_follow_each_other_and_a_repeat_does_nothing(export, catalog):
    dry = filled(export, catalog, run=Run(dry_run=True))
    assert {**dry.rows[0], "file_bytes": 0} == {
        "stream": "orders", "table": "logs.orders", "from": 0, "to": 2,
        "files": 2, "events": 8, "file_bytes": 0, "commits": 0,
    }  # fmt: skip
    assert not catalog.namespace_exists("logs")
    told = []
    done = filled(export, catalog, run=Run(progress=lambda *one: told.append(one)))
    assert done.rows[0] == {**dry.rows[0], "commits": 1}
    assert (told[0], told[-1]) == (("iceberg logs.orders", 0, 2), ("iceberg logs.orders", 2, 2))
    same(export, catalog)

    before = of(catalog).metadata_location
    assert filled(export, catalog).counts["files"] == 0
    assert of(catalog).metadata_location == before

    export.claim()
    export.commit(DAY + 1, files=2)
    export.commit(DAY + 2)
    done = filled(export, catalog)
    assert (done.rows[0]["from"], done.rows[0]["to"], done.counts["files"]) == (2, 5, 3)
    same(export, catalog)


def test_a_table_is_partitioned_by_day_and_read_by_it(export, catalog):
    filled(export, catalog)
    table = of(catalog)
    assert str(table.spec().fields[0]) == "1000: publish_time_day: day(5)"
    begin = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=DAY + 1)
    end = begin + timedelta(days=1)
    day = f"publish_time >= '{begin.isoformat()}' and publish_time < '{end.isoformat()}'"
    scan = table.scan(row_filter=day)
    [task] = scan.plan_files()
    assert f"date={begin.date()}" in task.file.file_path
    assert [row["entry_id"] for row in scan.to_arrow().to_pylist()] == [4, 5, 6, 7]
    [row] = table.scan(row_filter="entry_id == 2").to_arrow().to_pylist()
    assert row["payload"] == b"p2" * 9


def test_a_raw_stream_has_no_partitions(tmp_path, catalog):
    export = Export(tmp_path / "exports")
    export.commit(None)
    filled(export, catalog)
    assert of(catalog).spec().is_unpartitioned()
    same(export, catalog)


def test_many_files_come_in_several_commits_each_whole(export, catalog):
    for _ in range(5):
        export.commit(DAY, DAY + 1, DAY + 2)
    done = filled(export, catalog, files_max=4)
    assert (done.counts["files"], done.counts["commits"]) == (17, 3)
    same(export, catalog)
    numbers = [one.summary[NUMBER] for one in of(catalog).snapshots()]
    assert numbers == ["3", "5", "7"]


def test_a_shortened_log_says_the_same(export, catalog):
    for _ in range(4):
        export.commit(DAY)
    filled(export, catalog)
    for _ in range(8):
        export.commit(DAY)
        shorten(
            export.target, export.target.names(), cleaned_below=export.number - 1, records_max=3
        )
    filled(export, catalog)
    same(export, catalog)


def killed(given):
    """Fill tables by processes that are killed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.spark.iceberg_kit", json.dumps(given)],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [signal.SIGKILL] * len(given)


def test_a_process_that_is_killed_leaves_each_row_once(tmp_path):
    cases = {where: tmp_path / where for where in ("before", "in", "behind")}
    exports = {where: Export(folder / "exports") for where, folder in cases.items()}
    for where, export in exports.items():
        export.commit(DAY)
        with catalog_at(cases[where] / "state") as catalog:
            filled(export, catalog)
        export.commit(DAY, DAY + 5)
    killed([(one, str(exports[one].folder), str(cases[one] / "state")) for one in cases])
    for where, export in exports.items():
        with catalog_at(cases[where] / "state") as catalog:
            landed = where == "behind"
            assert of(catalog).properties[NUMBER] == ("2" if landed else "1")
            assert filled(export, catalog).counts["files"] == (0 if landed else 2)
            same(export, catalog)


def test_a_process_that_is_killed_as_it_makes_the_table_leaves_none_or_all_of_it(tmp_path):
    cases = {where: tmp_path / where for where in ("before", "in", "behind")}
    exports = {where: Export(folder / "exports") for where, folder in cases.items()}
    for where, export in exports.items():
        export.commit(DAY, DAY + 5)
        cases[where].joinpath("state").mkdir()
    killed([(one, str(exports[one].folder), str(cases[one] / "state")) for one in cases])
    for where, export in exports.items():
        with catalog_at(cases[where] / "state") as catalog:
            landed = where == "behind"
            assert catalog.table_exists(TABLE) is landed
            if landed:
                same(export, catalog)
            assert filled(export, catalog).counts["files"] == (0 if landed else 2)
            same(export, catalog)
            assert len(of(catalog).snapshots()) == 1


class Meeting(SqlCatalog):
    """Two that commit meet there first."""

    barrier = threading.Barrier(2)

    def commit_table(self, table, requirements, updates):
        if len(table.metadata.snapshots) == 1:
            self.barrier.wait(30)
        return SqlCatalog.commit_table(self, table, requirements, updates)


def test_two_at_once_add_each_file_once(export, catalog, tmp_path):
    filled(export, catalog)
    export.commit(DAY, DAY + 1)
    reports = []

    def run():
        with catalog_of(tmp_path / "state", Meeting) as mine:
            reports.append(filled(export, mine))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(one.counts["files"] for one in reports) == [0, 2]
    same(export, catalog)


def test_two_that_make_the_table_at_once_make_one(export, tmp_path):
    barrier = threading.Barrier(2)

    class Making(SqlCatalog):
        def create_table_transaction(self, *given, **more):
            barrier.wait(30)
            return SqlCatalog.create_table_transaction(self, *given, **more)

    reports = []

    def run():
        with catalog_of(tmp_path / "state", Making) as mine:
            reports.append(filled(export, mine))

    with catalog_at(tmp_path / "state") as catalog:
        catalog.create_namespace("logs")
        threads = [threading.Thread(target=run) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert sorted(one.counts["files"] for one in reports) == [0, 2]
        same(export, catalog)


class Between(SqlCatalog):
    """Somebody else does something to the table before the first commit."""

    first: Callable[[], object] | None = None

    def commit_table(self, table, requirements, updates):
        first, self.first = self.first, None
        if first is not None:
            first()
        return SqlCatalog.commit_table(self, table, requirements, updates)


def test_a_commit_goes_on_top_of_somebody_elses_change(export, catalog, tmp_path):
    filled(export, catalog)
    export.commit(DAY)
    with catalog_of(tmp_path / "state", Between) as mine:
        mine.first = lambda: of(catalog).delete("entry_id < 4")
        assert filled(export, mine).counts["files"] == 1
    assert [row["entry_id"] for row in rows_in(of(catalog))] == list(range(4, 12))


class Deaf(SqlCatalog):
    """Commits, or does not, and raises."""

    def __init__(self, name, **properties):
        super().__init__(name, **properties)
        self.errors = []
        self.lands = True

    def commit_table(self, table, requirements, updates):
        if not self.errors:
            return SqlCatalog.commit_table(self, table, requirements, updates)
        if self.lands:
            SqlCatalog.commit_table(self, table, requirements, updates)
        raise self.errors.pop()


LOST = [
    CommitStateUnknownException("no answer"),
    ConnectionResetError("no answer"),
    CommitFailedException("answered twice, the second time to what was there already"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("lands", [True, False])
def test_a_lost_answer_is_looked_for_before_anything_else(export, tmp_path, error, lands):
    with catalog_of(tmp_path / "state", Deaf) as catalog:
        filled(export, catalog)
        export.commit(DAY)
        catalog.errors, catalog.lands = [error], lands
        assert {**filled(export, catalog).rows[0], "file_bytes": 0} == {
            "stream": "orders", "table": "logs.orders", "from": 2, "to": 3,
            "files": 1, "events": 4, "file_bytes": 0, "commits": 1,
        }  # fmt: skip
        assert catalog.errors == []
        same(export, catalog)


@pytest.mark.parametrize("error", LOST, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("lands", [True, False])
def test_a_table_whose_making_got_no_answer_is_made_once(export, tmp_path, error, lands):
    with catalog_of(tmp_path / "state", Deaf) as catalog:
        catalog.errors, catalog.lands = [error], lands
        done = filled(export, catalog)
        assert (done.counts["files"], done.counts["commits"]) == (2, 1)
        assert catalog.errors == []
        same(export, catalog)
        assert len(of(catalog).snapshots()) == 1


def test_a_catalog_that_can_make_no_table_is_refused(export, tmp_path):
    class Bare(SqlCatalog):
        def commit_table(self, table, requirements, updates):
            raise NotImplementedError

    with (
        catalog_of(tmp_path / "state", Bare) as catalog,
        pytest.raises(RefusedError, match="can't do with this kind of catalog"),
    ):
        filled(export, catalog)


def test_a_catalog_that_never_answers_is_given_up(export, tmp_path):
    with catalog_of(tmp_path / "state", Deaf) as catalog:
        filled(export, catalog)
        export.commit(DAY)
        catalog.errors, catalog.lands = [LOST[0]] * 9, False
        with pytest.raises(IndeterminateError, match=r"not known whether.*no answer"):
            filled(export, catalog)
        catalog.errors = []
        filled(export, catalog)
        same(export, catalog)


def expired(table):
    """Expire all snapshots but the newest."""
    gone = [one.snapshot_id for one in table.snapshots()][:-1]
    table.maintenance.expire_snapshots().by_ids(gone).commit()


def test_a_table_whose_snapshots_expired_still_knows_what_it_has(export, catalog):
    filled(export, catalog)
    of(catalog).delete("entry_id < 4")
    expired(of(catalog))
    [left] = of(catalog).snapshots()
    assert NUMBER not in left.summary.additional_properties
    assert filled(export, catalog).counts["files"] == 0
    export.commit(DAY)
    assert filled(export, catalog).counts["files"] == 1
    assert [row["entry_id"] for row in rows_in(of(catalog))] == list(range(4, 12))


def test_a_table_that_was_rolled_back_gets_again_what_it_lost(export, catalog):
    filled(export, catalog)
    export.commit(DAY)
    filled(export, catalog)
    table = of(catalog)
    table.manage_snapshots().rollback_to_snapshot(table.snapshots()[0].snapshot_id).commit()
    export.commit(DAY)
    # Somebody else's snapshot has no number, those before it have.
    of(catalog).delete("entry_id < 4")
    assert filled(export, catalog).rows[0]["from"] == 2
    assert [row["entry_id"] for row in rows_in(of(catalog))] == list(range(4, 16))


def test_a_table_that_says_nothing_is_refused(export, catalog):
    filled(export, catalog)
    table = of(catalog)
    table.delete("entry_id < 4")
    expired(of(catalog))
    with of(catalog).transaction() as change:
        change.remove_properties(NUMBER, FILE)
    with pytest.raises(RefusedError, match=r"its property tierlog\.export-number is gone"):
        filled(export, catalog)


def test_a_damaged_log_adds_nothing(export, catalog):
    filled(export, catalog)
    for _ in range(2):
        export.commit(DAY)
    before = of(catalog).metadata_location
    record = export.target.folder / record_name(3)
    body = record.read_bytes()
    record.write_bytes(body[:-9])
    with pytest.raises(CorruptError, match="it is no record of an export"):
        filled(export, catalog)
    record.unlink()
    with pytest.raises(CorruptError, match="the record is gone"):
        filled(export, catalog)
    assert of(catalog).metadata_location == before
    record.write_bytes(body)
    filled(export, catalog)
    same(export, catalog)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("damage", ["gone", "cut", "zero", "another"])
def test_a_damaged_file_is_named_and_nothing_is_added(export, catalog, damage, there):
    before = None
    if there:
        filled(export, catalog)
        before = of(catalog).metadata_location
    export.commit(DAY, DAY)
    path = min(export.folder.rglob("part-00000000000000000003-*"))
    body = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        pq.write_table(pa.Table.from_batches([events(0, 5)]), path)
        spoilt = {"cut": body[:-9], "zero": bytes(len(body)), "another": path.read_bytes()}
        path.write_bytes(spoilt[damage])
    with pytest.raises(CorruptError, match=path.name):
        filled(export, catalog)
    if there:
        assert of(catalog).metadata_location == before
    else:
        assert not catalog.namespace_exists("logs")


def test_a_damaged_file_keeps_back_its_own_commit_of_the_table_and_those_behind_it(export, catalog):
    for _ in range(3):
        export.commit(DAY, DAY)
    min(export.folder.rglob("part-00000000000000000004-*")).unlink()
    with pytest.raises(CorruptError, match="part-00000000000000000004"):
        filled(export, catalog, files_max=3)
    assert [one.summary[NUMBER] for one in of(catalog).snapshots()] == ["3"]


def struct(**fields):
    names, kinds, values = zip(*((name, *given) for name, given in fields.items()), strict=True)
    arrays = [pa.array([one] * 4, kind) for kind, one in zip(kinds, values, strict=True)]
    return pa.StructArray.from_arrays(
        arrays, fields=[pa.field(name, kind) for name, kind in zip(names, kinds, strict=True)]
    )


def filled_up(rows):
    """Give all rows the fields that any has."""
    found = [row["value"] for row in rows if row.get("value")]
    names = {name: None for value in found for name in value}
    return [row | {"value": names | row["value"] if row.get("value") else None} for row in rows]


def test_values_come_and_grow_with_the_schema(export, catalog):
    filled(export, catalog)
    item = pa.list_(pa.struct([("sku", pa.string())]))
    export.commit(DAY, value=struct(id=(pa.int32(), 1), price=(pa.float32(), 0.5)))
    export.commit(
        DAY,
        value=struct(
            id=(pa.int64(), 2**40), at=(pa.timestamp("us", "UTC"), 5), items=(item, [{"sku": "x"}])
        ),
    )
    export.commit(DAY, value=struct(id=(pa.int32(), 3), price=(pa.float64(), 0.25)))
    export.commit(DAY)
    filled(export, catalog)
    assert rows_in(of(catalog)) == filled_up(export.rows())
    kind = of(catalog).schema().find_field("value").field_type
    assert [f"{one.name}: {one.field_type}" for one in kind.fields] == [
        "id: long",
        "price: double",
        "at: timestamptz",
        "items: list<struct<20: sku: optional string>>",
    ]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        struct(id=(pa.string(), "x")),
        struct(id=(pa.struct([("a", pa.int32())]), {"a": 1})),
        pa.array([5] * 4, pa.int64()),
        pa.array([None] * 4, pa.null()),
    ],
    ids=str,
)
def test_a_schema_that_contradicts_the_table_is_refused(export, catalog, value, there):
    export.commit(DAY, value=struct(id=(pa.int64(), 1)))
    before = None
    if there:
        filled(export, catalog)
        before = of(catalog).metadata_location
    export.commit(DAY, value=value)
    with pytest.raises(RefusedError, match=r"can't take .*part-00000000000000000004") as caught:
        filled(export, catalog)
    assert "place of its own" in caught.value.remedy
    if there:
        assert of(catalog).metadata_location == before
    else:
        assert not catalog.table_exists(TABLE)


def test_times_of_a_session_in_another_zone_are_the_same_times(tmp_path, catalog):
    export = Export(tmp_path / "exports")
    at = struct(at=(pa.timestamp("us", "Europe/Berlin"), 5))
    export.commit(DAY, tz="Europe/Berlin", value=at)
    filled(export, catalog)
    same(export, catalog)
    assert rows_in(of(catalog))[0]["value"]["at"] == datetime.fromtimestamp(0, UTC).replace(
        microsecond=5
    )


def test_a_table_of_something_else_is_refused(export, catalog, tmp_path):
    filled(export, catalog)
    other = Export(tmp_path / "other")
    other.commit(DAY)
    with pytest.raises(RefusedError, match=f"is of the export at {export.target.place}"):
        filled(other, catalog)
    # At the same place another export was begun, and it is as far, or farther, or not so far.
    export.target.delete(export.target.names())
    anew = Export(export.folder, run="d" * 32)
    anew.commit(DAY)
    for _ in range(3):
        with pytest.raises(RefusedError, match="another export lies there now"):
            filled(anew, catalog)
        anew.commit(DAY)
    with of(catalog).transaction() as change:
        change.set_properties({"gc.enabled": "true"})
    with pytest.raises(RefusedError, match="may delete the export's files"):
        filled(export, catalog)
    catalog.drop_table(TABLE)
    catalog.create_table(TABLE, pa.schema([("a", pa.int64())]))
    with pytest.raises(RefusedError, match="was not made for an export"):
        filled(export, catalog)


def test_a_place_that_iceberg_has_no_name_for_is_refused(tmp_path, catalog):
    export = Export(tmp_path / "a#b")
    export.commit(DAY)
    with pytest.raises(RefusedError, match="has a # or a"):
        filled(export, catalog)
    spaced = Export(tmp_path / "a b%20c")
    spaced.commit(DAY)
    filled(spaced, catalog)
    same(spaced, catalog)


def test_where_nothing_was_exported_no_table_is_made(tmp_path, catalog):
    export = Export(tmp_path / "exports")
    with pytest.raises(RefusedError, match="there is no export at"):
        filled(export, catalog)
    (export.folder / "orders").mkdir(parents=True)
    (export.folder / "orders" / "some.parquet").touch()
    with pytest.raises(RefusedError, match="there is no export at"):
        filled(export, catalog)
    export.claim()
    assert filled(export, catalog).counts["files"] == 0
    assert not catalog.namespace_exists("logs")


def test_others_that_always_come_first_are_told_of(export, tmp_path):
    class Late(SqlCatalog):
        late = False

        def commit_table(self, table, requirements, updates):
            if self.late:
                raise CommitFailedException("somebody was first")
            return SqlCatalog.commit_table(self, table, requirements, updates)

    with catalog_of(tmp_path / "state", Late) as catalog:
        filled(export, catalog)
        export.commit(DAY)
        with of(catalog).transaction() as change:
            change.set_properties({"commit.retry.max-wait-ms": "1"})
        catalog.late = True
        with pytest.raises(RetryableError, match="somebody was first"):
            filled(export, catalog)
