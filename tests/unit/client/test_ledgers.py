"""Bare ledgers over storage nodes in memory: ids, order, answers, fencing, recovery, deletion.

"BookKeeper clients have two main roles: they create and delete ledgers, and they read entries
from and write entries to ledgers." "Entries are written sequentially, and at most once." "When a
reader forces a ledger to close, preventing any further entries from being written" (seeds/003).
"""

# mypy: disable-error-code="attr-defined,no-untyped-call"

import asyncio
import contextlib
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.client import LedgerShape
from tierlog.client.ledgers import Ledgers, LedgersLimits
from tierlog.ledger.keys import LedgerKeys
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import DigestType, LedgerState
from tierlog.wiring.ledgers import LedgerParts

THREE = LedgerShape(ensemble_size=3, write_quorum=3, ack_quorum=2)
ONE = LedgerShape(ensemble_size=1, write_quorum=1, ack_quorum=1)
KEYS = LedgerKeys({"k1": bytes(range(32))})
LIMITS = LedgersLimits(in_flight_bytes_max=1 << 20, frame_bytes_max=1 << 20)


@contextlib.asynccontextmanager
async def using(cluster, *, limits=LIMITS, keys=KEYS, faults=None):
    """Give one application's ledgers on a cluster that has started."""
    catalog = cluster.catalog(faults)
    parts = LedgerParts(
        catalog,
        cluster.directory(catalog),
        cluster.recovery(catalog, keys=keys),
        keys,
        cluster.clock,
        cluster.ids,
        (await catalog.nodes.ensure_cluster()).cluster_id,
    )
    async with asyncio.TaskGroup() as tasks:
        ledgers = Ledgers(parts, tasks, limits=limits)
        yield ledgers
        ledgers.abandon_all()


def on_three_nodes(test):
    @functools.wraps(test)
    def run(*args, **named):
        async def main():
            cluster = SmallCluster(3)
            await cluster.start()
            async with using(cluster) as ledgers:
                await test(cluster, ledgers, *args, **named)

        run_virtual(main(), until_s=10_000)

    # The fixtures are what is given above.
    del run.__wrapped__
    return run


async def read(ledgers, ledger_id, *, recover=False):
    reader = await ledgers.open(ledger_id, recover=recover)
    return [(entry.entry_id, entry.data) async for entry in reader.entries()]


async def outcome(work):
    try:
        return await work
    except TierlogError as error:
        return error


@pytest.mark.covers("D01", "D02", "D05", "D07", "D09", "D10", "D11", "D12")
@on_three_nodes
async def test_what_is_appended_is_read_in_order_with_its_ids(cluster, ledgers):
    async with await ledgers.create(THREE) as ledger:
        assert await ledger.append(b"one") == 0
        answers = [await ledger.send(b"%d" % number) for number in range(1, 500)]
        assert await ledger.flush() == 499
        assert [answer.result() for answer in answers] == list(range(1, 500))
    metadata = await ledgers.recover(ledger.ledger_id)
    assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, 499)
    expected = [b"one"] + [b"%d" % number for number in range(1, 500)]
    assert metadata.length == sum(map(len, expected))
    assert await read(ledgers, ledger.ledger_id) == list(enumerate(expected))


@on_three_nodes
async def test_entries_sent_together_share_runs(cluster, ledgers):
    async with await ledgers.create(THREE) as ledger:
        for _ in range(1000):
            await ledger.send(b"0123456789")
        await ledger.flush()
    (runs,) = {len(node.runs[ledger.ledger_id]) for node in cluster.nodes.values()}
    assert runs < 10


@on_three_nodes
async def test_a_part_of_a_ledger_is_read_and_nothing_beyond_it(cluster, ledgers):
    async with await ledgers.create(THREE) as ledger:
        for number in range(10):
            await ledger.send(b"%d" % number)
    assert all(len(node.runs[ledger.ledger_id]) == 1 for node in cluster.nodes.values())
    reader = await ledgers.open(ledger.ledger_id)
    assert [one.entry_id async for one in reader.entries(3, 5)] == [3, 4, 5]
    assert [one.entry_id async for one in reader.entries(8)] == [8, 9]
    assert [one.entry_id async for one in reader.entries(10)] == []
    with pytest.raises(RefusedError) as caught:
        assert [one.entry_id async for one in reader.entries(8, 10)] == [8, 9]
    assert caught.value.reason is Reason.NO_SUCH_ENTRY


@on_three_nodes
async def test_an_open_ledger_is_read_as_far_as_it_is_acknowledged(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    await ledger.append(b"one")
    await asyncio.sleep(0.1)
    for node in cluster.nodes.values():
        node.mute = True
    await ledger.send(b"two")
    await asyncio.sleep(0.1)
    assert await read(ledgers, ledger.ledger_id) == [(0, b"one")]
    reader = await ledgers.open(ledger.ledger_id)
    assert not reader.closed
    assert await reader.last_add_confirmed() == 0
    error = await outcome(anext(reader.entries(1, 1)))
    assert error.reason is Reason.NOT_YET


@on_three_nodes
async def test_a_follower_gets_entries_as_they_come_and_ends_with_the_ledger(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    reader = await ledgers.open(ledger.ledger_id)
    found = []

    async def follow():
        async for entry in reader.entries(follow=True):
            found.append(entry.data)  # noqa: PERF401 - looked at meanwhile

    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow())
        for number in range(5):
            await ledger.append(b"%d" % number)
            await asyncio.sleep(2)
            assert found == [b"%d" % one for one in range(number + 1)]
        await ledger.close()
        await following
    assert reader.closed


@on_three_nodes
async def test_closing_twice_is_closing_once_and_then_nothing_is_taken(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    await ledger.append(b"one")
    first = await ledger.close()
    assert await ledger.close() == first
    error = await outcome(ledger.append(b"two"))
    assert isinstance(error, RefusedError)
    assert await read(ledgers, ledger.ledger_id) == [(0, b"one")]


@on_three_nodes
async def test_an_empty_ledger_is_closed_read_and_deleted(cluster, ledgers):
    async with await ledgers.create(THREE) as ledger:
        pass
    assert await read(ledgers, ledger.ledger_id) == []
    await ledgers.delete(ledger.ledger_id)
    error = await outcome(ledgers.open(ledger.ledger_id))
    assert error.reason is Reason.LEDGER_NOT_FOUND


@pytest.mark.covers("D18")
@on_three_nodes
async def test_who_opens_for_recovery_ends_the_writing(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    await ledger.append(b"one")
    async with using(cluster) as others:
        assert await read(others, ledger.ledger_id, recover=True) == [(0, b"one")]
        error = await outcome(ledger.append(b"two"))
        assert isinstance(error, IndeterminateError)
        error = await outcome(ledger.append(b"three"))
        assert error.reason is Reason.FENCED
        assert (await outcome(ledger.close())).reason is Reason.FENCED
        assert await read(others, ledger.ledger_id) == [(0, b"one")]


@on_three_nodes
async def test_a_reader_that_does_not_recover_leaves_the_writer_alone(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    await ledger.append(b"one")
    async with using(cluster) as others:
        await read(others, ledger.ledger_id)
        await outcome(anext((await others.open(ledger.ledger_id)).entries(1, 1)))
    assert await ledger.append(b"two") == 1
    assert not any(node.fenced for node in cluster.nodes.values())


@on_three_nodes
async def test_what_was_sent_and_not_acknowledged_is_told_as_unknown(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    await ledger.append(b"one")
    for node in cluster.nodes.values():
        node.mute = True
    answer = await ledger.send(b"two")
    error = await outcome(answer)
    assert isinstance(error, IndeterminateError)
    assert error.details["entry_id"] == "1"
    assert isinstance(await outcome(ledger.close()), IndeterminateError)
    for node in cluster.nodes.values():
        node.mute = False
    # All nodes have it: recovery keeps it.
    found = await read(ledgers, ledger.ledger_id, recover=True)
    assert found == [(0, b"one"), (1, b"two")]


@on_three_nodes
async def test_an_error_in_the_block_is_told_and_the_ledger_is_closed(cluster, ledgers):
    ledger = await ledgers.create(THREE)

    async def work():
        async with ledger:
            await ledger.send(b"one")
            raise KeyError

    with pytest.raises(KeyError):
        await work()
    reader = await ledgers.open(ledger.ledger_id)
    assert reader.closed
    assert await read(ledgers, ledger.ledger_id) == [(0, b"one")]


@on_three_nodes
async def test_a_writer_that_is_left_leaves_an_open_ledger_that_recovery_closes(cluster, ledgers):
    async with using(cluster) as others:
        ledger = await others.create(THREE)
        await ledger.append(b"one")
    assert not (await ledgers.open(ledger.ledger_id)).closed
    assert await read(ledgers, ledger.ledger_id, recover=True) == [(0, b"one")]


@on_three_nodes
async def test_a_made_ledger_has_the_one_writer_who_asks_first(cluster, ledgers):
    ledger_id = await ledgers.make(THREE)
    async with using(cluster) as others:
        ledger = await others.write(ledger_id)
        error = await outcome(ledgers.write(ledger_id))
        assert error.reason is Reason.FENCED
        async with ledger:
            await ledger.append(b"one")
    assert await read(ledgers, ledger_id) == [(0, b"one")]
    assert (await outcome(ledgers.write(ledger_id))).reason is Reason.FENCED


@on_three_nodes
async def test_a_ledger_that_nobody_wrote_is_closed_empty(cluster, ledgers):
    ledger_id = await ledgers.make(THREE)
    metadata = await ledgers.recover(ledger_id)
    assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, -1)


@on_three_nodes
async def test_a_recovery_that_waits_says_what_for_and_an_accepted_loss_waits_as_long_as_asked(
    cluster, ledgers
):
    ledger_id = await ledgers.make(THREE)
    for name in ("n2", "n3"):
        cluster.nodes[name].down = True
    async with asyncio.TaskGroup() as tasks:
        recovering = tasks.create_task(ledgers.recover(ledger_id))
        await asyncio.sleep(10)
        waits_for = ledgers.waits_for(ledger_id)
        assert "n2" in waits_for
        assert "n3" in waits_for
        recovering.cancel()
    assert ledgers.waits_for(ledger_id) is None
    begun_s = asyncio.get_running_loop().time()
    metadata = await ledgers.accept_loss(ledger_id, by="a test", wait_s=3.0)
    assert metadata.state is LedgerState.IN_RECOVERY
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(3.0)
    metadata = await ledgers.accept_loss(ledger_id, by="a test", wait_s=60.0)
    assert metadata.state is LedgerState.CLOSED


@pytest.mark.covers("D08")
@on_three_nodes
async def test_a_ledger_with_a_key_is_signed_and_read_only_with_it(cluster, ledgers):
    async with await ledgers.create(THREE, key_id="k1") as ledger:
        await ledger.append(b"one")
    metadata = await ledgers.recover(ledger.ledger_id)
    assert metadata.digest_type is DigestType.HMAC
    assert all(
        run.is_signed
        for node in cluster.nodes.values()
        for run in node.runs[ledger.ledger_id].values()
    )
    assert await read(ledgers, ledger.ledger_id) == [(0, b"one")]
    async with using(cluster, keys=LedgerKeys({})) as others:
        error = await outcome(others.open(ledger.ledger_id))
        assert error.reason is Reason.PERMISSION_DENIED
    assert (await outcome(ledgers.create(THREE, key_id="k2"))).reason is Reason.PERMISSION_DENIED


@on_three_nodes
async def test_who_may_not_write_to_the_nodes_is_told_that_and_leaves_nothing(cluster, ledgers):
    async def refuse(_):
        raise RefusedError("who asks is not known", reason=Reason.UNAUTHENTICATED, remedy="Say so")

    ledgers.parts.nodes.client = refuse
    with pytest.raises(RefusedError, match=r"who asks is not known\. Say so") as caught:
        await ledgers.create(THREE)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    # To an owner, which goes on trying, it is what too few nodes always are.
    assert isinstance(caught.value.__cause__, RetryableError)
    assert "3 failed just now; one says: who asks" in str(caught.value.__cause__)
    assert await ledgers.ledgers() == {}


@on_three_nodes
async def test_an_applications_own_metadata_is_kept_and_cant_be_mistaken(cluster, ledgers):
    async with await ledgers.create(THREE, custom={"color": b"blue"}) as ledger:
        pass
    metadata = (await ledgers.open(ledger.ledger_id)).metadata
    assert metadata.custom["color"] == b"blue"
    assert metadata.is_bare
    for key in ("tierlog/stream", "tierlog/lost", "component"):
        error = await outcome(ledgers.create(THREE, custom={key: b"x"}))
        assert isinstance(error, RefusedError)


@on_three_nodes
async def test_an_entry_that_no_frame_takes_is_refused_before_it_has_an_id(cluster, ledgers):
    async with await ledgers.create(THREE) as ledger:
        error = await outcome(ledger.append(bytes(1 << 20)))
        assert error.reason is Reason.TOO_LARGE
        assert await ledger.append(bytes((1 << 20) - 256)) == 0
        assert await ledger.append(b"") == 1


@on_three_nodes
async def test_a_buffer_may_be_written_over_once_it_was_sent(cluster, ledgers):
    async with await ledgers.create(THREE) as ledger:
        buffer = bytearray(b"one")
        await ledger.send(buffer)
        buffer[:] = b"two"
        await ledger.append(buffer)
    assert await read(ledgers, ledger.ledger_id) == [(0, b"one"), (1, b"two")]


@on_three_nodes
async def test_the_queue_before_a_slow_node_stays_within_its_limit(cluster, ledgers):
    for node in cluster.nodes.values():
        node.delay_s = 0.05
    limits = LedgersLimits(in_flight_bytes_max=4096, frame_bytes_max=1 << 20)
    async with using(cluster, limits=limits) as others:
        async with await others.create(THREE) as ledger:
            for _ in range(200):
                await ledger.send(bytes(100))
                assert ledger.queued_bytes <= 4096
            await ledger.flush()
            assert ledger.queued_bytes == 0
        assert len(await read(others, ledger.ledger_id)) == 200


@on_three_nodes
async def test_entries_share_a_run_while_others_are_on_their_way(cluster, ledgers):
    async with await ledgers.create(ONE) as ledger:
        for _ in range(5):  # nothing is on its way: nothing waits
            answer = await ledger.send(b"alone")
            await asyncio.sleep(0.0005)
            assert answer.done()
        for node in cluster.nodes.values():
            node.delay_s = 1.0
        for _ in range(20):
            await ledger.send(b"one of many")
            await asyncio.sleep(0.0001)
        answer = await ledger.send(b"the last one")
        await asyncio.sleep(0.001)
        [runs] = [one for node in cluster.nodes.values() for one in node.runs.values()]
        counts = [run.header.count for run in runs.values()]
        assert counts[:6] == [1] * 6
        assert sum(counts) == 26
        assert max(counts[6:]) >= 9
        assert await answer == 25


@pytest.mark.covers("D17")
@on_three_nodes
async def test_a_ledger_goes_on_without_one_of_its_nodes(cluster, ledgers):
    ledger = await ledgers.create(THREE)
    await ledger.append(b"one")
    cluster.nodes["n2"].down = True
    for number in range(10):
        await ledger.append(b"%d" % number)
    metadata = await ledger.close()
    assert metadata.last_entry_id == 10
    assert len(await read(ledgers, ledger.ledger_id)) == 11
    queued = await cluster.catalog().underreplicated.list()
    assert [one.ledger_id for one in queued] == [ledger.ledger_id]


@pytest.mark.covers("D03", "D17")
def test_another_node_takes_the_place_of_a_failed_one():
    async def main():
        cluster = SmallCluster(4)
        await cluster.start()
        async with using(cluster) as ledgers:
            ledger = await ledgers.create(THREE)
            await ledger.append(b"one")
            first = (await ledgers.open(ledger.ledger_id)).metadata.segments[0].ensemble
            cluster.nodes[first[1]].down = True
            for number in range(10):
                await ledger.append(b"%d" % number)
                await asyncio.sleep(0.1)
            metadata = await ledger.close()
            before, after = metadata.segments
            assert before.ensemble == first
            assert first[1] not in after.ensemble
            assert 1 <= after.first_entry_id <= 3
        # Another application, and yet another node less: a copy of each entry is left.
        cluster.nodes[first[0]].down = True
        async with using(cluster) as others:
            assert len(await read(others, ledger.ledger_id)) == 11

    run_virtual(main(), until_s=10_000)


def test_a_reader_finds_a_closed_ledger_that_was_moved_to_another_node():
    async def main():
        cluster = SmallCluster(2)
        catalog = await cluster.start()
        async with using(cluster) as ledgers:
            async with await ledgers.create(ONE) as ledger:
                await ledger.append(b"one")
            reader = await ledgers.open(ledger.ledger_id)
            assert reader.closed
            (old,) = reader.metadata.segments[0].ensemble
            (new,) = set(cluster.names) - {old}
            cluster.nodes[old].down = True
            with pytest.raises(RetryableError):
                [one.data async for one in reader.entries()]
            for run in cluster.nodes[old].runs[ledger.ledger_id].values():
                await cluster.nodes[new].add(run, recovery=True)
            await catalog.underreplicated.replace_member(
                ledger.ledger_id, first_entry_id=EntryId(0), leaving=old, joining=new
            )
            assert [one.data async for one in reader.entries()] == [b"one"]
            assert reader.metadata.segments[0].ensemble == (new,)

    run_virtual(main())


@on_three_nodes
async def test_a_stream_beside_it_is_untouched(cluster, ledgers):
    catalog = cluster.catalog()
    claimed = await catalog.streams.claim(STREAM, cluster.names[0])
    owned, _ = await cluster.open_ledger(catalog, claimed)
    async with await ledgers.create(THREE) as ledger:
        await ledger.append(b"one")
    for call in (ledgers.open(owned), ledgers.recover(owned), ledgers.delete(owned)):
        error = await outcome(call)
        assert isinstance(error, RefusedError)
        assert "belongs to a stream" in str(error)
    assert await ledgers.ledgers() == {ledger.ledger_id: await ledger.close()}
    assert owned in await catalog.ledgers.list_ids()
    assert await catalog.contexts.get(LedgerId(ledger.ledger_id)) is None


@given(st.integers(0, 2**32), st.integers(0, 40), st.floats(0, 0.2))
@settings(max_examples=25)
def test_recovery_in_the_middle_keeps_all_that_was_acknowledged(seed, before, wait_s):
    """Whatever was acknowledged is there with its id; what came later than the fence is not."""

    async def main():
        cluster = SmallCluster(3, seed=seed)
        await cluster.start()
        for name, node in cluster.nodes.items():
            node.delay_s = cluster.rng.choice((0.0, 0.01, 0.05)) * int(name[1:])
        async with using(cluster) as ledgers, using(cluster) as others:
            ledger = await ledgers.create(THREE)
            for number in range(before):
                await ledger.send(b"%d" % number)
            acked = {}

            async def go_on():
                for number in range(before, before + 200):
                    entry_id = await ledger.append(b"%d" % number)
                    acked[entry_id] = b"%d" % number

            writing = asyncio.get_running_loop().create_task(go_on())
            await asyncio.sleep(wait_s)
            last = ledger.last_add_confirmed
            found = dict(await read(others, ledger.ledger_id, recover=True))
            with contextlib.suppress(TierlogError):
                await writing
            assert list(found) == list(range(len(found)))
            assert len(found) > last
            assert acked.items() <= found.items()
            assert dict(await read(ledgers, ledger.ledger_id)) == found

    run_virtual(main(), until_s=10_000)


async def insist(call):
    """Call until it is answered."""
    while True:
        try:
            return await call()
        except (IndeterminateError, RetryableError):
            await asyncio.sleep(0.5)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_what_was_told_holds_whatever_node_or_answer_is_lost(seed):
    """Acknowledged entries are there for ever, each under its id; ids are dense."""

    async def main():
        cluster = SmallCluster(4, seed=seed)
        await cluster.start()
        rng = cluster.rng
        faults = Faults(rng, rates=FaultRates(refused=0.1, request_lost=0.1, reply_lost=0.1))
        async with using(cluster, faults=faults) as ledgers, using(cluster) as others:
            for _ in range(3):
                ledger = await insist(lambda: ledgers.create(THREE))
                ledger_id, told = ledger.ledger_id, {}
                for number in range(30):
                    if number % 5 == 0:
                        chosen = rng.choice([*cluster.nodes.values(), None])
                        for node in cluster.nodes.values():
                            node.down = node is chosen
                    entry = rng.randbytes(rng.choice((0, 1, 100, 70_000)))
                    with contextlib.suppress(TierlogError):
                        told[await ledger.append(entry)] = entry
                    await asyncio.sleep(rng.choice((0, 0, 0.3, 2)))
                if rng.random() < 0.5:
                    ledger.abandon()
                else:
                    await outcome(ledger.close())
                # Closed or not, whole or not: from here on it is.
                await insist(lambda: ledgers.recover(ledger_id))  # noqa: B023
                for node in cluster.nodes.values():
                    node.down = False
                reader = await others.open(ledger_id)
                assert reader.closed
                found = dict(await read(others, ledger_id))
                assert list(found) == list(range(reader.metadata.last_entry_id + 1))
                assert told.items() <= found.items()
                assert reader.metadata.length == sum(map(len, found.values()))
                if rng.random() < 0.5:
                    await insist(lambda: ledgers.delete(ledger_id))  # noqa: B023
                    assert ledger_id not in await others.ledgers()

    run_virtual(main(), until_s=100_000)
