"""Streams move: on the loss of a node, on its silence, on its drain (ADR-0016, "Owners")."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
import dataclasses

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft
from tests.unit.streams.test_owners import make_owners, read_stream, running, spans
from tierlog.catalog import Catalog
from tierlog.model.errors import IndeterminateError, Reason, RetryableError
from tierlog.model.ledger import LedgerState
from tierlog_ingest.streams.ownership import by_wish


class Three:
    """Three registered nodes with owners; ``order`` has them as they are wished for STREAM."""

    def __init__(self):
        self.cluster = SmallCluster(3)
        names, self.cluster.names = self.cluster.names, []
        self.order = [
            one.node_id
            for one in by_wish(STREAM, {name: self.cluster.info(name) for name in names})
        ]
        self.away = set()
        self.steps_in = None
        """Called when a node is asked for; False: that one did not answer."""
        self.stores = {}
        self.catalogs = {}
        self.owners = {}

    async def start(self):
        self.catalog = await self.cluster.start()
        for name in self.order:
            store = self.stores[name] = self.cluster.metadata.connect()
            catalog = Catalog.over(store, clock=self.cluster.clock, ids=self.cluster.ids)
            self.catalogs[name] = catalog
            await catalog.nodes.announce(self.cluster.info(name))
            self.owners[name] = make_owners(
                self.cluster, name, catalog=catalog, answers=self.answers
            )

    async def answers(self, info):
        if self.steps_in is not None and not await self.steps_in(info):
            return False
        if info.node_id in self.away:
            await asyncio.sleep(1)
            return False
        return True

    def lose(self, name):
        """Let the node be gone for all others, its session too."""
        self.away.add(name)
        self.stores[name].expire_session()

    async def tell_draining(self, name):
        """Say what a node says of itself before it drains."""
        info = dataclasses.replace(self.cluster.info(name), draining=True)
        await self.catalogs[name].nodes.amend(info)

    async def owner(self):
        return (await self.catalog.streams.get(STREAM)).owner


@contextlib.asynccontextmanager
async def three():
    made = Three()
    await made.start()
    async with running(*made.owners.values()):
        yield made


def test_a_stream_without_an_owner_is_claimed_by_its_wished_one_and_others_name_it():
    async def main():
        async with three() as on:
            first, second, third = on.order
            for other in (second, third):
                found = await on.owners[other].find(STREAM)
                assert (found.info.node_id, found.info.grpc_address) == (first, f"{first}:2")
                with pytest.raises(RetryableError) as caught:
                    await on.owners[other].submit(STREAM, draft(b"x"))
                assert caught.value.reason is Reason.NOT_OWNER
                assert caught.value.details["wire_address"] == f"{first}:1"
            assert await on.owner() is None
            assert (await on.owners[first].find(STREAM)).info is None
            assert (await on.owner()).node_id == first
            assert spans(await on.owners[first].submit(STREAM, draft(b"a"))) == [(0, 0, 0)]

    run_virtual(main())


@pytest.mark.covers("D18")
def test_an_owner_that_is_silent_is_claimed_over_without_waiting_for_its_session():
    async def main():
        loop = asyncio.get_running_loop()
        async with three() as on:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            on.away.add(first)
            begun_s = loop.time()
            found = await on.owners[third].find(STREAM)
            assert found.info.node_id == second
            assert (await on.owners[second].find(STREAM)).info is None
            assert loop.time() - begun_s < 3
            assert spans(await on.owners[second].submit(STREAM, draft(b"b"))) == [(1, 0, 0)]
            # It wakes up: what it writes is refused, and it names its successor.
            with pytest.raises((IndeterminateError, RetryableError)):
                await on.owners[first].submit(STREAM, draft(b"late"))
            on.away.clear()
            assert (await on.owners[first].find(STREAM)).info.node_id == second
        assert await read_stream(on.cluster) == [b"a", b"b"]

    run_virtual(main())


def test_a_deposed_owner_that_writes_nothing_names_the_new_one_when_it_is_asked():
    async def main():
        async with three() as on:
            first, second, _ = on.order
            assert (await on.owners[first].find(STREAM)).info is None
            on.away.add(first)
            assert (await on.owners[second].find(STREAM)).info is None
            on.away.clear()
            # Its own object says "serving" still; the metadata says otherwise.
            assert on.owners[first].statistics()[0]["state"] == "serving"
            assert (await on.owners[first].find(STREAM)).info.node_id == second
            await asyncio.sleep(0.1)
            assert on.owners[first].statistics() == []

    run_virtual(main())


def test_an_owner_that_is_cut_from_the_metadata_names_itself_until_a_fence_tells_it_otherwise():
    async def main():
        loop = asyncio.get_running_loop()
        async with three() as on:
            first, second, _ = on.order
            assert spans(await on.owners[first].submit(STREAM, draft(b"a"))) == [(0, 0, 0)]

            async def hangs(name):
                await asyncio.sleep(4)
                raise RetryableError("the metadata is away", remedy="wait")

            on.catalogs[first].streams.get = hangs
            begun_s = loop.time()
            assert (await on.owners[first].find(STREAM)).info is None
            assert loop.time() - begun_s < 1
            # Its storage nodes take what it appends, and that is all it needs.
            assert spans(await on.owners[first].submit(STREAM, draft(b"b"))) == [(0, 1, 1)]
            # Another one claims: now the fence refuses it, and it names itself no more.
            on.away.add(first)
            assert (await on.owners[second].find(STREAM)).info is None
            with pytest.raises((IndeterminateError, RetryableError)):
                await on.owners[first].submit(STREAM, draft(b"late"))
            with pytest.raises(RetryableError, match="metadata is away"):
                await on.owners[first].find(STREAM)
            assert spans(await on.owners[second].submit(STREAM, draft(b"c"))) == [(1, 0, 0)]
            del on.catalogs[first].streams.get
        assert await read_stream(on.cluster) == [b"a", b"b", b"c"]

    run_virtual(main())


def test_a_live_owner_within_reach_is_never_claimed_over():
    async def main():
        async with three() as on:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            before = await on.owner()
            async with asyncio.TaskGroup() as tasks:
                for other in (second, third) * 5:
                    tasks.create_task(on.owners[other].find(STREAM))
            assert await on.owner() == before

    run_virtual(main())


def test_of_two_that_claim_at_once_one_owns_and_the_other_names_it():
    async def main():
        async with three() as on:
            first, second, third = on.order
            on.away |= {first, second, third}
            found = {}

            async def find(name):
                found[name] = await on.owners[name].find(STREAM)

            await on.owners[first].submit(STREAM, draft(b"a"))
            async with asyncio.TaskGroup() as tasks:
                # Neither reaches the other, so that both may claim.
                tasks.create_task(find(second))
                tasks.create_task(find(third))
            on.away.clear()
            owner = (await on.owner()).node_id
            assert owner in {second, third}
            for name in on.order:
                again = await on.owners[name].find(STREAM)
                assert again.info is None if name == owner else again.info.node_id == owner
            assert spans(await on.owners[owner].submit(STREAM, draft(b"b"))) == [(1, 0, 0)]
        assert await read_stream(on.cluster) == [b"a", b"b"]

    run_virtual(main())


def test_a_claim_is_judged_anew_when_another_one_came_first():
    async def main():
        async with three() as on:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            on.away.add(first)

            async def out_of_reach_until_it_has_claimed(info):
                if info.node_id == second and (await on.owner()).node_id == first:
                    assert (await on.owners[second].find(STREAM)).info is None
                    return False
                return True

            on.steps_in = out_of_reach_until_it_has_claimed
            assert (await on.owners[third].find(STREAM)).info.node_id == second
            stream = await on.catalog.streams.get(STREAM)
            assert (stream.owner.node_id, stream.owner_epoch) == (second, 2)

    run_virtual(main())


@pytest.mark.covers("D18")
def test_what_a_lost_node_left_open_is_closed_without_an_append():
    async def main():
        async with three() as on:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            async with asyncio.TaskGroup() as tasks:
                tending = [tasks.create_task(on.owners[one].tend()) for one in (second, third)]
                await asyncio.sleep(10)
                assert (await on.catalog.ledgers.get(0)).state is LedgerState.OPEN
                on.lose(first)
                await asyncio.sleep(4)
                assert (await on.catalog.ledgers.get(0)).state is LedgerState.CLOSED
                assert (await on.owner()).node_id == second
                for task in tending:
                    task.cancel()
        assert await read_stream(on.cluster) == [b"a"]

    run_virtual(main())


def test_an_owner_that_lost_its_session_and_answers_has_some_time_to_register_again():
    async def main():
        async with three() as on, asyncio.TaskGroup() as tasks:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            tending = [tasks.create_task(on.owners[one].tend()) for one in (second, third)]
            await asyncio.sleep(1)
            before = await on.owner()
            for _ in range(3):
                # As after a restart of the metadata store.
                on.stores[first].expire_session()
                await asyncio.sleep(3)
                assert (await on.owners[third].find(STREAM)).info.node_id == first
                await on.catalogs[first].nodes.announce(on.cluster.info(first))
                await asyncio.sleep(20)
                assert await on.owner() == before
            # One that never comes back to the metadata could open no ledger any more.
            on.stores[first].expire_session()
            await asyncio.sleep(20)
            assert (await on.owner()).node_id == second
            for task in tending:
                task.cancel()
        assert await read_stream(on.cluster) == [b"a"]

    run_virtual(main())


def test_an_orphan_whose_wished_owner_fell_silent_too_goes_to_the_next_one():
    async def main():
        async with three() as on:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            async with asyncio.TaskGroup() as tasks:
                tending = tasks.create_task(on.owners[third].tend())
                await asyncio.sleep(1)
                on.lose(first)
                await asyncio.sleep(8)
                # The second one is there, though it does nothing: so it was named, and waited for.
                assert (await on.owner()).node_id == first
                on.away.add(second)
                await asyncio.sleep(8)
                assert (await on.owner()).node_id == third
                assert (await on.catalog.ledgers.get(0)).state is LedgerState.CLOSED
                tending.cancel()

    run_virtual(main())


@pytest.mark.covers("D18")
def test_a_drain_seals_answers_everybody_and_lets_the_next_one_claim_at_once():
    async def main():
        loop = asyncio.get_running_loop()
        async with three() as on:
            first, second, _ = on.order
            await on.owners[first].submit(STREAM, draft(b"first"))
            answers = [on.owners[first].submit(STREAM, draft(b"%d" % i)) for i in range(30)]
            await on.tell_draining(first)
            await on.owners[first].drain()
            begun_s = loop.time()
            with pytest.raises(RetryableError):
                on.owners[first].submit(STREAM, draft(b"late"))
            while (await on.owner()) is not None:
                await asyncio.sleep(0.01)
            assert [one.exception() for one in answers] == [None] * 30
            assert (await on.catalog.ledgers.get(0)).state is LedgerState.CLOSED
            # It is registered still, and says where to go.
            assert (await on.owners[first].find(STREAM)).info.node_id == second
            ranges = await on.owners[second].submit(STREAM, draft(b"next"))
            assert loop.time() - begun_s < 1
            assert spans(ranges) == [(1, 0, 0)]
        numbered = [b"%d" % i for i in range(30)]
        assert await read_stream(on.cluster) == [b"first", *numbered, b"next"]

    run_virtual(main())


def test_a_drain_does_not_wait_for_a_recovery_that_does_not_go_on():
    async def main():
        loop = asyncio.get_running_loop()
        async with three() as on:
            first, second, _ = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            node = on.cluster.nodes[first]
            on.away.add(first)
            node.down = True

            async def find():
                with pytest.raises(RetryableError):
                    await on.owners[second].find(STREAM)

            async with asyncio.TaskGroup() as tasks:
                finding = tasks.create_task(find())
                await asyncio.sleep(5)
                assert on.owners[second].recovering()
                begun_s = loop.time()
                await on.owners[second].drain()
                await asyncio.wait({finding})
                while (await on.owner()) is not None:
                    await asyncio.sleep(0.01)
                assert loop.time() - begun_s < 1
            on.away.clear()
            node.down = False
            await on.owners[first].find(STREAM)
            assert (await on.owner()).node_id == first
        assert await read_stream(on.cluster) == [b"a"]

    run_virtual(main())


def test_streams_are_taken_again_after_a_drain_that_was_called_off():
    async def main():
        async with three() as on:
            first, _, _ = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            on.owners[first].hand_over()
            while (await on.owner()) is not None:
                await asyncio.sleep(0.01)
            assert (await on.owners[first].find(STREAM)).info.node_id != first
            on.owners[first].take_again()
            assert (await on.owners[first].find(STREAM)).info is None
            assert spans(await on.owners[first].submit(STREAM, draft(b"b"))) == [(1, 0, 0)]

    run_virtual(main())


def test_a_claim_of_a_last_life_is_released_by_a_draining_node_that_is_asked():
    async def main():
        async with three() as on:
            first, second, third = on.order
            await on.catalogs[first].streams.claim(STREAM, first)
            await on.tell_draining(first)
            on.owners[first].hand_over()
            assert (await on.owners[third].find(STREAM)).info.node_id == first
            assert (await on.owners[first].find(STREAM)).info.node_id == second
            assert (await on.owners[third].find(STREAM)).info.node_id == second
            assert (await on.owners[second].find(STREAM)).info is None

    run_virtual(main())


def test_a_node_that_is_being_emptied_hands_over_while_another_can_own():
    async def main():
        async with three() as on, asyncio.TaskGroup() as tasks:
            first, second, third = on.order
            await on.owners[first].submit(STREAM, draft(b"a"))
            tending = tasks.create_task(on.owners[first].tend())
            await on.tell_draining(first)
            on.owners[first].empty(True)
            await asyncio.sleep(1)
            assert await on.owner() is None
            assert (await on.owners[third].find(STREAM)).info.node_id == second
            # The last one that is left owns what there is, emptied or not.
            on.lose(second)
            on.lose(third)
            await asyncio.sleep(1)
            assert (await on.owners[first].find(STREAM)).info is None
            await on.catalogs[first].nodes.amend(on.cluster.info(first))
            on.owners[first].empty(False)
            await asyncio.sleep(1)
            assert spans(await on.owners[first].submit(STREAM, draft(b"b"))) == [(1, 0, 0)]
            tending.cancel()
        assert await read_stream(on.cluster) == [b"a", b"b"]

    run_virtual(main())


def test_with_nobody_to_go_to_the_caller_is_told_to_ask_again():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners):
            await owners.submit(STREAM, draft(b"a"))
            owners.hand_over()
            with pytest.raises(RetryableError) as caught:
                await owners.find(STREAM)
            assert "drains" in caught.value.message
            await asyncio.sleep(1)
            with pytest.raises(RetryableError) as caught:
                await owners.find(STREAM)
            assert "no node" in caught.value.message
            with pytest.raises(RetryableError):
                owners.submit(STREAM, draft(b"x"))

    run_virtual(main())


def test_a_node_that_is_no_longer_registered_claims_nothing_new():
    async def main():
        async with three() as on:
            first, second, third = on.order
            on.stores[first].expire_session()
            assert (await on.owners[first].find(STREAM)).info.node_id == second
            on.away |= {second, third}
            with pytest.raises(RetryableError):
                await on.owners[first].find(STREAM)
            assert await on.owner() is None

    run_virtual(main())
