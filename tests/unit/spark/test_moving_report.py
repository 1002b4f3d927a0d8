"""What a copy or a restore could not do has a row, is counted, and costs nothing else its report.

The whole job runs here, with as much of Spark as it asks for.
"""

import contextlib
from types import SimpleNamespace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.spark.moving_kit import BACK, COPY, PREFIX, Buckets, begun
from tests.unit.spark.test_export_comparing import Here
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.format.manifest import is_manifest_key, parse_cluster_key
from tierlog.model.errors import RetryableError
from tierlog_spark.jobs import fanout, moving
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.jobs.moving_plan import FAILED

RUN = JobRun(spark=SimpleNamespace(sparkContext=Here()))  # type: ignore[arg-type]


def open_here(monkeypatch, buckets: Buckets) -> None:
    """Let jobs of this process open these buckets."""

    @contextlib.asynccontextmanager
    async def opened(_, name, **__):
        bucket = buckets.site.world.bucket if name == "b" else buckets.other
        yield bucket.connect(no_faults())

    monkeypatch.setattr(moving, "open_bucket", opened)
    monkeypatch.setattr("tierlog_spark.bucket.open_bucket", opened)
    monkeypatch.setattr(fanout, "configure_logging", lambda *_, **__: None)


def cluster_keys(bucket, prefix: str) -> list[str]:
    return sorted(key for key in bucket.objects if parse_cluster_key(prefix, key) is not None)


@pytest.mark.parametrize("damaged", ["b", "t"])
@pytest.mark.parametrize("move", [COPY, BACK])
def test_a_manifest_of_the_cluster_that_can_not_be_read_costs_no_report(monkeypatch, move, damaged):
    async def main():
        _, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    bucket, prefix = (buckets.site.world.bucket, "") if damaged == "b" else (buckets.other, PREFIX)
    key = cluster_keys(bucket, prefix)[-1]
    bucket.objects[key] = (bucket.objects[key][0], b"garbage")
    report = moving._moved(RUN, move, "job")
    assert (report.counts["there"], report.counts["failed"]) == (4, 1)
    assert report.counts["streams_failed"] == 0
    (row,) = report.rows
    assert (row["stream"], row["outcome"]) == (None, FAILED)
    for words in (f"in s3://{damaged}: ", key, "Move that object away"):
        assert words in row["error"]
    del bucket.objects[key]
    assert moving._moved(RUN, move, "job").counts["failed"] == 0


def test_open_uploads_that_can_not_be_listed_cost_no_report(monkeypatch):
    async def main():
        _, buckets, _ = await begun(uncopied=0)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)

    async def fails(*_):
        raise RetryableError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryObjectsClient, "list_uploads", fails)
        report = moving.copy(RUN, COPY)
    assert (report.counts["brought"], report.counts["failed"]) == (4, 1)
    assert "s3://t were not all aborted: the store is away. Run this again" in str(report.rows)
    assert cluster_keys(buckets.other, PREFIX), "all else is done"
    assert [key for key in buckets.other.objects if is_manifest_key(PREFIX, key)]
