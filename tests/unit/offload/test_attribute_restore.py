"""What writers appended comes back with their stream: as of the ledgers that do, and no more.

Must hold: a number of an event that was lost with the disks stands in no attribute; objects of the
checkpoint are all read before it is believed; where the state of writers is unknown, that is said.
"""

from collections.abc import Sequence
from uuid import UUID

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_restore import Site, entries
from tests.unit.offload.world import STREAM
from tests.unit.scheduler.manifests_kit import Leader, newest
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.store import IndexLimits, Tier2AttributeIndex
from tierlog.attributes.update import Shape
from tierlog.catalog import Catalog
from tierlog.format import paths
from tierlog.format.attribute_records import encode_attributes
from tierlog.model.attribute_record import AttributesRecord, GivenUp, KeptRoot
from tierlog.model.attributes import EVENT_COUNT, AttributeKey, Checkpoint
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.manifest import ManifestHead
from tierlog.model.policy import Policy
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.offload.attribute_restore import attributes_cause
from tierlog.offload.restore import RestorePlan, Verdict


def index_of(site: Site, *, prefix: str = "") -> Tier2AttributeIndex:
    assert site.cluster is not None
    return Tier2AttributeIndex(
        site.world.catalog().attributes,
        IndexObjects(
            site.world.bucket.connect(no_faults()),
            cluster_id=site.cluster.cluster_id,
            ids=site.world.ids,
            key_prefix=prefix,
        ),
        PageCache(limit_bytes=1 << 20),
        limits=IndexLimits(chunk_objects_max=2),
        shape=Shape(page_bytes=256),
    )


def catalog_of(life: "Life") -> Catalog:
    return life.site.world.catalog()


class Life:
    """A stream whose owner makes a checkpoint at each ledger's end, and one in the middle."""

    def __init__(self) -> None:
        self.site = Site()
        self.values: dict[AttributeKey, int] = {}
        self.as_of: dict[Position, dict[AttributeKey, int]] = {}
        self.base = Checkpoint()

    async def start(self) -> Stream:
        self.claimed = await self.site.start()
        self.base = await index_of(self.site).load(self.claimed)
        return self.claimed

    async def checkpoint(self, through: Position, keys: Sequence[int]) -> None:
        changes = {key_of(one): through.ledger_id * 1000 + through.entry_id for one in keys}
        self.values = self.values | changes
        self.base = await index_of(self.site).flush(
            self.claimed,
            self.base,
            changes=changes,
            core={EVENT_COUNT: len(self.as_of)},
            through=through,
        )
        self.as_of[through] = self.values

    async def ledger(self, number: int, *, copied: bool = True) -> LedgerId:
        some = entries(number)
        if copied:
            ledger_id = await self.site.copied(self.claimed, some)
        else:
            ledger_id = await self.site.world.seal(self.claimed, some)
        await self.checkpoint(Position(ledger_id, EntryId(3)), range(number * 20, number * 20 + 9))
        end = Position(ledger_id, EntryId(len(some) - 1))
        await self.checkpoint(end, range(0, 100, 1 + number))
        return ledger_id

    async def restored(self) -> tuple[RestorePlan, Stream]:
        self.site.lose_metadata()
        plan = await self.site.restore()
        catalog = self.site.world.catalog()
        return plan, await catalog.streams.claim(STREAM, NodeId("n9"))


async def lived(*, uncopied: int = 1) -> tuple[Life, list[LedgerId]]:
    life = Life()
    await life.start()
    ids = [await life.ledger(number) for number in range(4)]
    for number in range(uncopied):
        await life.ledger(4 + number, copied=False)
    await life.site.write_manifests()
    return life, ids


@pytest.mark.parametrize("uncopied", [0, 1, 3])
def test_attributes_come_back_as_of_the_last_ledger_that_does(uncopied: int) -> None:
    async def main() -> None:
        life, ids = await lived(uncopied=uncopied)
        last = max(one for one in life.as_of if one.ledger_id == ids[-1])
        plan, claimed = await life.restored()
        assert [one.verdict for one in plan.findings] == [Verdict.LOST] * uncopied
        found = await index_of(life.site).load(claimed)
        assert found.through == last
        assert await all_of(index_of(life.site), found) == life.as_of[last]
        assert found.core[EVENT_COUNT] == list(life.as_of).index(last)
        assert found.generation == 1, "nobody who flushed before publishes here"
        # It goes on, and the next manifest names what comes then.
        life.claimed, life.base, life.values = claimed, found, life.as_of[last]
        next_id = await life.ledger(9)
        await life.site.write_manifests()
        _, claimed = await life.restored()
        found = await index_of(life.site).load(claimed)
        assert found.through is not None
        assert found.through.ledger_id == next_id
        assert await all_of(index_of(life.site), found) == life.values

    run_virtual(main(), until_s=1000)


def test_ledgers_that_get_a_copy_later_let_the_manifest_name_a_later_checkpoint() -> None:
    async def main() -> None:
        life = Life()
        claimed = await life.start()
        catalog = life.site.world.catalog()
        ids = [await life.ledger(number, copied=False) for number in range(5)]
        record = await catalog.attributes.get(STREAM)
        assert record is not None
        assert [one.through.ledger_id for one in record.ends if one.through] == ids[:4]
        worker = life.site.world.worker()
        for ledger_id, names in ((ids[1], None), (ids[0], ids[1]), (ids[2], ids[2])):
            await worker.handle(life.site.world.request(claimed, ledger_id))
            leader = Leader(life.site.world)
            await leader.visit()
            known = await newest(life.site.world)
            assert known.head is not None
            through = known.head.attributes_through
            assert (through.ledger_id if through is not None else None) == names
        record = await catalog.attributes.get(STREAM)
        assert record is not None
        # Those before the one that the manifest has by itself are kept no more.
        assert [one.through.ledger_id for one in record.ends if one.through] == ids[2:4]

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("what", ["object", "list", "flipped"])
def test_a_damaged_checkpoint_is_named_and_left_out_once_that_is_accepted(what: str) -> None:
    async def main() -> None:
        life, _ = await lived(uncopied=0)
        known = await life.site.store().newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        named = known.head.attributes
        assert named is not None
        assert named.chunks
        if what == "list":
            del life.site.world.bucket.objects[named.chunks[0].key]
        elif what == "object":
            del life.site.world.bucket.objects[named.objects[-1].key]
        else:
            life.site.world.bucket.damage(named.objects[-1].key, 5)
        life.site.lose_metadata()
        restorer = life.site.restorer()
        plan = await restorer.plan()
        (finding,) = plan.findings
        assert (finding.verdict, finding.ledger_id) == (Verdict.DAMAGED, None)
        assert "attribute" in finding.cause
        with pytest.raises(CorruptError, match="attribute"):
            plan.check(accept_loss=True, accept_damage=False)
        plan.check(accept_loss=False, accept_damage=True)
        await restorer.apply(plan, life.site.world.catalog())
        # The owner rebuilds from the first entry: nothing was trimmed.
        catalog = life.site.world.catalog()
        assert await catalog.attributes.get(STREAM) is None
        # As of the same entry, in other objects: the next restore finds those.
        life.claimed = await catalog.streams.claim(STREAM, NodeId("n9"))
        index, last = index_of(life.site), named.newest.through
        assert last is not None
        base = await index.load(life.claimed)
        await index.flush(life.claimed, base, changes=life.values, core={}, through=last)
        await life.site.write_manifests()
        plan, claimed = await life.restored()
        assert plan.findings == ()
        assert await all_of(index, await index.load(claimed)) == life.values

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("checkpoint", ["named", "damaged", "none"])
def test_what_was_given_up_is_known_after_a_restore(checkpoint: str) -> None:
    """Else a rebuild would count entries that everybody was told are not counted."""

    async def main() -> None:
        life = Life()
        await life.start()
        if checkpoint == "none":
            ledger_id = await life.site.copied(life.claimed, entries(0))
        else:
            ledger_id = await life.ledger(0)
        catalog = life.site.world.catalog()
        lost = GivenUp(ledger_id, EntryId(1), EntryId(2))
        await catalog.attributes.accept_loss(life.claimed, by="admin")
        await catalog.attributes.give_up(life.claimed, lost)
        await life.site.write_manifests()
        if checkpoint == "damaged":
            for key in [one for one in life.site.world.bucket.objects if "/attributes/" in one]:
                life.site.world.bucket.damage(key, 5)
        life.site.lose_metadata()
        restorer = life.site.restorer()
        plan = await restorer.plan()
        plan.check(accept_loss=False, accept_damage=checkpoint == "damaged")
        await restorer.apply(plan, life.site.world.catalog())
        record = await life.site.world.catalog().attributes.get(STREAM)
        assert record is not None
        assert record.given_up == (lost,)
        through = Position(ledger_id, EntryId(len(entries(0)) - 1))
        assert record.newest.through == (through if checkpoint == "named" else None)
        # And the manifest after that has it still.
        claimed = await catalog_of(life).streams.claim(STREAM, NodeId("n9"))
        index = index_of(life.site)
        base = await index.load(claimed)
        await index.flush(claimed, base, changes={}, core={}, through=through)
        await life.site.write_manifests()
        known = await life.site.store().newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        assert known.head.attributes is not None
        assert known.head.attributes.given_up == (lost,)

    run_virtual(main(), until_s=1000)


def test_what_was_trimmed_without_a_checkpoint_leaves_writers_unknown_and_it_is_said() -> None:
    async def main() -> None:
        for covered in (True, False):
            life, ids = await lived(uncopied=0)
            catalog = life.site.world.catalog()
            if not covered:
                # As if nobody had made checkpoints.
                await catalog.store.delete(paths.attributes_path(STREAM), version=-1)
                objects = life.site.world.bucket.objects
                for key in [one for one in objects if one.endswith(".manifest")]:
                    del objects[key]
            await catalog.retention.begin_trim(
                STREAM,
                life.claimed.incarnation,
                ids[:2],
                grounds=await life.site.world.grounds(),
            )
            await life.site.write_manifests()
            life.site.lose_metadata()
            plan = await life.site.restorer().plan()
            unknown = [one for one in plan.findings if one.verdict is Verdict.STATE_UNKNOWN]
            assert bool(unknown) is not covered
            for one in unknown:
                assert "state of writers" in one.cause
            if unknown:
                with pytest.raises(RefusedError, match="writers appended to 1 streams") as raised:
                    plan.check(accept_loss=False, accept_damage=True)
                assert "--accept-loss" in raised.value.remedy
            plan.check(accept_loss=not covered, accept_damage=False)

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_checkpoint_from_the_middle_of_what_was_trimmed_leaves_writers_unknown(
    *, is_named: bool
) -> None:
    async def main() -> None:
        life = Life()
        await life.start()
        catalog = life.site.world.catalog()
        kept = await life.site.copied(life.claimed, entries(0))
        await life.checkpoint(at(kept, 11), range(20))
        trimmed = await life.site.copied(life.claimed, entries(1))
        await life.checkpoint(at(trimmed, 3), range(9))
        await life.site.write_manifests()
        if is_named:
            await life.checkpoint(at(trimmed, 11), range(5))
            await life.site.write_manifests()
        # No copies are wanted any more: that of a former ledger's end is not kept.
        await catalog.streams.set_policy(STREAM, Policy())
        last = await life.site.world.seal(life.claimed, entries(2))
        await life.checkpoint(at(last, 11), range(9))
        await catalog.retention.begin_trim(
            STREAM,
            life.claimed.incarnation,
            [kept, trimmed],
            grounds=await life.site.world.grounds(),
        )
        await life.site.write_manifests()
        known = await newest(life.site.world)
        assert known.head is not None
        assert (known.head.trimmed_through, known.head.trimmed_last) == (trimmed, 11)
        await life.site.write_manifests()
        life.site.lose_metadata()
        plan = await life.site.restorer().plan()
        causes = [one.cause for one in plan.findings if one.verdict is Verdict.STATE_UNKNOWN]
        assert len(causes) == (not is_named)
        assert all(f"is as of {trimmed}:3" in one for one in causes)

    run_virtual(main(), until_s=1000)


def test_of_a_ledger_whose_end_no_manifest_had_only_a_later_checkpoint_knows_all() -> None:
    for place, last, known in (
        (at(3, 5), 5, True),
        (at(3, 4), 5, False),
        (at(3, 5), None, False),
        (at(2, 9), 5, False),
        (at(4, 0), None, True),
    ):
        named = AttributesRecord(incarnation=UUID(int=1), newest=KeptRoot(through=place))
        head = ManifestHead(
            stream=STREAM,
            incarnation=UUID(int=1),
            created_ms=0,
            trimmed_through=LedgerId(3),
            trimmed_last=None if last is None else EntryId(last),
            attributes=named,
        )
        assert (attributes_cause(head, []) is None) is known


def test_a_record_from_a_backup_that_is_older_than_the_manifests_stops_deletions() -> None:
    async def main() -> None:
        life, _ = await lived(uncopied=0)
        store = life.site.world.catalog().store
        path = paths.attributes_path(STREAM)
        newest, old = await store.get(path), AttributesRecord(incarnation=life.claimed.incarnation)
        assert newest is not None
        await store.set(path, encode_attributes(old), version=newest.version)
        leader = Leader(life.site.world)
        await leader.visit()
        assert "the checkpoint of attributes is as of None" in (leader.gate.stopped(STREAM) or "")
        await store.set(path, newest.data, version=newest.version + 1)
        await leader.visit()
        assert leader.gate.stopped(STREAM) is None

    run_virtual(main(), until_s=1000)


def test_a_bucket_that_was_copied_elsewhere_has_its_attributes_too() -> None:
    async def main() -> None:
        life, ids = await lived(uncopied=0)
        moved = MemoryObjects(life.site.world.clock)
        for key, (info, body) in life.site.world.bucket.objects.items():
            moved.put(f"old/site/{key}", body, info.metadata, if_none_match=False)
        life.site.world.bucket = moved
        life.site.lose_metadata()
        restorer = life.site.restorer(prefix="old/site", bucket="copy")
        plan = await restorer.plan()
        assert plan.findings == ()
        await restorer.apply(plan, life.site.world.catalog())
        claimed = await life.site.world.catalog().streams.claim(STREAM, NodeId("n9"))
        index = index_of(life.site, prefix="old/site")
        found = await index.load(claimed)
        assert found.through == at(ids[-1], len(entries(3)) - 1)
        assert await all_of(index, found) == life.values

    run_virtual(main(), until_s=1000)
