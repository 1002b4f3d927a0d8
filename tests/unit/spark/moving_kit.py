"""Two buckets, and what ``copy`` and ``restore`` do between them, in one process."""

from collections.abc import Sequence

from tests.unit.offload.test_attribute_restore import Life, lived
from tests.unit.offload.test_restore import Site
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.manifest import is_manifest_key
from tierlog.model.ids import LedgerId
from tierlog.offload.manifests import ManifestStore
from tierlog.offload.restore import RestorePlan, Restorer
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.moving import Move, copy_cluster, end_stream, move_one, mover_of
from tierlog_spark.jobs.moving_plan import (
    Moved,
    StreamPair,
    also_there,
    arrived,
    dying,
    living,
    still_wanted,
    to_move,
    to_restore,
    unbacked,
)

PREFIX = "eu"
COPY = Move(source=S3Settings(bucket="b"), target=S3Settings(bucket="t", key_prefix=PREFIX))
BACK = Move(source=COPY.target, target=COPY.source, restores=True)


class Buckets:
    """A site's bucket, and one more."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.other = MemoryObjects(site.world.clock)
        self.meter = CostMeter()

    def store(self, s3: S3Settings, faults: Faults | None = None) -> ObjectStore:
        bucket = self.site.world.bucket if s3.bucket == "b" else self.other
        return bucket.connect(faults or no_faults(), meter=self.meter)

    def manifests(self, objects: ObjectStore, s3: S3Settings) -> ManifestStore:
        world, cluster = self.site.world, self.site.cluster
        assert cluster is not None
        return ManifestStore(
            objects,
            cluster_id=cluster.cluster_id,
            clock=world.clock,
            ids=world.ids,
            key_prefix=s3.key_prefix,
        )

    async def move(
        self,
        move: Move,
        faults: Faults | None = None,
        *,
        target: ObjectStore | None = None,
        dry_run: bool = False,
    ) -> list[Moved]:
        """Do what the job does, in one process."""
        source = self.store(move.source)
        place = target or self.store(move.target, faults)
        origins, places = self.manifests(source, move.source), self.manifests(place, move.target)
        found = [
            StreamPair(await origins.newest(*name), await places.newest(*name))
            for name in also_there(await origins.streams(), await places.streams(), ())
        ]
        pairs = still_wanted(living(found)) if move.restores else living(found)
        assert self.site.cluster is not None
        cluster_id = self.site.cluster.cluster_id
        mover = mover_of(move, source, place, cluster_id)
        items = [*to_restore(pairs), *unbacked(found)] if move.restores else to_move(pairs)
        seen = [await move_one(mover, move, one, dry_run=dry_run) for one in items]
        moved = [one for one in seen if not one.item.unbacked]
        if not dry_run:
            ended = [] if move.restores else dying(found)
            for end in [*arrived(pairs, moved, anew=not move.restores), *ended]:
                await end_stream(mover, places, end, move)
            whole = all(one.packed is not None for one in moved)
            await copy_cluster(move, origins, places, cluster_id, whole=whole)
        return seen

    async def restored_from_other(self) -> RestorePlan:
        """Lose the metadata, and bring them back from the other bucket."""
        objects = self.store(COPY.target)
        restorer = Restorer(
            objects,
            self.manifests(objects, COPY.target),
            bucket="t",
            endpoint_name="default",
            key_prefix=PREFIX,
            ledger_id_margin=1000,
        )
        plan = await restorer.plan()
        plan.check(accept_loss=False, accept_damage=False)
        return plan

    def written(self) -> int:
        """Requests that changed something, since it was last asked."""
        changing = ("put_object", "upload_part", "create_multipart_upload")
        found = sum(
            amount.requests
            for spent, amount in self.meter.amounts.items()
            if spent.operation in changing
        )
        self.meter = CostMeter()
        return found


async def begun(*, uncopied: int = 1) -> tuple[Life, Buckets, list[LedgerId]]:
    life, ids = await lived(uncopied=uncopied)
    return life, Buckets(life.site), ids


def outcomes(moved: Sequence[Moved]) -> list[str]:
    return [one.outcome for one in moved]


def without_manifests(bucket: MemoryObjects, prefix: str) -> dict[str, tuple[object, bytes]]:
    """Objects by what is behind the prefix, with what is written beside their bytes."""
    return {
        key.removeprefix(prefix): (dict(info.metadata), body)
        for key, (info, body) in bucket.objects.items()
        if not is_manifest_key(prefix, key)
    }


def lose(buckets: Buckets, ledger_id: LedgerId) -> None:
    bucket = buckets.site.world.bucket
    for key in [key for key in bucket.objects if f"-ledger-{ledger_id}" in key]:
        del bucket.objects[key]
