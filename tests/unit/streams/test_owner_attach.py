"""Staging ledgers at the stream's owner: behind what is there, before what comes, once."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment,no-untyped-call"

import asyncio
import contextlib
import itertools
from dataclasses import replace
from functools import partial
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.client.test_ledgers import using
from tests.unit.ledger.small_cluster import STREAM, draft
from tests.unit.streams.attribute_world import W1, AttributeCluster, entry, key_of, plus, send
from tests.unit.streams.test_owners import ONE, read_stream, running, spans
from tierlog.adapters.memory.faults import Faults, Outcome, no_faults
from tierlog.client.staging import COPIES_MAX, StagingDesk, number_update
from tierlog.format import paths
from tierlog.format.entry import encode_entry
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import StreamName
from tierlog.model.position import Position
from tierlog.ports.streams import Attachment, AttachOutcome
from tierlog_ingest.streams.attaching import IN_TURN_S_MAX
from tierlog_ingest.streams.parts import OwnerState

JOB, OTHER = UUID(int=9 << 100), UUID(int=8 << 100)
PUBLISHED_MS = 1_790_000_000_000


class OwnersDesk:
    """An attach desk over owners, as a client's is over the network; ``fail`` breaks calls."""

    def __init__(self, owners):
        self.owners = owners
        self.calls = []
        self.fail = []
        """What becomes of the next calls: an error before, or behind, the call; None."""

    async def attach(self, stream, wanted, *, deadline_s):
        assert deadline_s > 0
        self.calls.append(wanted)
        before, behind = self.fail.pop(0) if self.fail else (None, None)
        if before is not None:
            raise before
        outcome = await self.owners.attach(stream, wanted)
        if behind is not None:
            raise behind
        return outcome

    async def number(self, stream, writer_id):
        key = key_of(writer_id)
        return (await self.owners.get_attributes(stream, [key])).values.get(key, 0)


def desk_of(ledgers, owners):
    desk = OwnersDesk(owners)
    return desk, StagingDesk(ledgers, desk, retry_s_max=30.0)


@contextlib.asynccontextmanager
async def attaching(make=AttributeCluster.owners):
    """Give a cluster, owners made over it, a desk over those, and what stages."""
    cluster = AttributeCluster()
    await cluster.start()
    owners = make(cluster)
    async with running(owners), using(cluster) as ledgers:
        yield cluster, owners, *desk_of(ledgers, owners)


def events(name, *, updates=(), writer=None):
    """An entry of two events."""
    return encode_entry(
        [b"%s.0" % name, b"%s.1" % name],
        publish_time_ms=PUBLISHED_MS,
        writer_id=writer,
        event_number=1 if writer else 0,
        attribute_updates=updates,
    )


async def stage(staging, *names, writer=JOB, number=1, entries=None):
    """Write a ledger of entries with these names, and close it; return its id."""
    ledger = await staging.stage(STREAM, writer_id=writer, number=number)
    first = [number_update(writer, number)]
    for at, name in enumerate(names):
        await ledger.send(events(name, updates=() if at else first), publish_ms=PUBLISHED_MS)
    for one in entries or ():
        await ledger.send(one, publish_ms=PUBLISHED_MS)
    await ledger.close()
    return ledger.ledger_id


async def attached(staging, *ledger_ids, writer=JOB, number=1, tell_newest=True):
    return await staging.attach(
        STREAM, ledger_ids, writer_id=writer, number=number, size=1000, tell_newest=tell_newest
    )


async def payloads(cluster):
    """The first events of all entries of the stream."""
    return [bytes(data)[-3:] for data in await read_stream(cluster)]


async def values(owners):
    found = await owners.get_attributes(STREAM, [key_of(JOB), EVENT_COUNT, key_of(W1)])
    return found.values.get(key_of(JOB)), found.values[EVENT_COUNT], found.values.get(key_of(W1))


def test_what_was_staged_comes_behind_what_is_there_and_before_what_follows():
    async def main():
        async with attaching() as (cluster, owners, desk, staging):
            catalog = cluster.catalog()
            await send(owners, STREAM, W1, 1)
            tasks = [await stage(staging, b"a", b"b"), await stage(staging, b"c")]
            assert await values(owners) == (None, 1, 1), "nothing of it is there yet"
            # Appends wait for nothing but their turn.
            answers = [send(owners, STREAM, W1, number) for number in (2, 3)]
            attach = asyncio.create_task(attached(staging, *reversed(tasks)))
            await asyncio.wait([attach])
            await attach
            more = send(owners, STREAM, W1, 4)
            (last,) = spans(await more)
            assert [spans(await answer)[0][1] for answer in answers] == [1, 2]
            assert await values(owners) == (1, 4 + 6, 4)
            found = await owners.get_attributes(STREAM, [])
            assert found.as_of == Position(last[0], 0)
            assert [call.ledger_ids for call in desk.calls] == [tuple(tasks)]
            snapshot = await catalog.streams.snapshot(STREAM)
            assert [one.ledger_id for one in snapshot.ledgers][1:-1] == tasks
            # The runs say when their events were published, as a stream's do.
            runs = cluster.nodes["n1"].runs[tasks[0]]
            assert {run.header.publish_ms_min for run in runs.values()} == {PUBLISHED_MS}
        stored = await payloads(cluster)
        assert stored[3:6] == [b"a.1", b"b.1", b"c.1"]
        assert len(stored) == 7

    run_virtual(main())


def test_a_batch_that_is_committed_again_changes_nothing_and_leaves_nothing():
    async def main():
        cluster = AttributeCluster()
        catalog = await cluster.start()
        async with using(cluster) as ledgers:
            owners = cluster.owners()
            async with running(owners, drain=False):
                _, staging = desk_of(ledgers, owners)
                await attached(staging, await stage(staging, b"a", number=1), number=1)
                again = await stage(staging, b"a", number=1)
                await attached(staging, again, number=1)
                assert await values(owners) == (1, 2, None)
            # The owner is gone without a word, and its attributes with it.
            owners = cluster.owners("n1")
            async with running(owners):
                _, staging = desk_of(ledgers, owners)
                assert await attached(staging, await stage(staging, b"a", number=1), number=1) == 1
                assert await attached(staging, await stage(staging, b"b", number=2), number=2) == 2
                assert await attached(staging, await stage(staging, b"b", number=2), number=2) == 2
                # One that was overtaken has no place any more, either, and can be told from those.
                assert await attached(staging, await stage(staging, b"x", number=1), number=1) == 2
                other = await stage(staging, b"c", writer=OTHER)
                await attached(staging, other, writer=OTHER)
                assert await values(owners) == (2, 6, None)
            assert await payloads(cluster) == [b"a.1", b"b.1", b"c.1"]
            assert await catalog.bare.list_staging() == {}
            assert await catalog.bare.list_all() == {}

    run_virtual(main())


def test_a_batch_that_is_there_is_not_asked_about_again_unless_somebody_wants_to_know():
    async def main():
        async with attaching() as (cluster, _, desk, staging):
            await attached(staging, await stage(staging, b"a", number=2), number=2)

            async def away(stream, writer_id):
                raise RetryableError("away", remedy="Ask again")

            desk.number = away
            again = await stage(staging, b"a", number=1)
            assert await attached(staging, again, number=1, tell_newest=False) == 1
            assert await cluster.catalog().bare.list_staging() == {}
            other = await stage(staging, b"a", number=1)
            with pytest.raises(RetryableError):
                await attached(staging, other, number=1)

    run_virtual(main())


def test_two_that_commit_the_same_batch_at_once_bring_it_in_once():
    async def main():
        async with attaching() as (cluster, owners, desk, staging):
            asked = [
                Attachment(ledger_ids=(await stage(staging, b"a"),), writer_id=JOB, number=1)
                for _ in range(4)
            ]
            async with asyncio.TaskGroup() as tasks:
                asking = [
                    tasks.create_task(desk.attach(STREAM, one, deadline_s=5)) for one in asked
                ]
            outcomes = [one.result() for one in asking]
            assert sorted(one.value for one in outcomes) == ["attached", "there", "there", "there"]
            assert await values(owners) == (1, 2, None)
        assert await payloads(cluster) == [b"a.1"]

    run_virtual(main())


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_answer_that_is_lost_is_asked_for_again(where):
    async def main():
        async with attaching() as (cluster, owners, desk, staging):
            lost = IndeterminateError("lost", remedy="Ask again")
            away = RetryableError("away", remedy="Ask again")
            desk.fail = [(lost, None), (None, lost)] if where == "behind" else [(away, None)]
            await attached(staging, await stage(staging, b"a"))
            assert len(desk.calls) == (2 if where == "before" else 3)
            assert await values(owners) == (1, 2, None)
            # With nobody there the doubt is what is told.
            desk.fail = [(lost, None)] + [(away, None)] * 1000
            ledger_id = await stage(staging, b"b", number=2)
            with pytest.raises(IndeterminateError):
                await attached(staging, ledger_id, number=2)
            desk.fail = []
            await attached(staging, ledger_id, number=2)
        assert await payloads(cluster) == [b"a.1", b"b.1"]

    run_virtual(main())


@pytest.mark.parametrize(
    "outcome", [Outcome.REPLY_LOST, Outcome.REQUEST_LOST, Outcome.REFUSED, Outcome.ANSWERED]
)
def test_the_change_settles_whatever_answer_of_the_metadata_is_lost(outcome):
    async def main():
        faults = no_faults()
        async with attaching(lambda one: one.owners(catalog=one.catalog(faults))) as (
            cluster,
            owners,
            _,
            staging,
        ):
            await attached(staging, await stage(staging, b"a"))
            faults.next("metadata.transact", outcome)
            await attached(staging, await stage(staging, b"b", number=2), number=2)
            assert await values(owners) == (2, 4, None)
        assert await payloads(cluster) == [b"a.1", b"b.1"]

    run_virtual(main())


def test_ledgers_that_the_stream_went_past_are_copied_behind_it():
    async def main():
        async with attaching() as (cluster, owners, desk, staging):
            catalog = cluster.catalog()
            tasks = [await stage(staging, b"a", b"b"), await stage(staging, b"c")]
            (here,) = spans(await send(owners, STREAM, W1, 1))
            assert here[0] > tasks[-1]
            await attached(staging, *tasks)
            assert len(desk.calls) == 2
            assert await values(owners) == (1, 7, 1)
            assert await catalog.bare.list_all() == {}
            snapshot = await catalog.streams.snapshot(STREAM)
            copies = [one.ledger_id for one in snapshot.ledgers][1:]
            assert copies == list(desk.calls[-1].ledger_ids)
            runs = cluster.nodes["n1"].runs[copies[0]]
            assert {run.header.publish_ms_min for run in runs.values()} == {PUBLISHED_MS}
            # A stream that is always faster is given up on, and nothing is there twice.
            number, original = 1, owners.attach

            async def overtaken(stream, wanted):
                nonlocal number
                number += 1
                await send(owners, STREAM, W1, number)
                await owners.seal(STREAM)
                return await original(stream, wanted)

            owners.attach = overtaken
            with pytest.raises(RetryableError, match="went past"):
                await attached(staging, await stage(staging, b"x", number=2), number=2)
            assert number == 2 + COPIES_MAX
            assert await staging.sweep(STREAM, writer_id=JOB, through=2) == 1
        assert (await payloads(cluster))[1:4] == [b"a.1", b"b.1", b"c.1"]
        assert b"x.1" not in await payloads(cluster)

    run_virtual(main())


def test_a_storage_node_that_starts_anew_is_waited_for():
    """Its registration is that of the process before it, until that one's session ends."""

    async def main():
        async with attaching() as (cluster, owners, _, staging):
            catalog, node = cluster.catalog(), cluster.info(cluster.names[0])
            path = paths.available_path(node.node_id)
            loop = asyncio.get_running_loop()

            async def gone_for(after_s, before_s):
                await asyncio.sleep(after_s)
                store = cluster.metadata.connect()
                await store.delete(path, version=-1)
                assert await catalog.nodes.live() == {}
                await asyncio.sleep(before_s)
                await catalog.nodes.announce(node)

            away = asyncio.create_task(gone_for(0.0, 3.0))
            await asyncio.sleep(0.01)
            began_s, overtaken = loop.time(), await stage(staging, b"a")
            assert loop.time() - began_s > 2.9
            await away
            # The same while a ledger that the stream went past is copied.
            await send(owners, STREAM, W1, 1)
            away = asyncio.create_task(gone_for(0.0, 3.0))
            await asyncio.sleep(0.01)
            await attached(staging, overtaken)
            await away
            # For ever is too long.
            await cluster.metadata.connect().delete(path, version=-1)
            with pytest.raises(RetryableError, match="needs 1 more storage node") as caught:
                await stage(staging, b"b", number=2)
            assert caught.value.reason is Reason.UNAVAILABLE
            await catalog.nodes.announce(node)
        assert (await payloads(cluster))[1:] == [b"a.1"]

    run_virtual(main())


def test_what_others_left_goes_with_the_commit_and_the_rest_stays():
    async def main():
        async with attaching() as (cluster, _, _, staging):
            catalog = cluster.catalog()
            good = await stage(staging, b"a")
            # A task that failed, one that was slower than its like; and what is not of this batch.
            failed = await staging.stage(STREAM, writer_id=JOB, number=1)
            await failed.send(events(b"f"))
            slower = await stage(staging, b"a")
            next_one = await stage(staging, b"n", number=2)
            foreign = await stage(staging, b"o", writer=OTHER)
            await attached(staging, good)
            assert list(await catalog.bare.list_staging()) == [next_one, foreign]
            for gone in (failed.ledger_id, slower):
                assert await catalog.ledgers.get(gone) is None
            # To throw away what is attached does nothing.
            await staging.discard([good, slower, foreign])
            assert list(await catalog.bare.list_staging()) == [next_one]
            assert (await catalog.streams.snapshot(STREAM)).ledgers[-1].ledger_id == good

    run_virtual(main())


def test_what_would_spoil_the_stream_is_refused_and_the_stream_goes_on():
    async def main():
        async with attaching() as (cluster, owners, _, staging):
            await cluster.catalog().streams.create(StreamName("raw"), raw=True)
            own = number_update(JOB, 1)
            made = {
                "its first entry": await stage(staging, entries=[events(b"a")]),
                "can't be read": await stage(staging, b"a", entries=[b"no header"]),
                "other attributes": await stage(staging, b"a", entries=[entry(W1, 1)]),
                "its writer's: ": await stage(
                    staging, entries=[events(b"a", updates=[own, plus(1)])]
                ),
                "another number": await stage(staging, b"a", number=7),
                "another writer": await stage(staging, b"a", writer=OTHER),
            }
            for words, ledger_id in made.items():
                with pytest.raises(RefusedError, match=words) as caught:
                    await attached(staging, ledger_id)
                assert caught.value.remedy
            for wanted, words in ((StreamName("raw"), "raw"), (StreamName("none"), "no stream")):
                with pytest.raises(RefusedError, match=words):
                    await staging.staging(wanted, writer_id=JOB, number=1)
            with pytest.raises(RefusedError) as caught:
                await attached(staging, 10**6)
            assert caught.value.reason is Reason.LEDGER_NOT_FOUND
            with pytest.raises(RefusedError, match="coalesce"):
                await attached(staging, *range(257))
            await send(owners, STREAM, W1, 1)
            assert await values(owners) == (None, 1, 1)
        assert len(await read_stream(cluster)) == 1

    run_virtual(main())


def test_appends_do_not_wait_long_for_an_index_that_is_away():
    async def main():
        async with attaching() as (cluster, owners, desk, staging):
            catalog = cluster.catalog()
            await send(owners, STREAM, W1, 1)
            ledger_id = await stage(staging, b"a")
            keeper = await owners._owners[STREAM].attributes()
            get, calls = keeper.get, []

            async def away(keys):
                calls.append(keys)
                if len(calls) == 2:  # in the turn
                    await asyncio.Event().wait()
                return await get(keys)

            keeper.get = away
            asked = Attachment(ledger_ids=(ledger_id,), writer_id=JOB, number=1)
            attach = asyncio.create_task(desk.attach(STREAM, asked, deadline_s=5))
            while len(calls) < 2:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(2 * IN_TURN_S_MAX):
                await send(owners, STREAM, W1, 2)
            with pytest.raises(RetryableError, match="could not be read"):
                await attach
            assert list(await catalog.bare.list_staging()) == [ledger_id]
            # It was passed by a ledger meanwhile; that is settled as ever.
            await attached(staging, ledger_id)
            assert await values(owners) == (1, 4, 2)

    run_virtual(main())


def test_an_owner_that_signs_takes_no_ledger_without_a_key():
    async def main():
        signing = ONE.model_copy(update={"ledger_key_id": "k1"})
        make = partial(AttributeCluster.owners, settings=signing)
        async with attaching(make) as (_, _, _, staging):
            with pytest.raises(RefusedError, match="is not signed"):
                await attached(staging, await stage(staging, b"a"))

    run_virtual(main())


def test_an_attach_is_not_held_up_by_appends_that_wait_for_disks_that_are_full():
    async def main():
        async with attaching() as (cluster, owners, _, staging):
            await send(owners, STREAM, W1, 1)
            ledger_id = await stage(staging, b"a")
            await owners.seal(STREAM)
            full = replace(cluster.info("n1"), read_only=True)
            await cluster.catalog().nodes.amend(full)
            waiting = owners.submit(STREAM, draft(events(b"b")))
            await asyncio.sleep(1)
            async with asyncio.timeout(3):
                await attached(staging, ledger_id)
            await cluster.catalog().nodes.amend(cluster.info("n1"))
            await waiting
        assert await payloads(cluster) == [b"1.0", b"a.1", b"b.1"]

    run_virtual(main())


def test_a_deposed_owner_attaches_nothing():
    async def main():
        cluster = AttributeCluster(2)
        catalog = await cluster.start()
        one = cluster.owners("n1")
        async with running(one), using(cluster) as ledgers:
            _, staging = desk_of(ledgers, one)
            await one.submit(STREAM, draft(events(b"0")))
            ledger_id = await stage(staging, b"a")
            owner = one._owners[STREAM]
            stream = await catalog.streams.get(STREAM)
            await owner.attributes()
            # Somebody else claims right before the transaction.
            attach, done = owner._parts.catalog.ledgers.attach, []

            async def late(claimed, ledger_ids):
                if not done:
                    done.append(await catalog.streams.claim(STREAM, "n2", over=stream))
                return await attach(claimed, ledger_ids)

            owner._parts.catalog.ledgers.attach = late
            desk = OwnersDesk(one)
            asked = Attachment(ledger_ids=(ledger_id,), writer_id=JOB, number=1)
            with pytest.raises(RetryableError) as caught:
                await desk.attach(STREAM, asked, deadline_s=5)
            assert caught.value.reason is Reason.NOT_OWNER
            assert ledger_id in await catalog.bare.list_staging()
            await asyncio.sleep(0.1)
            assert owner.state is OwnerState.ENDED, "it appends nothing more"
        two = cluster.owners("n2")
        async with running(two), using(cluster) as ledgers:
            outcome = await OwnersDesk(two).attach(STREAM, asked, deadline_s=5)
            assert outcome is AttachOutcome.ATTACHED
        assert await payloads(cluster) == [b"0.1", b"a.1"]

    run_virtual(main())


@pytest.mark.parametrize("waits_for", ["the number", "the change"])
def test_whoever_waits_hears_of_it_when_the_owner_is_cut_off(waits_for):
    async def main():
        async with attaching() as (_, owners, desk, staging):
            await send(owners, STREAM, W1, 1)
            ids = [await stage(staging, name, number=at) for at, name in enumerate([b"a", b"b"], 1)]
            owner, begun = owners._owners[STREAM], asyncio.Event()

            async def never(*args, **named):
                begun.set()
                await asyncio.Event().wait()

            if waits_for == "the change":
                owner._parts.catalog.ledgers.attach = never
            else:
                get, calls = owner._keeper.get, itertools.count()

                async def in_turn_never(keys):
                    return await (get(keys) if next(calls) < len(ids) else never())

                owner._keeper.get = in_turn_never
            asked = [
                Attachment(ledger_ids=(one,), writer_id=JOB, number=at)
                for at, one in enumerate(ids, 1)
            ]
            async with asyncio.timeout(60):
                async with asyncio.TaskGroup() as tasks:
                    told = [
                        tasks.create_task(error_of(desk.attach(STREAM, one, deadline_s=5)))
                        for one in asked
                    ]
                    await begun.wait()
                    await owners._cut_off(owner)
            in_turn, behind = (one.result() for one in told)
            in_doubt = waits_for == "the change"
            assert isinstance(in_turn, IndeterminateError if in_doubt else RetryableError)
            assert isinstance(behind, RetryableError), "its turn did not come"

    run_virtual(main())


async def error_of(work):
    try:
        await work
    except TierlogError as error:
        return error


def test_a_reader_of_attributes_sees_no_half_of_it_after_a_crash_in_the_middle():
    """Whenever the owner is cut off, the next one has all of the batch or nothing of it."""

    async def main():
        for cut_s in [0.0, *(0.001 * step for step in range(1, 30))]:
            cluster = AttributeCluster()
            await cluster.start()
            faults = Faults(cluster.rng)
            async with using(cluster) as ledgers:
                owners = cluster.owners(catalog=cluster.catalog(faults))
                async with asyncio.TaskGroup() as tasks:
                    life = tasks.create_task(owners.run())
                    await asyncio.sleep(0)
                    _, staging = desk_of(ledgers, owners)
                    await send(owners, STREAM, W1, 1)
                    ids = [await stage(staging, b"a"), await stage(staging, b"b")]
                    asking = tasks.create_task(quietly(attached(staging, *ids)))
                    await asyncio.sleep(cut_s)
                    life.cancel()
                    asking.cancel()
                owners = cluster.owners()
                async with running(owners):
                    _, staging = desk_of(ledgers, owners)
                    assert await values(owners) in [(None, 1, 1), (1, 5, 1)]
                    await attached(staging, *ids)
                    assert await values(owners) == (1, 5, 1)
                assert await payloads(cluster) == [b"1.0", b"a.1", b"b.1"]

    run_virtual(main())


async def quietly(work):
    try:
        await work
    except RetryableError:
        return


def test_the_handle_of_a_staging_ledger_is_that_of_any_other():
    async def main():
        cluster = AttributeCluster()
        catalog = await cluster.start()
        async with running(cluster.owners()), using(cluster) as ledgers:
            _, staging = desk_of(ledgers, None)
            ledger_id = await stage(staging, b"a", b"b")
            metadata = await catalog.ledgers.get(ledger_id)
            handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
            found = [run async for runs in handle.read_runs(0, 1) for run in runs]
            assert sum(run.header.count for run in found) == 2

    run_virtual(main())
