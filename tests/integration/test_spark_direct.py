"""`format("tierlog")` over a real S3: what lies in a bucket is read with nothing else running.

The buckets here are made without any service. Rows are compared with what the client's own code
makes of the same entries.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, LessThan

from tests.integration.spark_kit import (
    T0,
    entries_of,
    expected,
    made_bucket,
    options_of,
    plain,
    planned,
    rows_read,
    spoil,
)
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.pages import IndexPages
from tierlog.attributes.tree import drive_async
from tierlog.attributes.update import Shape, update
from tierlog.model.attribute_record import AttributesRecord, KeptRoot
from tierlog.model.attributes import EVENT_COUNT, AttributeKey
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.manifest import ClusterManifest
from tierlog.model.node import Cluster
from tierlog.model.policy import CLUSTER_DEFAULT, Policy, PolicyLevels
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.offload.single_driver import SingleObjectOffloader
from tierlog.wiring.build import system_ids

if TYPE_CHECKING:
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def test_every_row_of_a_stream_as_the_client_reads_it(servers: EmbeddedServers) -> None:
    rng = random.Random(1)
    ledgers = {
        11: entries_of(rng, 420, at_ms=T0),
        12: entries_of(rng, 3, at_ms=T0 + 10**6),
        15: entries_of(rng, 60, at_ms=T0 + 2 * 10**6),
    }
    wanted = expected("orders", ledgers)
    async with made_bucket(servers, "direct") as bucket:
        stream = bucket.stream("orders")
        for ledger_id, entries in ledgers.items():
            await stream.add(ledger_id, entries)
        await stream.add(16, [b"not copied yet"], copied=False)
        await stream.write()
        given = options_of(bucket.s3, stream="orders")

        whole = await planned(given, partitionBytes="5m", fetchBytes="1m")
        # The first ledger has two blocks, and each is read by a task of its own.
        assert len(whole.parts) == 4
        assert [plain(row) for row in await asyncio.to_thread(whole.rows)] == wanted

        columns = {"columns": "ledger_id,entry_id,payload"}
        part = await rows_read(given, start="11:400", end="15:2", **columns)
        assert [tuple(row.values()) for row in part] == [
            (row[1], row[2], row[10]) for row in wanted if (11, 400) <= (row[1], row[2]) < (15, 2)
        ]

        low, high = T0 + 100_000, T0 + 2 * 10**6 + 5000
        some = [row for row in wanted if low <= row[4] < high]
        by_time = await rows_read(given, startTime=str(low), endTime=str(high))
        assert [plain(row) for row in by_time] == some
        moment = datetime.fromtimestamp(low / 1000, UTC)
        pushed = await rows_read(given, GreaterThanOrEqual(("publish_time",), moment))
        assert [plain(row) for row in pushed] == [row for row in wanted if low <= row[4]]

        few = await planned(
            given, GreaterThan(("ledger_id",), 11), LessThan(("entry_id",), 2), end="15:60"
        )
        assert (few.left, len(few.parts)) == ([], 2)
        assert [plain(row) for row in await asyncio.to_thread(few.rows)] == [
            row for row in wanted if row[1] > 11 and row[2] < 2
        ]
        others = await planned(given, EqualTo(("stream",), "others"))
        assert list(others.parts) == []


async def test_times_that_nobody_wants_are_not_fetched(servers: EmbeddedServers) -> None:
    rng = random.Random(5)
    async with made_bucket(servers, "times") as bucket:
        stream = bucket.stream("s")
        # Two and a half MB of entries, published a second apart.
        key = await stream.add(18, entries_of(rng, 120, at_ms=T0))
        await stream.write()
        found = await bucket.objects.get(key)
        assert found is not None
        info, body = found
        spoilt = bytearray(body)
        for place in (0.1, 0.9):
            spoilt[int(len(body) * place)] ^= 1
        await bucket.objects.put(key, bytes(spoilt), metadata=info.metadata)
        low, high = T0 + 50_000, T0 + 60_000
        rows = await rows_read(
            options_of(bucket.s3, stream="s", fetchBytes="128k"),
            startTime=str(low),
            endTime=str(high),
        )
        assert sorted({row["entry_id"] for row in rows}) == list(range(50, 60))


async def test_raw_streams_partitions_and_objects_by_their_keys(servers: EmbeddedServers) -> None:
    rng = random.Random(2)
    raw = {21: [rng.randbytes(size) for size in (0, 1, 100_000)], 22: [b"two"]}
    parts = {31: entries_of(rng, 2, at_ms=T0), 32: entries_of(rng, 2, at_ms=T0)}
    async with made_bucket(servers, "kinds") as bucket:
        stream = bucket.stream("bytes", raw=True)
        keys = [await stream.add(ledger_id, entries) for ledger_id, entries in raw.items()]
        await stream.write()
        await bucket.stream("shop", partitions=2).write()
        for index, (ledger_id, entries) in enumerate(parts.items()):
            partition = bucket.stream(f"shop-partition-{index}")
            await partition.add(ledger_id, entries)
            await partition.write()
        # As Pulsar leaves them: without checksums beside them.
        await bucket.objects.delete(f"{keys[1]}-side")
        given = options_of(bucket.s3)

        wanted = [
            ("logs", ledger_id, entry_id, 0, None, data)
            for ledger_id, entries in raw.items()
            for entry_id, data in enumerate(entries)
        ]
        columns = {"columns": "stream,ledger_id,entry_id,event_index,publish_time,payload"}
        by_keys = await rows_read(given, keys=",".join(keys), **columns)
        assert [tuple(row.values()) for row in by_keys] == wanted
        by_name = await rows_read(given, stream="bytes", end="22:0", **columns)
        assert [tuple(row.values())[1:] for row in by_name] == [row[1:] for row in wanted[:3]]
        single = bucket.stream("single", layout=SingleObjectOffloader)
        await single.add(41, parts[31])
        await single.write()
        one = await rows_read(given, stream="single", endTime=str(T0 + 1000))
        assert [plain(row) for row in one] == expected("single", {41: parts[31][:1]})
        moment = datetime.fromtimestamp(1, UTC)
        assert await rows_read(given, GreaterThan(("publish_time",), moment), stream="bytes") == []
        with pytest.raises(RefusedError, match="is raw"):
            await planned(given, stream="bytes", startTime="1")

        with pytest.raises(RefusedError, match="has 2 partitions"):
            await planned(given, stream="shop", start="31:0")
        both = await rows_read(given, stream="shop", columns="stream")
        assert Counter(row["stream"] for row in both) == {
            "shop-partition-0": 40,
            "shop-partition-1": 40,
        }


async def test_tables_say_what_is_in_the_bucket(servers: EmbeddedServers) -> None:
    async with made_bucket(servers, "tables") as bucket:
        key = ""
        for name, first in (("a", 41), ("b", 51)):
            stream = bucket.stream(name, raw=True)
            key = await stream.add(first, [b"one", b"two"])
            await stream.add(first + 1, [b"later"], copied=False)
            await stream.write()
        given = options_of(bucket.s3)
        streams = await rows_read(given, table="streams")
        chosen = ("stream", "ledgers", "ledgers_copied", "entries", "bytes", "raw")
        assert [tuple(row[name] for name in chosen) for row in streams] == [
            ("a", 2, 1, 3, 11, True),
            ("b", 2, 1, 3, 11, True),
        ]
        ledgers = await rows_read(given, table="ledgers", stream="b")
        assert [(row["ledger_id"], row["entries"], row["data_object"]) for row in ledgers] == [
            (51, 2, key),
            (52, 1, None),
        ]
        left = key.replace("ledger-51", "ledger-99")
        await bucket.objects.put(left, b"left behind", metadata={})
        # In the order of keys, which begin with random ids.
        found = await rows_read(given, table="attempts")
        attempts = sorted(found, key=lambda row: row["ledger_id"])
        assert [(row["ledger_id"], row["stream"], row["is_copy"]) for row in attempts] == [
            (41, "a", True),
            (51, "b", True),
            (99, None, False),
        ]
        assert attempts[1]["objects"] == [key, f"{key}-index", f"{key}-side"]


async def test_attributes_are_a_table_as_of_the_checkpoint_that_the_manifest_names(
    servers: EmbeddedServers,
) -> None:
    numbers = {AttributeKey(uuid.UUID(int=(1 << 64) + one).bytes): one for one in range(1000)}
    async with made_bucket(servers, "attributes") as bucket:
        await bucket.stream("none").write()
        stream = bucket.stream("s", policy=Policy(ledger_entries_max=8))
        levels = PolicyLevels(cluster=Policy(ledger_bytes_max=7, ledger_entries_max=9))
        cluster = Cluster(cluster_id=uuid.UUID(int=7), created_ms=1)
        await stream.manifests.write_cluster(1, ClusterManifest(cluster=cluster, levels=levels))
        indexes = IndexObjects(
            bucket.objects,
            cluster_id=uuid.UUID(int=7),
            ids=system_ids(),
            key_prefix=bucket.s3.key_prefix,
        )
        pages = IndexPages(indexes, PageCache(limit_bytes=1 << 20))
        claimed = Stream(name=stream.name, incarnation=stream.head.incarnation, created_ms=3)
        record = AttributesRecord(incarnation=claimed.incarnation)
        for number, (low, high) in enumerate(((0, 700), (600, 1000))):
            some = {key: one + number for key, one in numbers.items() if low <= one < high}
            base = record.checkpoint
            done = await drive_async(
                update(base.root, some, Shape(page_bytes=1024)), pages.of(base)
            )
            made = await indexes.write(claimed, base.root.end, b"".join(done.pages))
            through = Position(LedgerId(41), EntryId(number))
            newest = KeptRoot(through=through, core={EVENT_COUNT: 5 + number}, root=done.root)
            record = record.published(newest, made, keep_ends=False)
            if number == 0:
                record = record.closed(await indexes.write_list(claimed, record.objects))
        assert record.chunks
        # As in a copy of a bucket: the manifest says where the objects lay.
        elsewhere = [replace(one, key=f"old/{one.key}") for one in record.objects]
        record = replace(record, objects=tuple(elsewhere))
        stream.head = replace(stream.head, attributes=record)
        await stream.write()
        given = options_of(bucket.s3, table="attributes")
        rows = await rows_read(given)
        assert [tuple(row.values()) for row in rows] == [
            *(
                ("s", str(uuid.UUID(int=number)), name, value, 41, 1)
                for number, name, value in (
                    (1, "event-count", 6),
                    (3, "scale-policy-type", 0),
                    (4, "scale-policy-rate", 0),
                    (5, "scale-policy-segments-min", 1),
                    (6, "roll-over-bytes", 7),
                    (7, "roll-over-entries", 8),
                    (8, "roll-over-age-ms", CLUSTER_DEFAULT.ledger_age_ms_max),
                    (9, "index-root-offset", record.newest.root.root_offset),
                    (10, "index-root-length", record.newest.root.root_length),
                )
            ),
            *(
                ("s", str(uuid.UUID(bytes=key)), None, one + (one >= 600), 41, 1)
                for key, one in numbers.items()
            ),
        ]
        assert await rows_read(given, stream="none") == []
        await spoil(bucket, record.objects[-1].key.removeprefix("old/"))
        with pytest.raises(CorruptError):
            await rows_read(given, stream="s")


async def test_what_is_wrong_is_said_once_with_its_name_and_remedy(
    servers: EmbeddedServers,
) -> None:
    rng = random.Random(3)
    async with made_bucket(servers, "wrong") as bucket, made_bucket(servers, "other") as other:
        stream = bucket.stream("s", trimmed_through=LedgerId(60))
        damaged = await stream.add(61, entries_of(rng, 30, at_ms=T0))
        gone = await stream.add(62, entries_of(rng, 2, at_ms=T0))
        await stream.add(63, [b"never"], copied=False)
        await stream.add(64, entries_of(rng, 2, at_ms=T0))
        bare = await stream.add(65, entries_of(rng, 2, at_ms=T0))
        await stream.write()
        await spoil(bucket, damaged)
        await spoil(bucket, bare)
        await bucket.objects.delete(gone)
        given = options_of(bucket.s3)

        async def fails(*words: str, **more: str) -> None:
            with pytest.raises(TierlogError) as caught:
                await rows_read({**given, "stream": "s", **more})
            for word in words:
                assert word in str(caught.value)

        await fails("there is no stream t", "There are s", stream="t")
        await fails("it was trimmed, and begins at 61:0", start="5:0")
        await fails("61:9 is behind the end", start="61:9", end="61:1")
        await fails("ledger 63 is wanted", "readMode=auto")
        await fails(damaged, "another checksum", "scrub --repair", end="61:30")
        await fails(gone, "is not there", start="62:0", end="63:0")
        await fails("so it is not a bucket of Tierlog", bucket=other.s3.bucket)
        await fails("no-such-bucket", "Create the bucket", bucket="no-such-bucket-here")
        await fails("s3.endpoint_url, s3.bucket and the keys", secretKey="wrong")
        # What is good around it is read.
        assert len(await rows_read(given, stream="s", start="64:0", end="65:0")) == 40
        # Without a side object, an entry's own checksum tells.
        known = stream.copies[LedgerId(65)]
        assert known.copy is not None
        bare_copy = replace(known.copy.copy, side_len=0)
        without = replace(known, copy=replace(known.copy, copy=bare_copy))
        stream.copies[LedgerId(65)] = without
        await stream.write()
        await fails(bare, "65:", "checksum differs", start="65:0")


async def test_what_is_damaged_or_missing_beside_the_data_is_named_too(
    servers: EmbeddedServers,
) -> None:
    rng = random.Random(7)
    async with made_bucket(servers, "beside") as bucket:
        stream = bucket.stream("s")
        keys = [await stream.add(number, entries_of(rng, 2, at_ms=T0)) for number in range(71, 75)]
        await stream.write()
        index, side, gone = f"{keys[0]}-index", f"{keys[1]}-side", f"{keys[2]}-index"
        await spoil(bucket, index)
        await spoil(bucket, side)
        await bucket.objects.delete(gone)
        given = options_of(bucket.s3, stream="s")
        for number, name in enumerate((index, side, gone), 71):
            with pytest.raises(TierlogError, match=name) as caught:
                await rows_read(given, start=f"{number}:0", end=f"{number + 1}:0")
            assert caught.value.remedy
        assert len(await rows_read(given, start="74:0")) == 40
        (manifest,) = [info.key async for info in bucket.objects.list("streams/")]
        await spoil(bucket, manifest)
        with pytest.raises(CorruptError) as damaged:
            await rows_read(given)
        assert manifest in str(damaged.value)
        assert damaged.value.remedy
