"""Protocols section 5, on virtual time: any position, whichever tier has it, and the tail."""

import asyncio

import pytest

from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.adapters.memory.faults import Faults
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.model.trimming import TrimGrounds
from tierlog_reader.places import Tier
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares
from tierlog_reader.views import Views


def numbered(first, count, size=40):
    return [f"{number:08d}".encode() * (size // 8) for number in range(first, first + count)]


A, B, C = numbered(0, 30), numbered(100, 20), numbered(200, 10)


async def three_ledgers(policy=None):
    """One offloaded and gone locally, one in both tiers, one open."""
    world = ReaderWorld()
    await world.start(policy=policy)
    first = await world.sealed(A)
    await world.offloaded(first)
    await world.gone_locally(first)
    second = await world.sealed(B)
    await world.offloaded(second)
    third = await world.opened(C)
    return world, first, second, third


@pytest.mark.covers("A04", "A06", "A09", "A19")
@on_virtual_time
async def test_a_stream_reads_as_one_whichever_tier_holds_what():
    world, *_ = await three_ledgers()
    async with world.reader() as source:
        assert await world.read_all(source) == A + B + C
        assert await world.read_all(source, size=1) == A + B + C
        assert await world.read_all(source, size=100_000) == A + B + C


@pytest.mark.covers("A09", "B01")
@pytest.mark.parametrize(("priority", "tier"), [("tier2", Tier.TIER2), ("tier1", Tier.TIER1)])
def test_policy_decides_where_to_read_what_both_tiers_have(priority, tier):
    @on_virtual_time
    async def test():
        policy = Policy(offloaded_read_priority=priority)
        world, first, second, third = await three_ledgers(policy)
        async with world.reader() as source:
            tiers = [
                (await source.read(STREAM, at(ledger, 0), budget())).chunk.tier
                for ledger in (first, second, third)
            ]
        assert tiers == [Tier.TIER2, tier, Tier.TIER1]

    test()


@on_virtual_time
async def test_every_position_can_be_read_alone():
    world, first, _, third = await three_ledgers()
    async with world.reader() as source:
        for ledger, entries in ((first, A), (third, C)):
            for number, entry in enumerate(entries):
                answer = await source.read(STREAM, at(ledger, number), budget(entries=1))
                assert payloads(answer) == [entry]
                assert answer.resume == at(ledger, number + 1)


@on_virtual_time
async def test_a_budget_bounds_an_answer_but_never_below_one_entry():
    world, first, *_ = await three_ledgers()
    async with world.reader() as source:
        few = await source.read(STREAM, at(first, 3), budget(entries=4))
        assert payloads(few) == A[3:7]
        one = await source.read(STREAM, at(first, 3), budget(size=1))
        assert payloads(one) == A[3:4]


@on_virtual_time
async def test_what_is_wrong_with_a_position_is_told_apart():
    world, first, second, third = await three_ledgers()
    cases = [
        (at(first, 31), Reason.NO_SUCH_ENTRY),
        (at(second, 99), Reason.NO_SUCH_ENTRY),
        (at(third, 11), Reason.NOT_YET),
        (at(third + 5, 0), Reason.LEDGER_NOT_FOUND),
    ]
    async with world.reader() as source:
        for where, reason in cases:
            with pytest.raises((RefusedError, RetryableError)) as caught:
                await source.read(STREAM, where, budget())
            assert caught.value.reason is reason
            assert caught.value.remedy
        with pytest.raises(RefusedError) as caught:
            await source.read(StreamName("nowhere"), Edge.EARLIEST, budget())
        assert caught.value.reason is Reason.STREAM_NOT_FOUND


@on_virtual_time
async def test_the_tail_answers_empty_at_once_or_waits_for_what_comes():
    world, *_, third = await three_ledgers()
    async with world.reader() as source:
        end = at(third, len(C))
        empty = await source.read(STREAM, end, budget())
        assert (empty.chunk, empty.resume) == (None, end)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(source.read(STREAM, end, budget(wait_s=30)))
            await asyncio.sleep(7)
            await world.write(third, [b"late"], first=len(C))
        assert payloads(reading.result()) == [b"late"]
        assert 7 <= loop.time() - asked_s < 8


@on_virtual_time
async def test_a_tail_read_follows_a_roll_over_while_it_waits():
    world, *_, third = await three_ledgers()
    async with world.reader() as source:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(source.read(STREAM, at(third, len(C)), budget(wait_s=30)))
            await asyncio.sleep(3)
            await world.catalog().ledgers.close(
                world.claimed, third, last_entry_id=EntryId(len(C) - 1), length=400
            )
            await asyncio.sleep(3)
            fourth = await world.opened([b"next ledger"])
        answer = reading.result()
        assert payloads(answer) == [b"next ledger"]
        assert answer.resume == at(fourth, 1)


async def trim(world, *ledger_ids):
    await world.catalog().retention.begin_trim(
        STREAM, world.claimed.incarnation, ledger_ids, grounds=await world.grounds()
    )
    # Views of before are over.
    await asyncio.sleep(1)


@on_virtual_time
async def test_who_is_caught_up_goes_on_when_the_ledger_is_trimmed_and_who_missed_one_is_told():
    world = ReaderWorld()
    await world.start()
    first, second = await world.sealed(A), await world.sealed(B)
    async with world.reader() as source:
        await trim(world, first)
        answer = await source.read(STREAM, at(first, len(A)), budget())
        assert payloads(answer) == B
        caught_up = answer.resume
        await trim(world, second)
        assert await source.bounds(STREAM) == (caught_up, caught_up)
        for where in (at(first, len(A)), at(second, len(B) - 1)):
            with pytest.raises(RefusedError) as caught:
                await source.read(STREAM, where, budget())
            assert caught.value.reason is Reason.TRIMMED
        third = await world.opened()
        empty = await source.read(STREAM, caught_up, budget())
        assert (empty.chunk, empty.resume) == (None, caught_up)
        assert await source.bounds(STREAM) == (caught_up, caught_up)
        await world.write(third, C)
        assert payloads(await source.read(STREAM, caught_up, budget())) == C


@on_virtual_time
async def test_ledgers_are_listed_page_by_page_the_open_one_as_far_as_it_is_confirmed():
    world, first, second, third = await three_ledgers()
    async with world.reader() as source:
        page = await source.ledgers(STREAM, LedgerId(0), count_max=2)
        assert [(one.ledger_id, one.entry_count, one.closed) for one in page.ledgers] == [
            (first, len(A), True),
            (second, len(B), True),
        ]
        assert [one.length for one in page.ledgers] == [sum(map(len, one)) for one in (A, B)]
        assert (page.resume, page.trimmed_end) == (third, None)
        assert page.incarnation == (await world.catalog().streams.get(STREAM)).incarnation
        rest = await source.ledgers(STREAM, third, count_max=2)
        assert [(one.ledger_id, one.entry_count, one.closed) for one in rest.ledgers] == [
            (third, len(C), False)
        ]
        assert rest.resume is None
        assert [one.length for one in rest.ledgers] == [sum(map(len, C))]
        await trim(world, first)
        page = await source.ledgers(STREAM, first, count_max=9)
        assert [one.ledger_id for one in page.ledgers] == [second, third]
        assert page.trimmed_end == at(first, len(A))


@on_virtual_time
async def test_bytes_of_an_open_ledger_are_told_if_its_last_run_tells_them():
    world, sizes = ReaderWorld(), (5, 70, 0, 9)
    await world.start()
    ledger_id = await world.opened([bytes(size) for size in sizes])
    async with world.reader() as source:
        for last in range(len(sizes)):
            told = await source._tier1.length(ledger_id, EntryId(last))
            assert told == sum(sizes[: last + 1])
        [row] = (await source.ledgers(STREAM, ledger_id, count_max=1)).ledgers
        assert (row.entry_count, row.length) == (4, sum(sizes))
        # A run that was cut from a copy in tier 2 tells no length.
        await world.write(ledger_id, [b"more"], first=4)
        [row] = (await source.ledgers(STREAM, ledger_id, count_max=1)).ledgers
        assert (row.entry_count, row.length) == (5, 0)


@on_virtual_time
async def test_who_comes_while_a_ledger_is_trimmed_is_told_from_where_on_it_is_lost():
    world, first, second, _ = await three_ledgers()
    async with world.reader(age_s=1000) as source:
        await source.bounds(STREAM)
        await trim(world, first)
        # The list is as it was before, the ledger's context is not: a new list says how far.
        with pytest.raises(RefusedError) as caught:
            await source.read(STREAM, at(first, 1), budget())
    assert caught.value.reason is Reason.TRIMMED
    assert caught.value.details["lost_from"] == f"{first}:1"
    assert caught.value.details["lost_before"] == f"{second}:0"


@on_virtual_time
async def test_an_older_look_refuses_nothing_and_what_a_new_one_confirms_is_refused():
    """As where another reader, which looked later, has handed the position out."""
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(A)
    async with world.reader() as source:
        await source.read(STREAM, at(first, 0), budget())
        second = await world.sealed(B)
        assert payloads(await source.read(STREAM, at(second, 0), budget())) == B
        third = await world.opened(C)
        for wait_s in (0, 5):
            with pytest.raises(RefusedError) as caught:
                await source.read(STREAM, at(third + 1, 0), budget(wait_s=wait_s))
            assert caught.value.reason is Reason.LEDGER_NOT_FOUND
        assert payloads(await source.read(STREAM, at(third, 3), budget())) == C[3:]


@on_virtual_time
async def test_a_position_costs_a_second_look_only_where_it_is_refused():
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(A)
    async with world.reader() as source:
        await source.read(STREAM, at(first, 0), budget())
        before = source._views._streams._read_count
        for entry in range(len(A)):
            await source.read(STREAM, at(first, entry), budget())
        assert source._views._streams._read_count == before
        for refused in range(1, 4):
            with pytest.raises(RefusedError):
                await source.read(STREAM, at(first + 1, 0), budget())
            assert source._views._streams._read_count == before + refused


@on_virtual_time
async def test_earliest_is_never_refused_because_of_a_ledger_just_trimmed():
    world = ReaderWorld()
    await world.start()
    first, _ = await world.sealed(A), await world.sealed(B)
    async with world.reader(age_s=1000) as source:
        await source.bounds(STREAM)
        await trim(world, first)
        assert payloads(await source.read(STREAM, Edge.EARLIEST, budget())) == B


@on_virtual_time
async def test_a_read_that_waits_at_the_end_outlives_the_trimming_of_its_ledger():
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(A)
    async with world.reader() as source, asyncio.TaskGroup() as group:
        end = at(first, len(A))
        reading = group.create_task(source.read(STREAM, end, budget(wait_s=30)))
        await asyncio.sleep(3)
        await trim(world, first)
        await world.opened(B)
    assert payloads(reading.result()) == B


@on_virtual_time
async def test_latest_is_what_comes_after_the_call():
    world, *_, third = await three_ledgers()
    async with world.reader() as source:
        empty = await source.read(STREAM, Edge.LATEST, budget())
        assert (empty.chunk, empty.resume) == (None, at(third, len(C)))
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(source.read(STREAM, Edge.LATEST, budget(wait_s=30)))
            await asyncio.sleep(2)
            await world.write(third, [b"new"], first=len(C))
        assert payloads(reading.result()) == [b"new"]


@pytest.mark.parametrize("wait_s", [0, 1])
def test_latest_is_behind_what_came_before_the_call_also_right_after_a_roll_over(wait_s):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        first = await world.sealed(A)
        async with world.reader() as source:
            await source.read(STREAM, at(first, 0), budget())
            await world.sealed(B)
            third = await world.opened(C)
            empty = await source.read(STREAM, Edge.LATEST, budget(wait_s=wait_s))
            assert (empty.chunk, empty.resume) == (None, at(third, len(C)))

    test()


@on_virtual_time
async def test_nothing_behind_the_lac_of_an_open_ledger_is_served():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(C, lac=5)  # the end of a run
    async with world.reader() as source:
        answer = await source.read(STREAM, Edge.EARLIEST, budget())
        assert payloads(answer) == C[:6]
        empty = await source.read(STREAM, at(ledger, 6), budget())
        assert empty.chunk is None


@on_virtual_time
async def test_an_empty_stream_says_earliest_until_there_is_an_entry():
    world = ReaderWorld()
    await world.start()
    async with world.reader() as source:
        assert await source.bounds(STREAM) == (Edge.EARLIEST, Edge.EARLIEST)
        empty = await source.read(STREAM, Edge.LATEST, budget())
        assert (empty.chunk, empty.resume) == (None, Edge.EARLIEST)
        ledger = await world.opened()
        assert await source.bounds(STREAM) == (Edge.EARLIEST, Edge.EARLIEST)
        await world.write(ledger, [b"one"])
        assert await source.bounds(STREAM) == (at(ledger, 0), at(ledger, 1))


@on_virtual_time
async def test_a_ledger_that_leaves_tier_1_between_lookup_and_read_is_looked_up_again():
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(A)
    async with world.reader(age_s=1000) as source:
        assert (await source.read(STREAM, at(ledger, 0), budget(entries=1))).chunk.tier == "tier1"
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
        # The reader's view is old by now; the node tells that the ledger is gone.
        answer = await source.read(STREAM, at(ledger, 1), budget(entries=1))
        assert answer.chunk.tier == "tier2"
        assert payloads(answer) == A[1:2]


@on_virtual_time
async def test_a_ledger_just_closed_is_not_read_by_an_older_look_at_it():
    """After a recovery no node knows a LAC: only the metadata say where the ledger ends."""
    world = ReaderWorld()
    await world.start()
    ledger_id = await world.opened(C, lac=-1)
    async with world.reader(age_s=1000) as source:
        empty = await source.read(STREAM, Edge.EARLIEST, budget())
        assert empty.chunk is None
        await world.catalog().ledgers.close(
            world.claimed, ledger_id, last_entry_id=EntryId(len(C) - 1), length=sum(map(len, C))
        )
        await source.bounds(STREAM)
        assert await world.read_all(source) == C


@on_virtual_time
async def test_an_end_that_nobody_confirms_is_unknown_and_found_once_it_is_confirmed_or_closed():
    """As after a crash of all nodes at once: what was told of the last entries is forgotten."""
    world = ReaderWorld()
    await world.start()
    for ledger_ends in ("confirmed", "closed"):
        ledger_id = await world.opened(C, lac=-1)
        last = EntryId(len(C) - 1)
        async with world.reader() as source:
            with pytest.raises(RetryableError) as caught:
                await source.bounds(STREAM)
            assert caught.value.reason is Reason.UNKNOWN
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(source.bounds(STREAM))
                await asyncio.sleep(1)
                assert not asked.done()
                if ledger_ends == "confirmed":
                    world.node.confirm(ledger_id, last)
                else:
                    await world.catalog().ledgers.close(
                        world.claimed, ledger_id, last_entry_id=last, length=sum(map(len, C))
                    )
            assert asked.result()[1] == at(ledger_id, len(C))
        if ledger_ends == "confirmed":
            await world.catalog().ledgers.close(
                world.claimed, ledger_id, last_entry_id=last, length=sum(map(len, C))
            )


@on_virtual_time
async def test_the_end_is_found_though_a_producer_is_always_ahead_of_what_is_confirmed():
    world = ReaderWorld()
    await world.start()
    ledger_id = await world.opened([b"first"], lac=-1)

    async def produce():
        for number in range(1, 10_000):
            await world.write(ledger_id, [b"next"], first=number, lac=number - 1)
            await asyncio.sleep(0.002)

    async with world.reader() as source, asyncio.TaskGroup() as group:
        producing = group.create_task(produce())
        await asyncio.sleep(0.1)
        end = (await source.bounds(STREAM))[1]
        assert isinstance(end, Position)
        assert 50 <= end.entry_id <= 60
        producing.cancel()


@pytest.mark.parametrize("confirmed", [10, 5])
def test_the_end_is_waited_for_as_long_as_what_was_written_is_confirmed_by_and_by(confirmed):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger_id = await world.opened(C, lac=-1)
        loop = asyncio.get_running_loop()

        async def confirm():
            for last in range(confirmed):
                await asyncio.sleep(1)
                world.node.confirm(ledger_id, EntryId(last))

        async with world.reader() as source, asyncio.TaskGroup() as group:
            group.create_task(confirm())
            begun_s = loop.time()
            if confirmed == len(C):
                assert (await source.bounds(STREAM))[1] == at(ledger_id, len(C))
            else:
                with pytest.raises(RetryableError) as caught:
                    await source.bounds(STREAM)
                assert caught.value.reason is Reason.UNKNOWN
                assert confirmed + 1 < loop.time() - begun_s < confirmed + 3

    test()


@on_virtual_time
async def test_a_tier_that_is_away_or_damaged_is_left_for_the_other():
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(A)
    await world.offloaded(ledger)
    context = await world.context(ledger)
    assert context.location is not None
    world.bucket.damage(context.location.data_key, 150)
    async with world.reader() as source:
        answer = await source.read(STREAM, at(ledger, 0), budget())
        assert answer.chunk.tier == "tier1"
        assert payloads(answer) == A
    del world.bucket.objects[context.location.index_key]
    async with world.reader() as source:
        assert payloads(await source.read(STREAM, at(ledger, 0), budget())) == A


@pytest.mark.parametrize("given_up", [False, True])
def test_what_tier_1_has_before_a_bad_place_is_read_and_then_the_place_is_told(given_up):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger = await world.opened(A)
        runs = world.node.runs[ledger]
        first = max(one for one in runs if one < 20)
        last = runs.pop(first).last_entry_id
        await world.catalog().ledgers.close(
            world.claimed,
            ledger,
            last_entry_id=EntryId(len(A) - 1),
            length=sum(map(len, A)),
            lost=[(first, last)] if given_up else (),
        )
        async with world.reader() as source:
            for begin in (0, first - 1):
                answer = await source.read(STREAM, at(ledger, begin), budget())
                assert payloads(answer) == A[begin:first]
                assert answer.resume == at(ledger, first)
            with pytest.raises(CorruptError if given_up else RetryableError) as caught:
                await source.read(STREAM, at(ledger, first), budget())
            assert (f"Read on from {ledger}:{last + 1}" in str(caught.value)) == given_up
            rest = await source.read(STREAM, at(ledger, last + 1), budget())
            assert payloads(rest) == A[last + 1 :]

    test()


@on_virtual_time
async def test_when_the_last_tier_is_away_its_error_is_told_and_nothing_is_empty():
    world, first, *_ = await three_ledgers()
    faults = Faults(world.rng)
    faults.outages.add("objects")
    async with world.reader(objects_faults=faults) as source:
        with pytest.raises(RetryableError) as caught:
            await source.read(STREAM, at(first, 0), budget())
        assert caught.value.reason is Reason.UNAVAILABLE


@on_virtual_time
async def test_index_objects_are_shared_and_a_spoilt_one_is_not_believed():
    world, first, *_ = await three_ledgers()
    async with world.reader() as source:
        await source.read(STREAM, at(first, 0), budget())
    assert sorted(key.partition(":")[0] for key in world.cache.values) == ["index", "side"]
    for key, (value, end_s) in world.cache.values.items():
        world.cache.values[key] = (value[:-1] + b"\xff", end_s)
    async with world.reader() as source:
        assert payloads(await source.read(STREAM, at(first, 2), budget(entries=1))) == A[2:3]


@pytest.mark.parametrize("place", [{"bucket": "other"}, {"endpoint_name": "elsewhere"}])
def test_a_copy_that_lies_elsewhere_is_said_to_and_never_looked_for_here(place):
    @on_virtual_time
    async def test():
        world, first, *_ = await three_ledgers()
        async with world.reader(**place) as source:
            with pytest.raises(RetryableError, match="lies in bucket b of endpoint default"):
                await source.read(STREAM, at(first, 0), budget())

    test()


@on_virtual_time
async def test_an_answer_out_of_tier_1_is_as_long_as_was_asked_and_read_once():
    world = ReaderWorld()
    await world.start()
    entries = [bytes([number]) * 10_000 for number in range(100)]
    frame = 10_000 + 12
    ledger = await world.sealed(entries, run_bytes_max=6 * frame)
    shares = Shares(10**7, wait_s_max=5)
    async with world.reader() as source:
        served, reads = ServedReads(source, shares), []
        read = source.read

        async def noting(stream, where, within):
            reads.append(where)
            return await read(stream, where, within)

        source.read = noting
        where: Position | Edge = at(ledger, 0)
        found, answers = [], 0
        while True:
            answer, room = await served.read(
                "c", STREAM, where, budget(entries=1000, size=20 * frame + 5)
            )
            room.leave()
            if answer.chunk is None:
                break
            assert answer.chunk.count == 18 or answer.resume == at(ledger, 100)
            found += payloads(answer)
            where, answers = answer.resume, answers + 1
    assert found == entries
    assert len(reads) == answers + 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_earliest_is_no_loss_though_ledgers_are_trimmed_one_after_the_other(count, monkeypatch):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledgers = [await world.sealed([b"%d" % number]) for number in range(5)]
        catalog, left, context = world.catalog(), ledgers[:count], Views.context

        async def trimming(self, ledger_id, *, fresh=False):
            if left and left[0] == ledger_id:
                snapshot = await catalog.streams.snapshot(STREAM)
                grounds = TrimGrounds.of(snapshot.stream, snapshot.levels)
                await catalog.retention.begin_trim(
                    STREAM, world.claimed.incarnation, [left.pop(0)], grounds=grounds
                )
            return await context(self, ledger_id, fresh=fresh)

        monkeypatch.setattr(Views, "context", trimming)
        async with world.reader() as source:
            answer = await source.read(STREAM, Edge.EARLIEST, budget())
            assert payloads(answer) == [b"%d" % count]
            with pytest.raises(RefusedError) as refused:
                await source.read(STREAM, at(ledgers[0], 0), budget())
            assert refused.value.reason is Reason.TRIMMED

    test()
