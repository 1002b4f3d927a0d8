"""`tierlog spark bulk-offload` and `tierlog spark scrub` as processes, as people run them.

What they print, how they end, and what is so afterwards. What the jobs do when something is killed
or damaged is in `test_spark_bulk`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.spark_hosts import outside_spark
from tests.integration.test_reader_tiers import append, numbered, payloads
from tests.integration.test_spark_bulk import is_known
from tierlog.client import open_client
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.wiring.build import open_catalog
from tierlog.wiring.objects import open_bucket

if TYPE_CHECKING:
    from tests.plugins.fix_cluster import ServiceCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STREAM = "spark-commands"
# Nothing is offloaded by itself, and no local copy goes.
POLICY = Policy(deletion_lag_ms=-1)
TIERLOG = str(Path(sys.executable).with_name("tierlog"))


async def told(cluster: ServiceCluster, *words: str, code: int) -> dict[str, Any]:
    """Run a command of Spark's; return the document that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(TIERLOG, "spark", *words),
        *("--cores", "1", "--memory", "512M", "-o", "json"),
        env=outside_spark()
        | {
            "TIERLOG_STATE_DIR": str(cluster.state_dir),
            "TIERLOG_S3__BUCKET": cluster.settings.s3.bucket,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    said = stderr.decode()
    assert process.returncode == code, said[-4000:]
    found: dict[str, Any] = json.loads(stdout)
    return found


async def test_a_back_fill_and_a_scrub_are_run_as_commands(cluster: ServiceCluster) -> None:
    events = numbered(0, 20)
    async with open_client(cluster.settings) as client:
        await client.create_stream(STREAM, policy=POLICY)
        for start in (0, 10):
            await append(client, STREAM, events[start : start + 10])
            await client.seal(STREAM)
        await cluster.until(lambda: is_known(cluster), what="whose the bucket is")
        ids = [one["ledger_id"] for one in (await client.stream(STREAM))["ledgers"]]
        done = await told(cluster, "bulk-offload", "--stream", STREAM, code=0)
        counts = ("job", "ledgers", "completed", "complete", "incomplete", "streams_failed")
        assert [done[name] for name in counts] == ["bulk-offload", 2, 2, 2, 0, 0]
        assert [(row["stream"], row["ledger_id"], row["outcome"]) for row in done["rows"]] == [
            (STREAM, one, "completed") for one in ids
        ]
        ledgers = (await client.stream(STREAM))["ledgers"]
        assert all(one["complete"] for one in ledgers)
        assert await payloads(client, STREAM) == events

    bucket = cluster.settings.s3.bucket
    async with (
        open_catalog(cluster.settings) as catalog,
        open_bucket(cluster.settings, bucket) as store,
    ):
        contexts = [await catalog.contexts.get(LedgerId(one)) for one in ids]
        locations = [one.location for one in contexts if one is not None]
        assert len(locations) == 2
        spoilt = locations[1]
        assert spoilt is not None
        found = await store.get(spoilt.data_key)
        assert found is not None
        body = bytearray(found[1])
        assert len(body) == done["rows"][1]["bytes"]
        body[-1] ^= 1
        await store.put(spoilt.data_key, bytes(body), metadata=found[0].metadata)

        done = await told(cluster, "scrub", code=6)
        # Other tests have streams, too.
        assert done["found_damaged_data"] >= 1
        assert done["copies_checked"] >= 2
        ours = [row for row in done["rows"] if row["stream"] == STREAM]
        assert [(row["kind"], row["ledger_id"]) for row in ours] == [("damaged-data", ids[1])]
        assert spoilt.data_key in ours[0]["cause"]
        assert ours[0]["remedy"]
        doubts = [(await catalog.contexts.get(LedgerId(one))) for one in ids]
        assert [one is not None and one.doubt is not None for one in doubts] == [False, True]
