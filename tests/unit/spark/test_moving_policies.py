"""Policies of before take no newer one's place, and are not called restored.

By them a restore of metadata would trim what has been meant to be kept since.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM
from tests.unit.spark.moving_kit import BACK, COPY, PREFIX, Buckets, begun
from tests.unit.spark.test_moving_report import RUN, cluster_keys, open_here
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.manifest import is_manifest_key, unkeep
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.model.stream import OffloadPause
from tierlog.offload.manifests import KnownManifest
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs import moving
from tierlog_spark.jobs.moving_plan import FAILED, StreamPair, older_targets

KEPT = Policy(retention_time_ms=10**9)


def copied(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    async def main() -> Buckets:
        _, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        return buckets

    buckets = run_virtual(main(), until_s=1000)
    open_here(monkeypatch, buckets)
    return buckets


def of_stream(buckets: Buckets, s3: S3Settings) -> KnownManifest:
    async def main() -> KnownManifest:
        manifests = buckets.manifests(buckets.store(s3), s3)
        (name,) = await manifests.streams()
        return await manifests.newest(*name)

    return run_virtual(main(), until_s=1000)


def set_policy(buckets: Buckets, changed_ms: int, policy: Policy = KEPT) -> None:
    say(buckets, policy=policy, policy_changed_ms=changed_ms)


def say(buckets: Buckets, **changed: Any) -> None:
    """Have the first bucket say of its stream what somebody changed."""

    async def main() -> None:
        manifests = buckets.manifests(buckets.store(COPY.source), COPY.source)
        (name,) = await manifests.streams()
        known = await manifests.newest(*name)
        assert known.head is not None
        head = replace(known.head, **changed)
        await manifests.write(known, head, put={})

    run_virtual(main(), until_s=1000)


def policy_of(buckets: Buckets, s3: S3Settings) -> Policy:
    head = of_stream(buckets, s3).head
    assert head is not None
    return head.policy


def of_cluster(buckets: Buckets, s3: S3Settings) -> Policy | None:
    """What a bucket says of all streams; None: it has no manifest of the cluster."""

    async def main() -> Policy | None:
        assert buckets.site.cluster is not None
        manifests = buckets.manifests(buckets.store(s3), s3)
        _, found = await manifests.cluster(buckets.site.cluster.cluster_id)
        return None if found is None else found.levels.cluster

    return run_virtual(main(), until_s=1000)


def set_levels(buckets: Buckets, changed_ms: int, policy: Policy = KEPT) -> None:
    """Have the first bucket say of all streams what somebody changed."""

    async def main() -> None:
        manifests = buckets.manifests(buckets.store(COPY.source), COPY.source)
        assert buckets.site.cluster is not None
        generation, known = await manifests.cluster(buckets.site.cluster.cluster_id)
        assert known is not None
        levels = replace(known.levels, cluster=policy, level_changed_ms={"": changed_ms})
        await manifests.write_cluster(generation + 1, replace(known, levels=levels))

    run_virtual(main(), until_s=1000)


def lose_newest(bucket: MemoryObjects, prefix: str, *, cluster: bool) -> None:
    found = cluster_keys(bucket, prefix) if cluster else manifests_of(bucket)
    del bucket.objects[max(found)]


def manifests_of(bucket: MemoryObjects) -> list[str]:
    return [key for key in bucket.objects if f"/{STREAM}/" in key and ".manifest" in key]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_policy_that_was_changed_later_than_the_sources_stays_in_the_copy(monkeypatch, dry_run):
    buckets = copied(monkeypatch)
    set_policy(buckets, 5)
    assert moving.copy(RUN, COPY).counts["failed"] == 0
    assert policy_of(buckets, COPY.target) == KEPT
    lose_newest(buckets.site.world.bucket, "", cluster=False)
    before = dict(buckets.other.objects)
    report = moving.copy(replace(RUN, dry_run=dry_run), COPY)
    assert buckets.other.objects == before
    assert (report.counts["failed"], report.counts["streams_failed"]) == (1, 1)
    (row,) = report.rows
    assert (row["stream"], row["outcome"]) == (STREAM, FAILED)
    for words in ("own policy was changed at 5 there", "let its scheduler write"):
        assert words in row["error"]
    # One that the source changed since is newer, whatever it says.
    set_policy(buckets, 6, Policy())
    assert moving.copy(RUN, COPY).counts["failed"] == 0
    assert policy_of(buckets, COPY.target) == Policy()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"offload_pause": OffloadPause(since_ms=1), "offload_pauses": 1}, "was paused since"),
        ({"offload_through": LedgerId(7)}, "the wish that ledgers up to 7 be offloaded"),
    ],
)
def test_a_pause_and_a_wish_that_came_later_than_the_sources_stay_in_the_copy(
    monkeypatch, changed, words
):
    buckets = copied(monkeypatch)
    say(buckets, **changed)
    assert moving.copy(RUN, COPY).counts["failed"] == 0
    lose_newest(buckets.site.world.bucket, "", cluster=False)
    before = dict(buckets.other.objects)
    report = moving.copy(RUN, COPY)
    assert buckets.other.objects == before
    (row,) = report.rows
    assert words in row["error"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_bucket_that_has_a_policy_from_before_the_backups_is_not_called_whole(
    monkeypatch, dry_run
):
    buckets = copied(monkeypatch)
    bucket = buckets.site.world.bucket
    set_policy(buckets, 5)
    moving.copy(RUN, COPY)
    lose_newest(bucket, "", cluster=False)
    before = dict(bucket.objects)
    report = moving.restore(replace(RUN, dry_run=dry_run), BACK)
    assert bucket.objects == before
    assert (report.counts["there"], report.counts["failed"]) == (4, 1)
    (row,) = report.rows
    for words in ("own policy was changed at 5 there", "*.manifest and *.part away"):
        assert words in row["error"]
    pair = StreamPair(of_stream(buckets, COPY.target), of_stream(buckets, COPY.source))
    assert pair.target.head is not None
    went_on = replace(pair.target, head=replace(pair.target.head, owner_epoch=99))
    (said,) = older_targets([pair._replace(target=went_on)]).values()
    assert "set again what the backup alone has" in said
    for key in manifests_of(bucket):
        del bucket.objects[key]
    assert moving.restore(RUN, BACK).counts["failed"] == 0
    assert policy_of(buckets, COPY.source) == KEPT
    # A newer one is as it is to be.
    set_policy(buckets, 6, Policy())
    assert moving.restore(RUN, BACK).counts["failed"] == 0


def test_policies_of_the_cluster_that_were_changed_later_are_told_and_stay(monkeypatch):
    buckets = copied(monkeypatch)
    bucket = buckets.site.world.bucket
    set_levels(buckets, 5)
    assert moving.copy(RUN, COPY).counts["failed"] == 0
    assert of_cluster(buckets, COPY.target) == KEPT
    lose_newest(bucket, "", cluster=True)
    for job, move, said in (
        (moving.copy, COPY, "changed later than the source's"),
        (moving.restore, BACK, "from before the backup's"),
    ):
        before = dict(bucket.objects), dict(buckets.other.objects)
        report = job(RUN, move)
        assert (dict(bucket.objects), dict(buckets.other.objects)) == before
        assert (report.counts["there"], report.counts["failed"]) == (4, 1)
        (row,) = report.rows
        assert (row["stream"], row["outcome"]) == (None, FAILED)
        for words in (said, "policies of the cluster", "let its scheduler write"):
            assert words in row["error"]
    for key in cluster_keys(bucket, ""):
        del bucket.objects[key]
    assert moving.restore(RUN, BACK).counts["failed"] == 0
    assert of_cluster(buckets, COPY.source) == KEPT
    set_levels(buckets, 6, Policy())
    assert moving.restore(RUN, BACK).counts["failed"] == 0
    assert moving.copy(RUN, COPY).counts["failed"] == 0
    assert of_cluster(buckets, COPY.target) == Policy()


def damaged_everywhere(buckets: Buckets) -> None:
    """Leave no sound copy of one ledger in either bucket."""
    copies = sorted(of_stream(buckets, COPY.source).ledgers.items())
    copy = unkeep(copies[1][1].packed).copy
    assert copy is not None
    buckets.site.world.bucket.damage(copy.location.data_key, 700)
    for key in copy.location.keys:
        buckets.other.objects.pop(f"{PREFIX}/{key}", None)


def test_policies_that_are_copied_once_go_along_whatever_else_can_not_be_copied(monkeypatch):
    buckets = copied(monkeypatch)
    damaged_everywhere(buckets)
    set_levels(buckets, 5)
    report = moving.copy(RUN, COPY)
    assert (report.counts["there"], report.counts["failed"]) == (3, 1)
    assert of_cluster(buckets, COPY.target) == KEPT
    # Of what has not arrived there is no first one.
    buckets.other.objects.clear()
    assert moving.copy(RUN, COPY).counts["failed"] == 1
    assert of_cluster(buckets, COPY.target) is None


def test_the_clusters_manifest_comes_back_though_one_ledger_is_lost_for_good(monkeypatch):
    buckets = copied(monkeypatch)
    bucket = buckets.site.world.bucket
    set_levels(buckets, 5)
    moving.copy(RUN, COPY)
    damaged_everywhere(buckets)
    for key in [one for one in bucket.objects if is_manifest_key("", one)]:
        del bucket.objects[key]
    report = moving.restore(RUN, BACK)
    assert (report.counts["there"], report.counts["failed"]) == (3, 1)
    assert manifests_of(bucket) == [], "one that names a damaged copy"
    assert of_cluster(buckets, COPY.source) == KEPT


def test_policies_of_the_cluster_go_along_though_no_stream_of_it_can_be_copied(monkeypatch):
    buckets = copied(monkeypatch)
    set_policy(buckets, 5)
    moving.copy(RUN, COPY)
    lose_newest(buckets.site.world.bucket, "", cluster=False)
    set_levels(buckets, 7)
    assert moving.copy(RUN, COPY).counts["streams_failed"] == 1
    assert of_cluster(buckets, COPY.target) == KEPT
