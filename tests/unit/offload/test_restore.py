"""A cluster comes back from its bucket alone: same streams, same bytes, and no id twice.

Must hold: an interrupted restore ends the same when it is run again; nothing that is there is ever
changed; what is lost or damaged is named.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import SMALL_RANGES, STREAM, World, entries_of
from tests.unit.scheduler.manifests_kit import backup
from tierlog.adapters.memory.faults import FaultRates, Faults, no_faults
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.catalog import Catalog
from tierlog.catalog.restore import RestoredStream
from tierlog.format import paths
from tierlog.format.manifest import cluster_key
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.node import Cluster
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import NO_LEVELS, Policy
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, Stream
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.manifests import ManifestStore
from tierlog.offload.restore import RestorePlan, Restorer, Verdict
from tierlog_scheduler.manifests import BucketManifests

OTHER = StreamName("ns.other")
MARGIN = 1000


class Site:
    """A world with manifests, whose metadata can be lost."""

    def __init__(self) -> None:
        self.world = World()
        self.cluster: Cluster | None = None

    async def start(self) -> Stream:
        claimed = await self.world.stream(policy=Policy(offload_time_ms=5))
        self.cluster = await self.world.catalog().nodes.ensure_cluster()
        return claimed

    def store(self, faults: Faults | None = None, *, prefix: str = "") -> ManifestStore:
        assert self.cluster is not None
        return ManifestStore(
            self.world.bucket.connect(faults or no_faults()),
            cluster_id=self.cluster.cluster_id,
            clock=self.world.clock,
            ids=self.world.ids,
            key_prefix=prefix,
        )

    async def copied(self, claimed: Stream, entries: Sequence[bytes]) -> LedgerId:
        ledger_id = await self.world.seal(claimed, entries)
        await self.world.worker().handle(self.world.request(claimed, ledger_id))
        return ledger_id

    async def write_manifests(self, *, whole: bool = True) -> None:
        """A pass of a leader, as far as manifests go."""
        catalog = self.world.catalog()
        gate = BucketManifests(self.store(), catalog)
        if whole:
            await gate.record_cluster()
        for name in await catalog.streams.names():
            await gate.look(name)
            await gate.record(await catalog.streams.snapshot(name), {})
            assert gate.stopped(name) is None

    def lose_metadata(self) -> None:
        self.world.metadata = MemoryMetadata()

    def restorer(self, *, prefix: str = "", bucket: str = "b") -> Restorer:
        return Restorer(
            self.world.bucket.connect(no_faults()),
            self.store(prefix=prefix),
            bucket=bucket,
            endpoint_name="default",
            key_prefix=prefix,
            ledger_id_margin=MARGIN,
        )

    async def restore(self, catalog: Catalog | None = None) -> RestorePlan:
        restorer = self.restorer()
        plan = await restorer.plan()
        plan.check(accept_loss=False, accept_damage=False)
        await restorer.apply(plan, catalog or self.world.catalog())
        return plan

    async def read(self, ledger_id: LedgerId, **settings) -> list[bytes]:
        """Read a ledger as a reader does, from what the metadata say of it."""
        context = await self.world.context(ledger_id)
        assert context.uuid is not None
        assert context.location is not None
        offloader = BlockOffloader(
            self.world.bucket.connect(no_faults()),
            Tier2Settings(
                bucket=context.location.bucket,
                cluster_id=UUID(int=1),
                ranges=SMALL_RANGES,
                **settings,
            ),
        )
        handle = await offloader.read_offloaded(
            ledger_id, context.uuid, context.location, copy=context.copy
        )
        return await entries_of(handle)


def entries(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(200)) for _ in range(12)]


async def grown() -> Site:
    """A cluster with policies, partitions, and ledgers here and there."""
    site = Site()
    claimed = await site.start()
    catalog = site.world.catalog()
    await catalog.policies.set_level("ns", Policy(deletion_lag_ms=-1))
    await catalog.streams.create(OTHER, raw=True)
    await catalog.streams.pause_offload(OTHER)
    await catalog.streams.want_offloaded(OTHER, LedgerId(7))
    await catalog.streams.create(StreamName("parts"), partitions=2)
    for seed in range(3):
        await site.copied(claimed, entries(seed))
    await site.world.seal(claimed, [b"closed, and not copied"])
    await site.world.seal(claimed, [b"open"], close=False)
    await site.write_manifests()
    return site


def test_streams_policies_and_every_byte_come_back() -> None:
    async def main() -> None:
        site = await grown()
        catalog = site.world.catalog()
        names = await catalog.streams.names()
        before = {name: (await catalog.streams.snapshot(name)) for name in names}
        contexts = {one: await site.world.context(one) for one in list(site.world.ledgers)[:3]}
        site.lose_metadata()
        plan = await site.restore()
        assert [(one.verdict, one.ledger_id, one.in_the_middle) for one in plan.findings] == [
            (Verdict.LOST, 3, False)
        ]
        catalog = site.world.catalog()
        assert await catalog.streams.names() == names
        for name in names:
            after = await catalog.streams.snapshot(name)
            was = before[name].stream
            kept = before[name].ledgers[:3]
            assert after.ledgers == kept
            assert after.stream == replace(was, owner=None, ledgers=kept)
        for ledger_id, was_context in contexts.items():
            context = await site.world.context(ledger_id)
            assert context.state is OffloadState.TIER1_DELETED
            assert context.bookkeeper_deleted
            for field in ("uuid", "location", "copy", "timestamp_ms", "complete", "stream"):
                assert getattr(context, field) == getattr(was_context, field)
            assert await site.read(ledger_id) == site.world.ledgers[ledger_id]
        assert (await catalog.policies.levels()).namespaces == {"ns": Policy(deletion_lag_ms=-1)}
        cluster = await catalog.nodes.ensure_cluster()
        assert site.cluster is not None
        assert cluster.cluster_id == site.cluster.cluster_id
        assert cluster.ledger_id_base == 4 + 1 + MARGIN
        assert await catalog.ledgers.new_id() >= cluster.ledger_id_base

    run_virtual(main())


def test_afterwards_all_goes_on_and_manifests_with_it() -> None:
    async def main() -> None:
        site = await grown()
        site.lose_metadata()
        await site.restore()
        written = set(site.world.bucket.objects)
        for _ in range(3):
            await site.write_manifests(whole=False)
        # The ledger that was lost is named no more.
        assert len(set(site.world.bucket.objects) - written) == 1
        assert not (await site.restorer().plan()).findings
        claimed = await site.world.catalog().streams.claim(STREAM, "n1")  # type: ignore[arg-type]
        ledger_id = await site.copied(claimed, [b"new"])
        assert ledger_id > 1000
        await site.write_manifests()
        # And once more, with what came since.
        site.lose_metadata()
        plan = await site.restore()
        assert [one.listed.ledger_id for one in plan.streams[0].ledgers] == [0, 1, 2, ledger_id]
        assert await site.read(ledger_id) == [b"new"]
        assert plan.cluster.ledger_id_base == ledger_id + 1 + MARGIN

    run_virtual(main())


@pytest.mark.parametrize("trimmed", [1, 2])
def test_whoever_had_read_what_was_trimmed_goes_on_where_it_was(trimmed: int) -> None:
    async def main() -> None:
        site = Site()
        claimed = await site.start()
        ids = [await site.copied(claimed, entries(seed)) for seed in range(2)]
        await site.write_manifests()
        retention, grounds = site.world.catalog().retention, await site.world.grounds()
        await retention.begin_trim(STREAM, claimed.incarnation, ids[:trimmed], grounds=grounds)
        await site.write_manifests()
        before = (await site.world.catalog().streams.snapshot(STREAM)).stream.trimmed_end
        assert before == Position(ids[trimmed - 1], EntryId(12))
        site.lose_metadata()
        restorer, catalog = site.restorer(), site.world.catalog()
        await restorer.apply(await restorer.plan(), catalog)
        after = await catalog.streams.snapshot(STREAM)
        assert after.stream.trimmed_end == before
        assert len(after.ledgers) == 2 - trimmed

    run_virtual(main())


def test_wherever_a_restore_is_interrupted_it_ends_the_same_when_run_again() -> None:
    async def crash(site: Site, steps: int) -> bool:
        """Let a restore into nothing crash at that step; False: it had come to its end."""
        site.lose_metadata()
        dying = no_faults()
        task = asyncio.create_task(site.restore(site.world.catalog(dying)))
        dying.on_crash = task.cancel
        dying.crash_after(steps)
        await asyncio.wait({task})
        if not dying.crashed:
            task.result()
        return dying.crashed

    async def main() -> None:
        site = await grown()
        site.lose_metadata()
        await site.restore()
        wanted = {path: one.data for path, one in site.world.metadata.dump().items()}
        assert paths.RESTORING not in wanted
        assert paths.RESTORED in wanted
        steps = 1
        while await crash(site, steps):
            catalog = site.world.catalog()
            if await catalog.store.get(paths.RESTORING) is not None:
                # Nobody starts in between.
                with pytest.raises(RefusedError, match="being restored"):
                    await catalog.nodes.ensure_cluster()
            await site.restore()
            once = site.world.metadata.dump()
            assert {path: one.data for path, one in once.items()} == wanted
            await site.restore()
            assert site.world.metadata.dump() == once
            steps += 1
        assert steps > 60

    run_virtual(main())


@pytest.mark.parametrize("seed", range(5))
def test_lost_answers_are_settled(seed: int) -> None:
    async def main() -> None:
        site = await grown()
        site.lose_metadata()
        rates = FaultRates(refused=0.05, request_lost=0.05, reply_lost=0.1)
        await site.restore(site.world.catalog(Faults(random.Random(seed), rates=rates)))
        assert await site.read(LedgerId(1)) == site.world.ledgers[LedgerId(1)]

    run_virtual(main())


def test_the_mark_of_a_node_that_found_the_store_empty_is_in_nobodys_way() -> None:
    async def main() -> None:
        site = await grown()
        site.lose_metadata()
        catalog = site.world.catalog()
        await catalog.scrubs.note_behind()
        await site.restore()
        assert await catalog.scrubs.is_restored()
        assert await site.read(LedgerId(1)) == site.world.ledgers[LedgerId(1)]

    run_virtual(main())


class TestNotEmpty:
    """Nothing that is there is changed."""

    async def _refused(self, site: Site, match: str) -> None:
        before = site.world.metadata.dump()
        with pytest.raises(RefusedError, match=match) as caught:
            await site.restore()
        assert "empty ZooKeeper" in caught.value.remedy
        assert site.world.metadata.dump() == before

    def test_another_cluster(self) -> None:
        async def main() -> None:
            site = await grown()
            site.lose_metadata()
            await site.world.catalog().nodes.ensure_cluster()
            await self._refused(site, "is there, and not")

        run_virtual(main())

    def test_the_same_cluster_in_use(self) -> None:
        async def main() -> None:
            site = await grown()
            await self._refused(site, "not what the bucket says")

        run_virtual(main())

    @pytest.mark.parametrize("streams", [0, 1])
    def test_an_old_backup_of_the_same_cluster_that_lacks_streams(self, streams: int) -> None:
        async def main() -> None:
            site = Site()
            catalog = site.world.catalog()
            site.cluster = await catalog.nodes.ensure_cluster()
            old = MemoryMetadata()
            if streams:
                await catalog.streams.create(OTHER)
            old._nodes = backup(site.world.metadata)
            claimed = await site.start()
            for seed in range(3):
                await site.copied(claimed, entries(seed))
            await site.write_manifests()
            site.world.metadata = old
            await self._refused(site, "the cluster is there, and .* is not")

        run_virtual(main())

    def test_a_stream_that_the_bucket_does_not_know(self) -> None:
        async def main() -> None:
            site = await grown()
            site.lose_metadata()
            await site.restore()
            await site.world.catalog().streams.create(StreamName("later"))
            await self._refused(site, "later is not in the bucket")

        run_virtual(main())

    @pytest.mark.parametrize(
        "path", [paths.context_path(1), paths.stream_path(STREAM), paths.ledger_path(1)]
    )
    def test_records_without_a_cluster(self, path: str) -> None:
        async def main() -> None:
            site = await grown()
            site.lose_metadata()
            await site.world.catalog().store.create(path, b"")
            await self._refused(site, "below")

        run_virtual(main())

    def test_another_restore_was_interrupted(self) -> None:
        async def main() -> None:
            site = await grown()
            site.lose_metadata()
            other = Cluster(cluster_id=UUID(int=4), created_ms=1)
            assert await site.world.catalog().restore.begin(other)
            await self._refused(site, "is being restored, and not")

        run_virtual(main())


def test_a_ledger_amid_a_stream_that_was_never_copied_is_a_loss_that_someone_accepts() -> None:
    async def main() -> None:
        site = Site()
        claimed = await site.start()
        await site.copied(claimed, entries(1))
        lost = await site.world.seal(claimed, entries(2))
        await site.copied(claimed, entries(3))
        await site.write_manifests()
        site.lose_metadata()
        restorer = site.restorer()
        plan = await restorer.plan()
        (finding,) = plan.findings
        assert (finding.verdict, finding.ledger_id, finding.entries) == (Verdict.LOST, lost, 12)
        with pytest.raises(RefusedError, match=f"ledger {lost} of logs") as caught:
            plan.check(accept_loss=False, accept_damage=True)
        assert "--accept-loss" in caught.value.remedy
        plan.check(accept_loss=True, accept_damage=False)
        await restorer.apply(plan, site.world.catalog())
        snapshot = await site.world.catalog().streams.snapshot(STREAM)
        assert [one.ledger_id for one in snapshot.ledgers] == [0, 2]

    run_virtual(main())


@pytest.mark.parametrize("what", ["flip", "index", "data"])
def test_a_damaged_ledger_is_named_and_comes_back_only_as_what_it_is(what: str) -> None:
    async def main() -> None:
        site = Site()
        claimed = await site.start()
        ledger_id = await site.copied(claimed, entries(1))
        await site.copied(claimed, entries(2))
        await site.write_manifests()
        location = (await site.world.context(ledger_id)).location
        assert location is not None
        if what == "flip":
            site.world.bucket.damage(location.index_key, 30)
        else:
            del site.world.bucket.objects[getattr(location, f"{what}_key")]
        site.lose_metadata()
        restorer = site.restorer()
        plan = await restorer.plan()
        (finding,) = plan.findings
        assert (finding.verdict, finding.ledger_id) == (Verdict.DAMAGED, ledger_id)
        with pytest.raises(CorruptError, match=f"ledger {ledger_id} of logs"):
            plan.check(accept_loss=True, accept_damage=False)
        plan.check(accept_loss=False, accept_damage=True)
        await restorer.apply(plan, site.world.catalog())
        # It is not skipped in silence: whoever reads it is told.
        assert (await site.world.context(ledger_id)).complete
        with pytest.raises((CorruptError, RefusedError)):
            await site.read(ledger_id)

    run_virtual(main())


def test_a_damaged_manifest_is_named_and_a_bucket_that_does_not_answer_is_no_damage() -> None:
    async def main() -> None:
        site = await grown()
        (key,) = (key for key in site.world.bucket.objects if f"/{OTHER}/" in key)
        site.world.bucket.damage(key, 60)
        site.lose_metadata()
        plan = await site.restorer().plan()
        damaged = [one for one in plan.findings if one.verdict is Verdict.DAMAGED]
        assert [(one.stream, one.ledger_id) for one in damaged] == [(OTHER, None)]
        assert OTHER not in {one.head.stream for one in plan.streams}
        for verb in ("list", "get", "head", "get_range"):
            given = no_faults()
            given.outages = {f"objects.{verb}"}
            restorer = Restorer(
                site.world.bucket.connect(given),
                site.store(given),
                bucket="b",
                endpoint_name="default",
            )
            with pytest.raises(RetryableError):
                await restorer.plan()

    run_virtual(main())


def test_a_bucket_that_was_copied_elsewhere() -> None:
    async def main() -> None:
        site = await grown()
        world = site.world
        moved = MemoryObjects(world.clock)
        for key, (info, body) in world.bucket.objects.items():
            moved.put(f"old/site/{key}", body, info.metadata, if_none_match=False)
        world.bucket = moved
        site.lose_metadata()
        restorer = site.restorer(prefix="old/site", bucket="copy")
        plan = await restorer.plan()
        await restorer.apply(plan, world.catalog())
        context = await world.context(LedgerId(1))
        assert context.location is not None
        assert context.location.bucket == "copy"
        assert context.location.data_key.startswith("old/site/")
        for ledger_id in list(world.ledgers)[:3]:
            assert await site.read(ledger_id, key_prefix="old/site") == world.ledgers[ledger_id]

    run_virtual(main())


def test_a_damaged_manifest_of_the_cluster_stops_a_restore_until_that_is_accepted() -> None:
    async def main() -> None:
        site = await grown()
        assert site.cluster is not None
        site.world.bucket.damage(cluster_key("", site.cluster.cluster_id, 1), 30)
        site.lose_metadata()
        restorer = site.restorer()
        plan = await restorer.plan()
        with pytest.raises(CorruptError, match=r"the first: the cluster: .*no policies") as caught:
            plan.check(accept_loss=True, accept_damage=False)
        assert "--accept-damage" in caught.value.remedy
        plan.check(accept_loss=True, accept_damage=True)
        catalog = site.world.catalog()
        cluster = await restorer.apply(plan, catalog)
        assert cluster.cluster_id == site.cluster.cluster_id
        assert await catalog.policies.levels() == NO_LEVELS
        assert sum(len(one.ledgers) for one in plan.streams) == 3

    run_virtual(main())


def test_of_several_clusters_one_is_named() -> None:
    async def main() -> None:
        site = await grown()
        first = site.cluster
        assert first is not None
        site.lose_metadata()
        await site.start()
        await site.write_manifests()
        site.lose_metadata()
        with pytest.raises(RefusedError, match="2 clusters") as caught:
            await site.restorer().plan()
        assert "--cluster" in caught.value.remedy
        plan = await site.restorer().plan(first.cluster_id)
        assert plan.cluster.cluster_id == first.cluster_id
        assert sum(len(one.ledgers) for one in plan.streams) == 3
        with pytest.raises(RefusedError, match="clusters"):
            await site.restorer().plan(UUID(int=8))

    run_virtual(main())


def test_a_bucket_without_manifests() -> None:
    async def main() -> None:
        site = Site()
        await site.start()
        with pytest.raises(RefusedError, match="no manifests") as caught:
            await site.restorer().plan()
        assert "--from" in caught.value.remedy

    run_virtual(main())


def test_what_other_attempts_left_counts_for_the_ids() -> None:
    async def main() -> None:
        site = await grown()
        client = site.world.bucket.connect(no_faults())
        await client.put(f"{UUID(int=5)}-ledger-4000", b"", metadata={})
        await client.create_upload(f"{UUID(int=5)}-ledger-5000", metadata={}, content_type="")
        site.lose_metadata()
        plan = await site.restore()
        assert (plan.ledger_id_seen, plan.cluster.ledger_id_base) == (5000, 5001 + MARGIN)

    run_virtual(main())


def test_of_a_stream_made_anew_the_newest_incarnation_comes_back() -> None:
    async def main() -> None:
        site = await grown()
        store = site.world.catalog().store
        await store.delete(paths.stream_path(OTHER), version=-1)
        site.world.clock.advance(5)
        anew, _ = await site.world.catalog().streams.create(OTHER)
        await site.write_manifests()
        site.lose_metadata()
        plan = await site.restore()
        assert [(one.verdict, one.stream) for one in plan.findings if one.ledger_id is None] == [
            (Verdict.SKIPPED, OTHER)
        ]
        found = await site.world.catalog().streams.get(OTHER)
        assert found.incarnation == anew.incarnation

    run_virtual(main())


def test_a_long_list_comes_back_in_pages() -> None:
    async def main() -> None:
        world = World()
        catalog = world.catalog()
        stream = Stream(name=STREAM, incarnation=UUID(int=3), created_ms=1)
        ledgers = tuple(
            ListedLedger(
                ledger_id=LedgerId(number),
                opened_ms=1,
                block_size=1,
                owner_epoch=1,
                closed=True,
                last_entry_id=EntryId(0),
                length=1,
            )
            for number in range(1500)
        )
        contexts = tuple(
            OffloadContext(stream=STREAM, incarnation=stream.incarnation, ledger_id=one.ledger_id)
            for one in ledgers
        )
        restored = RestoredStream(stream=stream, ledgers=ledgers, contexts=contexts)
        await catalog.restore.put_stream(restored)
        snapshot = await catalog.streams.snapshot(STREAM)
        assert snapshot.ledgers == ledgers
        assert len(snapshot.stream.pages) == 4
        assert await catalog.contexts.get(LedgerId(1499)) == contexts[-1]

    run_virtual(main())
