"""A job that spark-submit is given runs in the session that it gives, as the how-to has it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow.parquet as pq
import pyspark
import pytest

import tierlog_spark
from tests.integration.spark_hosts import outside_spark
from tests.integration.spark_kit import environment_of, made_bucket
from tests.unit.spark.test_export_writing import descriptors, message_class
from tierlog.format.entry import encode_entry
from tierlog_spark.jobs.export import committed_files
from tierlog_spark.local import spark_environment

if TYPE_CHECKING:
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
PROGRAM = Path(tierlog_spark.__file__).parent / "__main__.py"
# Late in the evening, west of UTC.
PUBLISHED = datetime(2026, 11, 22, 2, 30, tzinfo=UTC)


async def test_an_export_of_protobuf_messages_under_spark_submit(
    servers: EmbeddedServers, tmp_path: Path
) -> None:
    order = message_class("shop.Order")(id=7, colour=1)
    order.at.FromDatetime(PUBLISHED)
    entry = encode_entry(
        [order.SerializeToString(), b"\xff"],
        publish_time_ms=round(PUBLISHED.timestamp() * 1000),
        writer_id=UUID(int=1),
        event_number=2,
    )
    file, to = tmp_path / "shop.desc", tmp_path / "out"
    file.write_bytes(descriptors().SerializeToString())
    async with made_bucket(servers, "submitted") as bucket:
        stream = bucket.stream("s")
        await stream.add(71, [entry])
        await stream.write()
        process = await asyncio.create_subprocess_exec(
            str(SUBMIT),
            *("--master", "local[1]", "--driver-memory", "512m"),
            *("--conf", "spark.ui.enabled=false", str(PROGRAM)),
            *("export", "s", "--to", str(to), "--protobuf", str(file), "--message", "shop.Order"),
            *("--keep-bad", "-o", "json", "-q"),
            cwd=tmp_path,
            env=outside_spark()
            | spark_environment(tmp_path, outside_spark())
            | environment_of(bucket.s3)
            | {"TIERLOG_STATE_DIR": str(tmp_path), "TZ": "America/New_York"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()[-4000:]
        told = json.loads(said)
        assert (told["job"], told["events"], told["bad"], told["failed"]) == ("export", 2, 1, 0)
        [found] = committed_files(str(to), "s", bucket.s3, verify=True)
    assert Path(found.path).parent.name == "date=2026-11-22"
    good, bad = pq.ParquetFile(found.path).read().to_pylist()
    assert (good["value"]["id"], good["value"]["colour"]) == (7, "RED")
    assert good["value"]["at"] == good["publish_time"] == PUBLISHED
    assert (bad["value"], bad["payload"]) == (None, b"\xff")
