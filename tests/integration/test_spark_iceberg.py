"""What Spark exported into a bucket comes into an Iceberg table in it, run by run, each row once.

Rows are read back with Iceberg's own scan, and compared with what the client's code makes of the
same entries.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pydantic import SecretStr
from pyiceberg.utils.config import Config

from tests.integration.spark_kit import T0, entries_of, expected, made_bucket, plain
from tierlog.format.entry import encode_entry
from tierlog.model.errors import RetryableError
from tierlog_spark.jobs.export import ExportOptions, export
from tierlog_spark.jobs.export.values import JsonSchema
from tierlog_spark.jobs.frame import JobReport, JobRun, Run
from tierlog_spark.jobs.iceberg import IcebergOptions, fill_table
from tierlog_spark.jobs.iceberg.tables import opened_catalog

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DAY_MS = 86_400_000


async def test_a_partitioned_stream_in_a_bucket_becomes_a_table_there(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(31)
    shops = {
        f"shop-partition-{number}": {31 + number: entries_of(rng, 20, at_ms=T0 + DAY_MS * number)}
        for number in (0, 1)
    }
    async with made_bucket(servers, "iceberg") as bucket:
        await bucket.stream("shop", partitions=2).write()
        streams = {name: bucket.stream(name) for name in shops}
        for name, ledgers in shops.items():
            for ledger_id, entries in ledgers.items():
                await streams[name].add(ledger_id, entries)
            await streams[name].write()
        place = f"s3://{bucket.s3.bucket}"
        monkeypatch.setenv("PYICEBERG_CATALOG__DEFAULT__URI", f"sqlite:///{tmp_path}/catalog.db")
        monkeypatch.setenv("PYICEBERG_CATALOG__DEFAULT__WAREHOUSE", f"{place}/warehouse")
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
        exporting = ExportOptions(
            streams=("shop",), to=f"{place}/exports", s3=bucket.s3, batch_bytes=300_000
        )
        filling = IcebergOptions(
            stream="shop", source=exporting.to, table="logs.shop", s3=bucket.s3
        )

        async def exported(options: ExportOptions) -> JobReport:
            return await asyncio.to_thread(export, JobRun(spark=spark), options)

        async def filled(options: IcebergOptions = filling) -> JobReport:
            return await asyncio.to_thread(fill_table, Run(), options)

        def read() -> list[dict[str, Any]]:
            with opened_catalog(None, bucket.s3) as catalog:
                rows = catalog.load_table(("logs", "shop")).scan().to_arrow().to_pylist()
            order = ("stream", "ledger_id", "entry_id", "event_index")
            return sorted(rows, key=lambda row: tuple(row[name] for name in order))

        first = await exported(exporting)
        assert first.counts["commits"] >= 2
        done = await filled()
        assert done.counts["files"] == first.counts["files"] > 1
        assert done.counts["events"] == first.counts["events"] == 2 * 20 * 20
        wanted = [row for name, ledgers in sorted(shops.items()) for row in expected(name, ledgers)]
        assert [plain(row) for row in await asyncio.to_thread(read)] == wanted
        assert (await filled()).counts["files"] == 0

        # Keys that open nothing are said, and nothing is added.
        wrong = bucket.s3.model_copy(update={"secret_key": SecretStr("wrong")})
        with pytest.raises(RetryableError, match="ACCESS_DENIED"):
            await filled(replace(filling, s3=wrong))

        # From here on payloads have a schema.
        entry = encode_entry(
            [b'{"id": 1, "at": "2026-01-01T00:00:00Z"}'],
            publish_time_ms=T0,
            writer_id=UUID(int=1),
            event_number=9,
        )
        await streams["shop-partition-0"].add(40, [entry])
        await streams["shop-partition-0"].write()
        await exported(replace(exporting, schema=JsonSchema("id BIGINT, at TIMESTAMP")))
        assert (await filled()).counts["events"] == 1
        rows = await asyncio.to_thread(read)
        [valued] = [row for row in rows if row["value"] is not None]
        assert valued["value"]["id"] == 1
        assert valued["value"]["at"].isoformat() == "2026-01-01T00:00:00+00:00"
        assert [plain(row) for row in rows if row["value"] is None] == wanted
