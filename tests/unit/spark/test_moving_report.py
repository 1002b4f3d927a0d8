"""What a copy or a restore could not do has a row, is counted, and costs nothing else its report.

The whole job runs here, with as much of Spark as it asks for.
"""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM
from tests.unit.spark.bucket_kit import HEAD
from tests.unit.spark.moving_kit import BACK, COPY, PREFIX, Buckets, begun
from tests.unit.spark.test_export_comparing import Here
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.format.manifest import is_manifest_key, parse_cluster_key
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import ClusterManifest
from tierlog.model.node import Cluster
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.manifests import KnownManifest
from tierlog_spark.jobs import fanout, moving
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.jobs.moving_plan import (
    DELETED,
    FAILED,
    StreamPair,
    not_restored,
    older_targets,
)

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


def copied_once(monkeypatch):
    async def main():
        _, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    return buckets


def cluster_keys(bucket, prefix: str) -> list[str]:
    return sorted(key for key in bucket.objects if parse_cluster_key(prefix, key) is not None)


@pytest.mark.parametrize("damaged", ["b", "t"])
@pytest.mark.parametrize("move", [COPY, BACK])
def test_a_manifest_of_the_cluster_that_can_not_be_read_costs_no_report(monkeypatch, move, damaged):
    buckets = copied_once(monkeypatch)
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


@pytest.mark.parametrize("streams", [(), (STREAM,), (StreamName("other"),)])
@pytest.mark.parametrize("deleting", ["b", "t"])
def test_a_stream_that_does_not_come_back_as_it_is_being_deleted_has_a_row_and_fails_where_named(
    monkeypatch, deleting, streams
):
    async def main():
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        s3 = COPY.source if deleting == "b" else COPY.target
        manifests = buckets.manifests(buckets.store(s3), s3)
        known = await manifests.newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        name = StreamName("other")
        other = replace(known.head, stream=name, attributes=None)
        nothing = replace(known, stream=name, generation=0, head=None, ledgers={})
        backup = buckets.manifests(buckets.store(COPY.target), COPY.target)
        await backup.write(nothing, other, put={}, removed=[])
        gone = replace(known.head, lifecycle=StreamLifecycle.DELETING, attributes=None)
        await manifests.write(known, gone, put={}, removed=ids)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    bucket = buckets.site.world.bucket
    if deleting == "t":
        for key in [key for key in bucket.objects if f"/{STREAM}/" in key]:
            del bucket.objects[key]
    before = set(bucket.objects)
    report = moving.restore(RUN, replace(BACK, streams=streams))
    assert {key for key in set(bucket.objects) - before if f"/{STREAM}/" in key} == set()
    named = StreamName("other") not in streams
    assert report.counts["streams_deleted"] == len(report.rows) == named
    assert report.counts["failed"] == (STREAM in streams)
    for row in report.rows:
        assert (row["stream"], row["outcome"]) == (STREAM, DELETED)
        said = "the bucket says" if deleting == "b" else "use an older backup"
        assert said in row["error"]
        assert "nothing of it comes back" in row["error"]


def test_a_stream_of_whose_name_another_one_is_there_is_missed_by_nobody():
    def known(incarnation, lifecycle=None, name=STREAM):
        head = None
        if lifecycle is not None:
            one = UUID(int=incarnation)
            head = replace(HEAD, stream=name, incarnation=one, lifecycle=lifecycle)
        return KnownManifest(stream=name, incarnation=UUID(int=incarnation), head=head)

    lives, dies = StreamLifecycle.ACTIVE, StreamLifecycle.DELETING
    anew = [StreamPair(known(2, lives), known(2)), StreamPair(known(2), known(2, lives))]
    for pair in anew:
        by_backup = [StreamPair(known(1, dies), known(1)), pair]
        assert not_restored(by_backup, [STREAM]) == []
        by_bucket = [StreamPair(known(1, lives), known(1, dies)), pair]
        assert [(one.stream, one.failed) for one in not_restored(by_bucket, [STREAM])] == [
            (STREAM, False)
        ]
    # What the bucket has is there, whatever the backup says of it.
    assert not_restored([StreamPair(known(1, dies), known(1, lives))], [STREAM]) == []
    twice = [StreamPair(known(one, dies), known(one)) for one in (1, 2)]
    assert [one.failed for one in not_restored(twice, [STREAM])] == [True]
    part = StreamName(f"{STREAM}-partition-1")
    whole = [StreamPair(known(1, dies, part), known(1, None, part))]
    assert [one.failed for one in not_restored(whole, [STREAM])] == [True]
    assert [one.failed for one in not_restored(whole, ())] == [False]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("backup", ["older", "without it", "deleting"])
def test_an_attribute_index_that_the_backup_does_not_have_is_looked_at_all_the_same(
    monkeypatch, backup, lost
):
    async def main():
        life, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        before = set(life.site.world.bucket.objects)
        await life.ledger(9)
        await life.site.write_manifests()
        manifests = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await manifests.newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        if backup == "without it":
            for key in [key for key in buckets.other.objects if f"/{STREAM}/" in key]:
                del buckets.other.objects[key]
            nothing = replace(known, stream=StreamName("o"), generation=0, head=None, ledgers={})
            head = replace(known.head, stream=StreamName("o"), attributes=None)
            await manifests.write(nothing, head, put={}, removed=[])
        elif backup == "deleting":
            gone = replace(known.head, lifecycle=StreamLifecycle.DELETING, attributes=None)
            await manifests.write(known, gone, put={}, removed=[])
        return buckets, before

    buckets, before = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    bucket = buckets.site.world.bucket
    assert moving.restore(RUN, BACK).counts["failed"] == 0
    new = [key for key in sorted(set(bucket.objects) - before) if "/attributes/" in key]
    key = next(one for one in reversed(new) if not one.endswith(".list"))
    if lost:
        del bucket.objects[key]
    else:
        bucket.damage(key, 30)
    was = dict(bucket.objects)
    report = moving.restore(RUN, BACK)
    assert bucket.objects == was
    assert (report.counts["failed"], report.counts["streams_failed"]) == (1, 1)
    (row,) = [one for one in report.rows if one["outcome"] == FAILED]
    assert row["stream"] == STREAM
    for words in (key, "the backup did not bring it", "bring from a backup that has it"):
        assert words in row["error"]


@pytest.mark.parametrize("lost", ["nothing", "manifests", "index"])
def test_an_attribute_index_that_is_damaged_in_the_backup_alone_keeps_nothing_back(
    monkeypatch, lost
):
    buckets = copied_once(monkeypatch)
    bucket = buckets.site.world.bucket
    indexes = [key for key in sorted(bucket.objects) if "/attributes/" in key]
    hurt = next(key for key in reversed(indexes) if not key.endswith(".list"))
    before = dict(bucket.objects)
    buckets.other.damage(f"{PREFIX}/{hurt}", 30)
    if lost == "manifests":
        for key in [key for key in bucket.objects if f"/{STREAM}/" in key and ".manifest" in key]:
            del bucket.objects[key]
    if lost == "index":
        del bucket.objects[hurt]
        before = dict(bucket.objects)
    report = moving.restore(RUN, BACK)
    assert {key: one[1] for key, one in bucket.objects.items() if ".manifest" not in key} == {
        key: one[1] for key, one in before.items() if ".manifest" not in key
    }
    assert report.counts["failed"] == (lost == "index")
    assert [one for one in bucket.objects if f"/{STREAM}/" in one and ".manifest" in one]
    if lost == "index":
        (row,) = report.rows
        for words in (f"in s3://t: object {PREFIX}/{hurt}", "Run this again", "from a backup"):
            assert words in row["error"]
        assert "--accept-damage" not in row["error"]


def test_an_attribute_index_that_is_compared_as_it_comes_back_is_not_read_once_more(monkeypatch):
    copied_once(monkeypatch)

    async def fails(*_):
        raise AssertionError

    monkeypatch.setattr(moving, "check_index", fails)
    report = moving.restore(RUN, BACK)
    assert (report.counts["there"], report.counts["failed"]) == (4, 0)


def bucket_lost_its_newest(monkeypatch):
    """Copy, go on, copy again; then let the first bucket lose the manifest that came since.

    Returns both, and what is gone.
    """

    async def main():
        life, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        await life.ledger(9)
        await life.site.write_manifests()
        await buckets.move(COPY)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    bucket = buckets.site.world.bucket
    newest = max(key for key in bucket.objects if f"/{STREAM}/" in key and ".manifest" in key)
    return buckets, {newest: bucket.objects.pop(newest)}


def bucket_that_went_on(buckets):
    """The bucket's manifest as it is where a new ledger got a copy since."""

    async def main():
        pairs = []
        for s3 in (COPY.target, COPY.source):
            manifests = buckets.manifests(buckets.store(s3), s3)
            (name,) = await manifests.streams()
            pairs.append(await manifests.newest(*name))
        backup, known = pairs
        last = max(known.ledgers)
        more = {LedgerId(last + 1000): known.ledgers[last]}
        return [StreamPair(backup, replace(known, ledgers={**known.ledgers, **more}))]

    return run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_source_that_lost_its_newest_manifest_takes_nothing_from_its_copy(monkeypatch, dry_run):
    buckets, gone = bucket_lost_its_newest(monkeypatch)
    before = dict(buckets.other.objects)
    report = moving.copy(replace(RUN, dry_run=dry_run), COPY)
    assert buckets.other.objects == before
    assert (report.counts["failed"], report.counts["streams_failed"]) == (1, 1)
    (row,) = report.rows
    assert (row["stream"], row["outcome"]) == (STREAM, FAILED)
    for words in ("names copies of 1 ledgers", "that one is older", "let its scheduler write"):
        assert words in row["error"]
    buckets.site.world.bucket.objects.update(gone)
    assert moving.copy(RUN, COPY).counts["failed"] == 0


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_bucket_whose_manifest_is_older_than_the_backups_is_not_called_whole(
    monkeypatch, dry_run
):
    buckets, _ = bucket_lost_its_newest(monkeypatch)
    bucket = buckets.site.world.bucket
    before = dict(bucket.objects)
    report = moving.restore(replace(RUN, dry_run=dry_run), BACK)
    assert bucket.objects == before
    assert (report.counts["there"], report.counts["failed"]) == (5, 1)
    (row,) = report.rows
    assert (row["stream"], row["outcome"]) == (STREAM, FAILED)
    for words in ("does not name the copies of 1 ledgers", "*.manifest and *.part away"):
        assert words in row["error"]
    others = bucket_that_went_on(buckets)
    assert [*older_targets(others)] == [one.name for one in others]
    assert "names others that the backup's does not" in "".join(older_targets(others).values())
    ((backup, known),) = others
    assert backup.head is not None
    for newer in ({}, {"owner_epoch": 99}, {"trimmed_through": min(backup.ledgers)}):
        few = {
            number: one for number, one in backup.ledgers.items() if number < max(backup.ledgers)
        }
        went_on = replace(known, head=replace(backup.head, **newer), ledgers=few)
        (said,) = older_targets([StreamPair(backup, went_on)]).values()
        assert ("*.manifest and *.part away" in said) == (not newer)
    for key in [one for one in bucket.objects if is_manifest_key("", one)]:
        del bucket.objects[key]
    assert moving.restore(RUN, BACK).counts["failed"] == 0
    assert moving.restore(RUN, BACK).counts["failed"] == 0


def test_a_copy_that_says_that_a_stream_is_being_deleted_is_not_told_otherwise(monkeypatch):
    async def main():
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        manifests = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await manifests.newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        gone = replace(known.head, lifecycle=StreamLifecycle.DELETING, attributes=None)
        await manifests.write(known, gone, put={}, removed=ids)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    before = dict(buckets.other.objects)
    report = moving.copy(RUN, COPY)
    assert buckets.other.objects == before
    assert report.counts["failed"] == 1
    assert "is being deleted, and the source does not" in report.rows[0]["error"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_is_another_clusters_is_not_restored_into_a_bucket(monkeypatch, dry_run):
    buckets = copied_once(monkeypatch)
    bucket, run = buckets.site.world.bucket, replace(RUN, dry_run=dry_run)
    bucket.objects.clear()
    other = Cluster(cluster_id=UUID(int=9), created_ms=1)

    async def written():
        manifests = buckets.manifests(buckets.store(COPY.source), COPY.source)
        await manifests.write_cluster(1, ClusterManifest(cluster=other))
        return dict(bucket.objects)

    before = run_virtual(written(), until_s=1000)
    words = f"s3://t is of cluster .* s3://b, .* {other.cluster_id}"
    with pytest.raises(RefusedError, match=words) as told:
        moving.restore(run, BACK)
    assert "tierlog spark copy" in told.value.remedy
    assert bucket.objects == before
    # A bucket that lost everything may be anybody's; and clusters may share one.
    bucket.objects.clear()
    assert moving.restore(RUN, BACK).counts["brought"] == 4
    run_virtual(written(), until_s=1000)
    assert moving.restore(run, BACK).counts["there"] == 4


@pytest.mark.parametrize("dry_run", [True, False])
def test_nothing_is_copied_into_what_is_another_clusters(monkeypatch, dry_run):
    """Whoever restored from that bucket later would have streams of both."""
    buckets = run_virtual(begun(uncopied=0), until_s=1000)[1]
    open_here(monkeypatch, buckets)
    run, other = replace(RUN, dry_run=dry_run), Cluster(cluster_id=UUID(int=9), created_ms=1)

    async def written():
        manifests = buckets.manifests(buckets.store(COPY.target), COPY.target)
        await manifests.write_cluster(1, ClusterManifest(cluster=other))
        return dict(buckets.other.objects)

    before = run_virtual(written(), until_s=1000)
    words = f"s3://b is of cluster .* s3://t, into .* copied, of cluster {other.cluster_id}"
    with pytest.raises(RefusedError, match=words) as told:
        moving.copy(run, COPY)
    assert "empty or has a copy of this cluster" in told.value.remedy
    assert buckets.other.objects == before
    # Where clusters share a place, one that has a copy there already goes on.
    buckets.other.objects.clear()
    assert moving.copy(RUN, COPY).counts["brought"] == 4
    run_virtual(written(), until_s=1000)
    assert moving.copy(run, COPY).counts["there"] == 4
