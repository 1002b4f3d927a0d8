"""An object of a bucket, and the same one of its backup: sound, damaged or missing, each with each.

Must hold after a restore, whatever it says: what was sound is as it was, and nothing came that is
damaged. And where it says that nothing failed: all is there, and metadata come back from the bucket
with every ledger of which one of the two still had a name.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM
from tests.unit.spark.moving_kit import COPY, PREFIX, Buckets, begun
from tests.unit.spark.test_moving_report import RUN, cluster_keys, open_here
from tierlog.format.manifest import is_manifest_key, unkeep
from tierlog.model.errors import RefusedError
from tierlog.offload.restore import Restorer
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs import moving
from tierlog_spark.jobs.moving import Move

BACKUP = S3Settings(bucket="b", key_prefix="new")
BACK = Move(source=BACKUP, target=COPY.target, restores=True)
STATES = ("sound", "damaged", "missing")
LEDGERS = 5


class Object(NamedTuple):
    """Where an object lies in the bucket, and in its backup."""

    here: str
    backup: str


def copied_twice(layout):
    """A bucket ("t"), and its backup ("b"), both with manifests of two generations."""

    async def main():
        life, buckets, ids = await begun(uncopied=0)
        for more in (True, False):
            await buckets.move(replace(COPY, layout=layout))
            await buckets.move(Move(source=COPY.target, target=BACKUP))
            if more:
                await life.ledger(9)
                await life.site.write_manifests()
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        copy = unkeep(known.ledgers[ids[1]].packed).copy
        assert copy is not None
        return buckets, copy.location

    return run_virtual(main(), until_s=1000)


def objects_of(buckets, location):
    """What may be hurt, by what it is; of the attribute index the newest object is needed."""
    here, backup = buckets.other, buckets.site.world.bucket

    def manifests(bucket, prefix):
        return sorted(one for one in bucket.objects if is_manifest_key(prefix, one))

    of_stream = [
        [one for one in manifests(*place) if f"/{STREAM}/" in one]
        for place in ((here, PREFIX), (backup, "new"))
    ]
    index = max(one for one in here.objects if "/attributes/" in one and ".list" not in one)
    clusters = cluster_keys(here, PREFIX)[-1], cluster_keys(backup, "new")[-1]
    found = {
        "snapshot": Object(of_stream[0][0], of_stream[1][0]),
        "manifest": Object(of_stream[0][-1], of_stream[1][-1]),
        "cluster": Object(*clusters),
    }
    for key in (*location.keys, index):
        found[key] = Object(key, key.replace(PREFIX, "new", 1))
    return found


def hurt(bucket, key, state):
    if state == "missing":
        del bucket.objects[key]
    elif state == "damaged":
        bucket.damage(key, len(bucket.objects[key][1]) * 2 // 3)


def planned(buckets: Buckets):
    """What a restore of metadata from the bucket would bring back."""

    async def main():
        objects = buckets.store(COPY.target)
        manifests = buckets.manifests(objects, COPY.target)
        restorer = Restorer(
            objects, manifests, bucket="t", endpoint_name="default", key_prefix=PREFIX
        )
        plan = await restorer.plan()
        plan.check(accept_loss=False, accept_damage=False)
        return plan

    return run_virtual(main(), until_s=1000)


def bodies(bucket):
    return {key: body for key, (_, body) in bucket.objects.items()}


@pytest.mark.parametrize("layout", ["two-objects", "single-object"])
def test_a_restore_spoils_nothing_and_calls_nothing_whole_that_is_not(monkeypatch, layout):
    buckets, location = copied_twice(layout)
    open_here(monkeypatch, buckets)
    here, backup = buckets.other, buckets.site.world.bucket
    places = (here, dict(here.objects)), (backup, dict(backup.objects))
    right = bodies(here)
    data = [key for key in right if not is_manifest_key(PREFIX, key)]
    ended = set()
    for (what, where), in_backup, in_bucket in itertools.product(
        objects_of(buckets, location).items(), STATES, STATES
    ):
        for bucket, whole in places:
            bucket.objects.clear()
            bucket.objects.update(whole)
        hurt(backup, where.backup, in_backup)
        hurt(here, where.here, in_bucket)
        before = bodies(here)
        case = f"{what}: {in_backup} in the backup, {in_bucket} in the bucket"
        failed = moving.restore(RUN, BACK).counts["failed"]
        after = bodies(here)
        for key in data:
            assert after.get(key) in (right[key], before.get(key)), case
            assert after.get(key) == right[key] or before.get(key) != right[key], case
        assert {key for key in before if after[key] != before[key]} <= {*data}, case
        ended.add(failed)
        if failed:
            continue
        assert [key for key in data if after[key] != right[key]] == [], case
        nobody_knows = what == "manifest" and (in_backup, in_bucket) == ("missing", "missing")
        plan = planned(buckets)
        assert [len(one.ledgers) for one in plan.streams] == [LEDGERS - nobody_knows], case
    assert ended == {0, 1}


def test_a_backup_without_any_manifest_is_none(monkeypatch):
    buckets, _ = copied_twice("two-objects")
    open_here(monkeypatch, buckets)
    objects = buckets.site.world.bucket.objects
    for key in [one for one in objects if is_manifest_key("new", one)]:
        del objects[key]
    with pytest.raises(RefusedError, match="no manifests below"):
        moving.restore(RUN, BACK)
