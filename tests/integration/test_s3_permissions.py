"""docs/reference/s3-permissions.md, on a real S3 server behind a proxy that refuses the rest.

Each role does its work with the actions that the page says it needs; without the others it does
what the page says.
"""

import asyncio
import re
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.contracts.s3_proxy import Asked, Fault, S3Proxy
from tests.integration.spark_kit import made_bucket, options_of, rows_read
from tests.integration.test_upload_faults import ENTRIES, LEDGER, Place, opened
from tests.unit.offload.scrubs import scrubber
from tests.unit.offload.world import CLUSTER, STREAM, World, entries_of
from tierlog.adapters.s3 import S3ObjectStore
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.scrub import FindingKind, ScrubReport, ScrubState, ScrubWish
from tierlog.offload.cleaning import UploadsUnseenError
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import CostMeter
from tierlog_spark.jobs.export import ExportOptions, export
from tierlog_spark.jobs.export.log import file_name
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.jobs.usage import usage

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "s3-permissions.md"
ACTIONS = {
    "head_bucket": "s3:ListBucket",
    "list_objects_v2": "s3:ListBucket",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "delete_object": "s3:DeleteObject",
}


def needed_by(role: str) -> set[str]:
    """Return the actions that the page says a role needs."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    column = [cell.strip() for cell in rows[0]].index(role)
    table = rows[2 : 2 + len(set(ACTIONS.values()))]
    return {
        re.sub("[ `]", "", row[0]) for row in table if row[column].strip().startswith("needs it")
    }


def only(allowed: set[str]):
    def rule(asked: Asked) -> Fault | None:
        return None if ACTIONS[asked.operation] in allowed else Fault.DENIED

    return rule


async def start(store: ObjectStore) -> None:
    """Look for the bucket, as every process does first."""
    assert isinstance(store, S3ObjectStore)
    await store.ensure_bucket()


@pytest.fixture
async def place(servers):
    url, meter = servers.endpoints.s3_endpoint_url, CostMeter()
    async with (
        S3Proxy(urlsplit(url).netloc) as proxy,
        opened(servers, proxy.url, meter, request_s_max=20) as store,
        opened(servers, url, CostMeter()) as direct,
    ):
        yield Place(proxy, store, direct, f"permissions/{uuid.uuid4()}/", meter)


def test_the_page_names_every_action_for_somebody():
    assert needed_by("scheduler") == set(ACTIONS.values())
    assert needed_by("reader") == {"s3:ListBucket", "s3:GetObject"}
    assert needed_by("offloader") == {"s3:ListBucket", "s3:GetObject", "s3:PutObject"}


async def test_an_offloader_and_a_reader_do_with_what_they_need(place: Place):
    offloader = place.offloader()
    place.proxy.rule = only(needed_by("offloader"))
    await start(place.store)
    attempt = await place.offload(offloader)
    assert "list_multipart_uploads" in {one.operation for one in place.proxy.asked}
    await place.check_whole(offloader, attempt)
    place.proxy.rule = only(needed_by("reader"))
    await start(place.store)
    tier2 = await offloader.read_offloaded(LEDGER, attempt)
    assert await entries_of(tier2) == ENTRIES
    with pytest.raises(RefusedError) as caught:
        await place.offload(offloader)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert caught.value.details["code"] == "AccessDenied"
    await place.clear()


@pytest.mark.parametrize("refused", ["s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload"])
async def test_a_sweep_without_a_look_at_uploads_is_not_clean(place: Place, refused: str):
    offloader = place.offloader()
    attempt = await place.offload(offloader)
    key = offloader.location(LEDGER, attempt).data_key
    await place.direct.create_upload(key, metadata={}, content_type="x")
    place.proxy.rule = only(needed_by("scheduler") - {refused})
    with pytest.raises(UploadsUnseenError) as caught:
        await offloader.delete_offloaded(LEDGER, attempt)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert [info.key async for info in place.direct.list(place.prefix)] == []
    assert len(await place.direct.list_uploads(place.prefix)) == 1
    place.proxy.rule = only(needed_by("scheduler"))
    await offloader.delete_offloaded(LEDGER, attempt)
    assert await place.direct.list_uploads(place.prefix) == []


async def test_a_scrub_without_a_look_at_uploads_says_so(place: Place):
    world, offloader = World(), place.offloader()
    await world.stream(STREAM)
    await world.catalog().nodes.ensure_cluster(ledger_id_base=LEDGER + 1)
    # Nobody names it.
    attempt = await place.offload(offloader)
    scrubs = scrubber(world, objects=place.store, safety_age_s=-1e12)
    scrubs.key_prefix = place.prefix
    scrubs.manifests = ManifestStore(
        place.store,
        cluster_id=CLUSTER,
        clock=world.clock,
        ids=world.ids,
        key_prefix=place.prefix,
    )

    async def scrubbed() -> ScrubReport:
        report = ScrubReport(
            scrub_id=uuid.uuid4(), wish=ScrubWish(repair=True), started_ms=0, findings_max=10
        )
        await scrubs.run(report)
        report.state = ScrubState.DONE
        return report

    place.proxy.rule = only(needed_by("scheduler") - {"s3:ListBucketMultipartUploads"})
    doubtful = await scrubbed()
    assert not doubtful.is_clean
    assert {one.kind for one in doubtful.findings} == {
        FindingKind.NOT_CHECKED,
        FindingKind.ORPHAN_OBJECTS,
    }
    await place.check_whole(offloader, attempt)
    place.proxy.rule = only(needed_by("scheduler"))
    assert (await scrubbed()).is_clean
    assert [info.key async for info in place.direct.list(place.prefix)] == []


async def test_without_list_bucket_a_process_does_not_start(place: Place):
    place.proxy.rule = only(needed_by("scheduler") - {"s3:ListBucket"})
    with pytest.raises(RefusedError) as caught:
        await start(place.store)
    assert caught.value.reason is Reason.PERMISSION_DENIED


async def test_spark_reads_and_exports_with_what_the_page_says(servers, spark):
    """Reads with a reader's; an export with four more actions where it writes to, and no others."""
    async with (
        S3Proxy(urlsplit(servers.endpoints.s3_endpoint_url).netloc) as proxy,
        made_bucket(servers, "permissions") as bucket,
    ):
        stream = bucket.stream("s", raw=True)
        await stream.add(21, [b"one", b"two"])
        await stream.write()
        s3 = bucket.s3.model_copy(update={"endpoint_url": proxy.url})
        reads, to = needed_by("reader"), f"s3://{s3.bucket}/exports"
        writes = set(re.findall(r"`(s3:\w+)`", sentence("`export` needs")))
        assert len(writes) == 4

        def rule(asked: Asked) -> Fault | None:
            allowed = reads | writes if asked.key.startswith("exports/") else reads
            action = ACTIONS[asked.operation]
            return None if action in allowed else Fault.DENIED

        proxy.rule = rule
        rows = await rows_read(options_of(s3, stream="s"))
        assert [row["payload"] for row in rows] == [b"one", b"two"]
        assert len(await rows_read(options_of(s3), table="attempts")) == 1
        options = ExportOptions(streams=("s",), to=to, s3=s3)
        run = JobRun(spark=spark)
        # What a run that died left is deleted.
        left = f"exports/s/{file_name(date='x', number=1, run='0' * 32, task=1, index=1)}"
        await bucket.objects.put(left, b"", metadata={})
        done = await asyncio.to_thread(export, run, options)
        assert (done.counts["events"], done.counts["removed"]) == (2, 1)
        assert await bucket.objects.head(left) is None
        counted = await asyncio.to_thread(usage, run, s3)
        assert counted.counts["ledgers"] == 1


def sentence(beginning: str) -> str:
    """Return what the page says from these words on, up to the end of the sentence."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(beginning) :].partition(". ")[0]
