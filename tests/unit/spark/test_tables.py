"""Tables say what a bucket has; of one that is not ours they say so, instead of nothing."""

from uuid import UUID

import pytest

from tests.unit.spark.bucket_kit import CLUSTER, ManifestBucket, options
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.manifest import ClusterManifest
from tierlog_spark.columns import Table
from tierlog_spark.parts import arrow_schema
from tierlog_spark.source import schema_of
from tierlog_spark.tables import table_batches

TABLES = [one for one in Table if one is not Table.EVENTS]


async def rows_of(table):
    found = options(table=table)
    schema = arrow_schema(schema_of(found.table, found.columns))
    return [row async for some in table_batches(found, schema) for row in some.to_pylist()]


@pytest.mark.parametrize("table", TABLES)
async def test_a_place_where_no_cluster_wrote_is_refused(monkeypatch, table):
    bucket = ManifestBucket(monkeypatch)
    await bucket.objects.connect(no_faults()).put("holiday.jpg", b"x", metadata={})
    with pytest.raises(RefusedError, match="not a bucket of Tierlog") as caught:
        await rows_of(table)
    assert caught.value.reason is Reason.STREAM_NOT_FOUND


@pytest.mark.parametrize("table", TABLES)
async def test_a_cluster_without_streams_has_tables_without_rows(monkeypatch, table):
    bucket = ManifestBucket(monkeypatch)
    await bucket.manifests().write_cluster(1, ClusterManifest(cluster=CLUSTER))
    assert await rows_of(table) == []


async def test_attempts_are_told_where_there_are_no_manifests(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    key = "00000000-0000-0000-0000-000000000009-ledger-81"
    await bucket.objects.connect(no_faults()).put(key, b"x", metadata={})
    [row] = await rows_of(Table.ATTEMPTS)
    assert (row["ledger_id"], row["stream"], row["is_copy"]) == (81, None, False)


async def test_streams_are_told_with_their_ledgers(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    await bucket.write(11, uncopied=[12])
    [row] = await rows_of(Table.STREAMS)
    assert (row["stream"], row["ledgers"], row["ledgers_copied"]) == ("s", 2, 1)


async def test_a_long_table_comes_in_bounded_batches(monkeypatch):
    monkeypatch.setattr("tierlog_spark.tables.ROWS_A_BATCH", 7)
    bucket = ManifestBucket(monkeypatch)
    store = bucket.objects.connect(no_faults())
    for number in range(20):
        # A ledger whose number begins as another's does lies beside it.
        for name in (f"ledger-{number}", f"ledger-{number}-index", f"ledger-{number}0"):
            await store.put(f"{UUID(int=number)}-{name}", b"x", metadata={})
    found = options(table=Table.ATTEMPTS)
    schema = arrow_schema(schema_of(found.table, found.columns))
    batches = [some.to_pylist() async for some in table_batches(found, schema)]
    assert max(map(len, batches)) == 7
    rows = [
        (row["ledger_id"], row["attempt"], len(row["objects"])) for some in batches for row in some
    ]
    expected = [(n, str(UUID(int=n)), 2) for n in range(1, 20)]
    expected += [(n * 10, str(UUID(int=n)), 1) for n in range(1, 20)]
    # Of the ledger 0 both names are one.
    assert len(rows) == len(set(rows))
    assert {one for one in rows if one[0]} == set(expected)
