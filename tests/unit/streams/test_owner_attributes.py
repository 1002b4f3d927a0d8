"""Exactly-once appends at the owner (protocols.md section 4): checks, answers, rebuilds."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import STREAM, draft
from tests.unit.streams.attribute_world import (
    CACHED_MAX,
    KEY,
    W1,
    W2,
    AttributeCluster,
    after,
    entry,
    folded,
    key_of,
    made_by_entries,
    many_writers,
    one_owner,
    plus,
    send,
    update,
)
from tests.unit.streams.test_owners import read_stream, running, spans
from tierlog.adapters.memory.faults import no_faults
from tierlog.format.entry import Verb
from tierlog.model.attributes import CREATION_TIME, EVENT_COUNT, VALUE_MAX
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.ports.streams import FIRST_KEY, LAST_KEY
from tierlog_ingest.metrics import append_metrics


async def failed(answer):
    """Return the details of a failed check."""
    with pytest.raises(RefusedError) as caught:
        await answer
    assert caught.value.reason is Reason.CONDITIONAL_APPEND_FAILED, caught.value
    assert caught.value.remedy
    return caught.value.details


async def number_of(owners, writer):
    found = await owners.get_attributes(STREAM, [key_of(writer)])
    return found.values.get(key_of(writer))


@pytest.mark.covers("E01", "E02", "E07", "E08", "E19")
@on_virtual_time
async def test_appends_of_writers_are_pipelined_checked_and_counted():
    async with one_owner() as (cluster, owners):
        answers = [
            send(owners, STREAM, writer, number) for number in range(1, 51) for writer in (W1, W2)
        ]
        places = [spans(await answer) for answer in answers]
        assert places == [[(0, place, place)] for place in range(100)]
        found = await owners.get_attributes(STREAM, [key_of(W1), key_of(W2), EVENT_COUNT])
        assert found.values == {key_of(W1): 50, key_of(W2): 50, EVENT_COUNT: 100}
        assert found.as_of == Position(0, 99)
    entries = await read_stream(cluster)
    assert entries == [entry(w, n) for n in range(1, 51) for w in (W1, W2)]
    # They were put together, as plain ones are.
    assert len(cluster.nodes["n1"].runs[0]) < 10


@on_virtual_time
async def test_metrics_say_how_long_answers_took_and_how_many_conditions_did_not_hold():
    async with one_owner() as (_, owners):
        await send(owners, STREAM, W1, 1)
        await failed(send(owners, STREAM, W1, 1))
        shown = {
            sample.name: sample.value
            for family in append_metrics(owners.budget)
            for sample in family.samples
        }
    assert shown["tierlog_append_conditional_failures_total"] == 1
    assert shown["tierlog_append_duration_seconds_count"] == 2
    assert shown["tierlog_append_duration_seconds_bucket"] == 2


@pytest.mark.covers("E03", "E04")
@on_virtual_time
async def test_a_repeat_fails_with_the_number_that_is_there_and_fails_what_follows():
    async with one_owner() as (cluster, owners):
        await send(owners, STREAM, W1, 5, last=0)
        again = [send(owners, STREAM, W1, 5, last=0), send(owners, STREAM, W1, 9, last=6)]
        goes = send(owners, STREAM, W1, 6)
        details = await failed(again[0])
        assert details["event_number"] == "5"
        assert (await failed(again[1]))["event_number"] == "5"
        assert spans(await goes) == [(0, 1, 1)]
        # Nobody's first event after one that never was.
        assert (await failed(send(owners, STREAM, W2, 3, last=2)))["event_number"] == "0"
    assert await read_stream(cluster) == [entry(W1, 5), entry(W1, 6)]


@pytest.mark.covers("E03")
@on_virtual_time
async def test_a_failed_check_is_told_only_once_what_it_rests_on_is_confirmed():
    async with one_owner() as (cluster, owners):
        node = cluster.nodes["n1"]
        await send(owners, STREAM, W1, 1)
        node.delay_s = 1.0
        first = send(owners, STREAM, W1, 2)
        again = send(owners, STREAM, W1, 2, last=1)
        await asyncio.sleep(0.9)
        assert not first.done()
        assert not again.done()
        await first
        assert (await failed(again))["event_number"] == "2"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.covers("E04")
@on_virtual_time
async def test_a_check_that_rests_on_what_vanished_is_indeterminate(stored):
    async with one_owner() as (cluster, owners):
        node = cluster.nodes["n1"]
        await send(owners, STREAM, W1, 1)
        node.mute, node.deaf = stored, not stored
        sent = send(owners, STREAM, W1, 2)
        await asyncio.sleep(1)  # the writer breaks before the others' time is up
        again = send(owners, STREAM, W1, 2, last=1)
        third = send(owners, STREAM, W1, 3)
        for answer in (sent, again, third):
            with pytest.raises(IndeterminateError):
                await answer
        node.mute = node.deaf = False
        # What recovery found is what counts from then on.
        last = 3 if stored else 1
        assert await number_of(owners, W1) == last
        await send(owners, STREAM, W1, last + 1)
    numbers = range(1, last + 2)
    assert await read_stream(cluster) == [entry(W1, number) for number in numbers]


@pytest.mark.covers("E02")
@on_virtual_time
async def test_an_append_may_want_its_place_too():
    async with one_owner(policy=Policy(ledger_entries_max=2)) as (_, owners):
        tail = Position(0, 0)
        assert (await failed(send(owners, STREAM, W1, 1, where=tail))) == {
            "last_position": "earliest"
        }
        answers = [
            send(owners, STREAM, W1, 1, where=Edge.EARLIEST),
            send(owners, STREAM, W1, 2, where=Position(0, 0)),
            send(owners, STREAM, W1, 3, where=Position(0, 1)),
            send(owners, STREAM, W1, 4, where=Position(0, 1)),
            send(owners, STREAM, W1, 9, last=7, where=Position(1, 0)),
            send(owners, STREAM, W1, 4, where=Position(1, 0)),
        ]
        places = [spans(await answers[place]) for place in (0, 1, 2, 5)]
        assert places == [[(0, 0, 0)], [(0, 1, 1)], [(1, 0, 0)], [(1, 1, 1)]]
        assert (await failed(answers[3]))["last_position"] == "1:0"
        assert (await failed(answers[4]))["event_number"] == "3"


@pytest.mark.covers("E09", "E12", "E15", "E16", "E17", "E18")
def test_updates_go_alone_or_with_events_all_or_nothing():
    other = KEY.__class__(int=8 << 90)

    async def main():
        cluster = AttributeCluster()
        await cluster.start()
        owners = cluster.owners()

        def change(*updates, events=0, writer=None, number=0):
            return owners.submit(
                STREAM, draft(entry(writer, number, events=events, updates=updates))
            )

        async def value(key=KEY):
            found = await owners.get_attributes(STREAM, [key_of(key)])
            return found.values.get(key_of(key))

        async with running(owners):
            # Greater than what is not there is nothing.
            details = await failed(change(update(Verb.REPLACE_IF_GREATER, 1)))
            assert details == {"key": str(KEY)}
            await change(plus(-3))
            await change(update(Verb.REPLACE_IF_GREATER, 4))
            assert (await failed(change(update(Verb.REPLACE_IF_GREATER, 4))))["value"] == "4"
            assert (await failed(change(update(Verb.REPLACE_IF_ABSENT, 1))))["value"] == "4"
            both = (update(Verb.REPLACE_IF_ABSENT, 1, key=other), plus(1))
            pipelined = [
                change(update(Verb.REPLACE_IF_EQUALS, 9, expected=4), events=2),
                change(update(Verb.REPLACE_IF_EQUALS, 5, expected=4)),
                change(*both),
                change(*both),
                change(plus(VALUE_MAX)),
            ]
            await pipelined[0]
            assert (await failed(pipelined[1]))["value"] == "9"
            await pipelined[2]
            assert (await failed(pipelined[3]))["key"] == str(other)
            assert (await failed(pipelined[4]))["value"] == "10"
            assert [await value(), await value(other)] == [10, 1]
            await send(owners, STREAM, W1, 3, events=3, updates=(update(Verb.REPLACE, -8),))
            await failed(send(owners, STREAM, W1, 3, updates=(update(Verb.REPLACE, 7),)))
            found = await owners.list_attributes(STREAM, FIRST_KEY, LAST_KEY, 100)
            assert list(found.values) == sorted(found.values)
            assert found.values[CREATION_TIME] >= 0
            assert made_by_entries(found.values) == folded(await read_open(owners, cluster))
            assert found.values[EVENT_COUNT] == 5
            assert await value() == -8

    run_virtual(main())


async def read_open(owners, cluster):
    await owners.seal(STREAM)
    return await read_stream(cluster)


@pytest.mark.covers("E13")
def test_what_can_not_be_checked_is_refused():
    core = KEY.__class__(bytes=EVENT_COUNT)

    async def refused(answer):
        with pytest.raises(RefusedError) as caught:
            await answer
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert caught.value.remedy

    async def main():
        cluster = AttributeCluster()
        await cluster.start()
        catalog = cluster.catalog()
        await catalog.streams.create(StreamName("raw"), raw=True)
        owners = cluster.owners()
        async with running(owners):
            one = entry(W1, 1)
            for name, run, condition in (
                (STREAM, draft(one, one), after(0)),  # several entries
                (STREAM, draft(one, entry(None, 0, updates=(plus(1),))), None),
                (STREAM, draft(b"no header"), after(0)),
                (STREAM, draft(entry(None, 0)), after(0)),  # nobody's
                (STREAM, draft(one), after(1)),  # not above the last one
                (STREAM, draft(entry(core, 1)), after(0)),
                (STREAM, draft(entry(W1, 1, updates=(update(Verb.REPLACE, 1, key=core),))), None),
                (StreamName("raw"), draft(one), after(0)),
            ):
                await refused(owners.submit(name, run, condition=condition))
            with pytest.raises(RefusedError):
                await owners.get_attributes(StreamName("raw"), [KEY.bytes])
            # An entry that nobody can read is an entry all the same.
            await owners.submit(STREAM, draft(b"no header", one, entry(W1, 7)))
            assert await number_of(owners, W1) == 7
            found = await owners.get_attributes(STREAM, [EVENT_COUNT])
            assert found.values == {EVENT_COUNT: 2}

    run_virtual(main())


@pytest.mark.covers("E02", "E07")
@pytest.mark.parametrize("drain", [True, False])
def test_the_next_owner_knows_every_number(drain):
    async def main():
        cluster = AttributeCluster(2)
        await cluster.start(policy=Policy(ledger_entries_max=5))
        catalog, other = cluster.catalog(), cluster.catalog()
        owners = cluster.owners("n1", catalog=catalog)
        async with running(owners, drain=drain):
            for number in range(1, 13):
                await send(owners, STREAM, W1, number, updates=(plus(number),))
                await send(owners, STREAM, W2, 2 * number, events=2)
        assert cluster.index.flushes > 0
        await catalog.streams.claim(STREAM, "n2")
        successor = cluster.owners("n2", catalog=other)
        async with running(successor):
            assert (await failed(send(successor, STREAM, W1, 12)))["event_number"] == "12"
            found = await successor.list_attributes(STREAM, FIRST_KEY, LAST_KEY, 100)
            assert made_by_entries(found.values) == folded(await read_stream(cluster))
            assert found.values[key_of(KEY)] == 78
            await send(successor, STREAM, W1, 13)

    run_virtual(main())


@pytest.mark.covers("E14", "E22", "E23", "E25", "E59")
@on_virtual_time
async def test_who_is_not_in_memory_waits_beside_the_queue_and_keeps_order():
    async with many_writers() as (owners, writers, faults):
        faults.outages.add("attributes.get")
        cold, warm = writers[0], writers[-1]
        late = [send(owners, STREAM, cold, number) for number in (2, 3)]
        late.append(send(owners, STREAM, cold, 3))
        prompt = [spans(await send(owners, STREAM, warm, number)) for number in (2, 3, 4)]
        assert not any(one.done() for one in late)
        faults.outages.clear()
        assert spans(await late[0]) > prompt[-1]
        assert spans(await late[1]) > spans(await late[0])
        assert (await failed(late[2]))["event_number"] == "3"
        (one,) = owners.statistics()
        assert one["attributes_cached"] + one["attributes_unflushed"] <= CACHED_MAX


@pytest.mark.covers("E26")
@on_virtual_time
async def test_many_changes_are_one_flush_and_a_failed_flush_holds_nobody_up():
    faults = no_faults()
    async with one_owner(faults=faults, checkpoint_updates=100) as (cluster, owners):
        for number in range(1, 100):
            await send(owners, STREAM, W1, number)
        assert cluster.index.flushes == 0
        faults.outages.add("attributes.flush")
        for number in range(100, 301):
            await send(owners, STREAM, W1, number)
        assert cluster.index.flushes == 0
        faults.outages.clear()
        await asyncio.sleep(10)
        assert cluster.index.flushes == 1
        (checkpoint,) = cluster.index.newest.values()
        assert checkpoint.through == Position(0, 299)
        assert checkpoint.core[EVENT_COUNT] == 300


def test_without_room_for_more_attributes_only_new_ones_wait():
    async def main():
        cluster = AttributeCluster(cached_max=3)
        await cluster.start()
        faults = no_faults()
        faults.outages.add("attributes.flush")
        owners = cluster.owners(faults=faults)
        async with running(owners, drain=False):
            writers = [KEY.__class__(int=(number + 1) << 100) for number in range(4)]
            for writer in writers[:3]:
                await send(owners, STREAM, writer, 1)
            with pytest.raises(RetryableError) as caught:
                await send(owners, STREAM, writers[3], 1)
            assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
            await send(owners, STREAM, writers[0], 2)

    run_virtual(main())


def test_new_attributes_do_not_wait_for_the_next_checkpoints_time():
    async def main():
        cluster = AttributeCluster(cached_max=3)
        await cluster.start()
        owners = cluster.owners()
        async with running(owners, drain=False):
            for number in range(10):
                await send(owners, STREAM, KEY.__class__(int=(number + 1) << 100), 1)
                await asyncio.sleep(0.1)

    run_virtual(main())


@pytest.mark.covers("E18", "E14")
def test_a_rebuild_adds_to_sums_that_memory_has_no_room_for():
    async def main():
        cluster = AttributeCluster(cached_max=2)
        await cluster.start()
        catalog = cluster.catalog()
        counters = [KEY.__class__(int=(number + 1) << 90) for number in range(6)]
        owners = cluster.owners()
        async with running(owners):
            for counter in counters:
                changes = (update(Verb.ACCUMULATE, 1, key=counter),)
                await owners.submit(STREAM, draft(entry(None, 0, events=0, updates=changes)))
                await owners.seal(STREAM)
                await asyncio.sleep(1)
        faults = no_faults()
        faults.outages.add("attributes.flush")
        cluster.settings = cluster.settings.model_copy(update={"cached_max": 100})
        owners = cluster.owners(faults=faults)
        async with running(owners, drain=False):
            for counter in counters:
                changes = (update(Verb.ACCUMULATE, 1, key=counter),)
                await owners.submit(STREAM, draft(entry(None, 0, events=0, updates=changes)))
        cluster.settings = cluster.settings.model_copy(update={"cached_max": 2})
        owners = cluster.owners(catalog=catalog)
        async with running(owners):
            keys = [key_of(counter) for counter in counters]
            found = await owners.get_attributes(STREAM, keys)
            assert found.values == dict.fromkeys(sorted(keys), 2)

    run_virtual(main())


def test_a_deposed_owner_tells_nobody_of_attributes():
    async def main():
        cluster = AttributeCluster(2)
        await cluster.start()
        catalog = cluster.catalog()
        owners = cluster.owners("n1", catalog=catalog)
        async with running(owners, drain=False):
            await send(owners, STREAM, W1, 1)
            stream = await catalog.streams.get(STREAM)
            await cluster.catalog().streams.claim(STREAM, "n2", over=stream)
            for ask in (
                send(owners, STREAM, W1, 1, last=0),
                owners.get_attributes(STREAM, [key_of(W1)]),
            ):
                with pytest.raises(RetryableError) as caught:
                    await ask
                assert caught.value.reason is Reason.NOT_OWNER

    run_virtual(main())


@on_virtual_time
async def test_a_drain_answers_those_who_fetch_and_those_who_failed():
    async with one_owner() as (_, owners):
        await send(owners, STREAM, W1, 1)
        sent = send(owners, STREAM, W1, 2)
        again = send(owners, STREAM, W1, 2, last=1)
        await owners.drain()
        await sent
        assert (await failed(again))["event_number"] == "2"
