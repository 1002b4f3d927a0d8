"""Metadata that came back from a backup delete nothing, and say so (protocols.md, section 3)."""

from uuid import UUID

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import (
    ENTRIES,
    Leader,
    backup,
    offloaded,
    restore,
    store_of,
    trim,
)
from tierlog.model.ids import NodeId
from tierlog.offload.manifests import BucketGuard
from tierlog_scheduler.manifests import RESTORED


class TestOlderMetadata:
    """ZooKeeper came back from a backup."""

    async def _told(self, world: World) -> str | None:
        leader = Leader(world)
        before = dict(world.bucket.objects)
        for _ in range(3):
            await leader.visit()
        assert world.bucket.objects == before
        return leader.gate.stopped(STREAM)

    def test_a_ledger_that_they_do_not_know(self) -> None:
        async def main() -> None:
            world = World()
            claimed = await world.stream()
            first = await offloaded(world, claimed)
            kept = backup(world.metadata)
            second = await offloaded(world, claimed)
            await Leader(world).visit()
            now = backup(world.metadata)
            restore(world.metadata, kept)
            why = await self._told(world)
            assert why == (
                f"{RESTORED}: ledger {second} is named by the manifest and unknown to the metadata"
            )
            leader = Leader(world)
            await leader.visit()
            context = await world.context(first)
            assert not await leader.gate.may_delete_local(context)
            assert not await leader.gate.may_sweep(context, UUID(int=1))
            assert not await leader.gate.let_go(STREAM, claimed.incarnation, first)
            # Newer metadata are there: it goes on by itself.
            restore(world.metadata, now)
            await leader.visit()
            assert leader.gate.stopped(STREAM) is None
            assert await leader.gate.may_delete_local(context)

        run_virtual(main())

    def test_an_attempt_that_they_do_not_know(self) -> None:
        async def main() -> None:
            world = World()
            claimed = await world.stream()
            ledger_id = await world.seal(claimed, ENTRIES)
            kept = backup(world.metadata)
            await world.worker().handle(world.request(claimed, ledger_id))
            done = await world.context(ledger_id)
            assert done.uuid is not None
            await Leader(world).visit()
            restore(world.metadata, kept)
            assert f"newer attempt in the manifest, {done.uuid}" in (await self._told(world) or "")
            # A worker that comes now abandons what it does not know, and cleans nothing.
            await world.worker(name="w2").handle(world.request(claimed, ledger_id))
            context = await world.context(ledger_id)
            assert context.uuid != done.uuid
            assert (await self._told(world) or "").startswith(RESTORED)

        run_virtual(main())

    def test_the_attempt_that_was_under_way_in_them_is_kept_by_workers(self) -> None:
        async def main() -> None:
            world = World()
            claimed = await world.stream()
            ledger_id = await world.seal(claimed, ENTRIES)
            attempt = await world.catalog().contexts.begin_attempt(
                ledger_id,
                uuid=UUID(int=9),
                location=world.offloader().location(ledger_id, UUID(int=9)),
                worker="w",
            )
            kept = backup(world.metadata)
            handle = world.open_ledger(
                ledger_id,
                await world.catalog().ledgers.get(ledger_id),  # type: ignore[arg-type]
            )
            copy = await world.offloader().offload(handle, UUID(int=9), {})
            await world.catalog().contexts.complete_attempt(ledger_id, uuid=UUID(int=9), copy=copy)
            await Leader(world).visit()
            guard = BucketGuard(store_of(world))
            restore(world.metadata, kept)
            assert not await guard.may_clean(attempt, UUID(int=9))
            assert await guard.may_clean(attempt, UUID(int=10))
            await world.worker(name="w2").handle(world.request(claimed, ledger_id))
            context = await world.context(ledger_id)
            assert context.complete
            assert context.swept_at(UUID(int=9)) == 0
            assert attempt.location is not None
            assert {attempt.location.data_key, attempt.location.index_key} <= set(
                world.bucket.objects
            )

        run_virtual(main())

    def test_what_was_trimmed_and_stands_in_the_list_again(self) -> None:
        async def main() -> None:
            world = World()
            claimed = await world.stream()
            first = await offloaded(world, claimed)
            await offloaded(world, claimed)
            await Leader(world).visit()
            kept = backup(world.metadata)
            await trim(world, first)
            leader = Leader(world)
            await leader.visit()
            assert await leader.gate.let_go(STREAM, claimed.incarnation, first)
            restore(world.metadata, kept)
            assert f"ledger {first} is listed" in (await self._told(world) or "")

        run_virtual(main())

    def test_an_owner_epoch_that_they_do_not_know(self) -> None:
        async def main() -> None:
            world = World()
            await world.stream()
            kept = backup(world.metadata)
            claimed = await world.catalog().streams.claim(STREAM, NodeId("n2"))
            await offloaded(world, claimed)
            await Leader(world).visit()
            restore(world.metadata, kept)
            assert "owner epoch 1 where the manifest has 2" in (await self._told(world) or "")

        run_virtual(main())
