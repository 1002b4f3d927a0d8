"""Which numbers of writers an owner lets in, and the order of appends that are several writers'.

Must hold: a number never goes back that the owner has in memory; appends that share a writer go in
the order in which they came, whatever some of them wait for.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import STREAM, draft
from tests.unit.streams.attribute_world import (
    W1,
    W2,
    after,
    entry,
    many_writers,
    one_owner,
    send,
    update,
)
from tests.unit.streams.test_owner_attributes import failed, number_of
from tests.unit.streams.test_owners import spans
from tierlog.format.entry import Verb
from tierlog.model.errors import Reason, RefusedError
from tierlog_ingest.streams.attributes.gate import AttributeGate


def plain(owners, *entries):
    """Submit an append that depends on nothing."""
    return owners.submit(STREAM, draft(*entries))


@pytest.mark.covers("E13")
@on_virtual_time
async def test_an_entry_does_not_update_the_number_of_its_own_writer():
    async with one_owner() as (_, owners):
        await send(owners, STREAM, W1, 5, events=5)
        for own in (
            update(Verb.REPLACE_IF_EQUALS, 1, key=W1, expected=5),
            update(Verb.REPLACE, 1, key=W1),
            update(Verb.ACCUMULATE, 1, key=W1),
        ):
            one = draft(entry(W1, 8, events=3, updates=(own,)))
            for condition in (after(5), None):
                with pytest.raises(RefusedError) as caught:
                    await owners.submit(STREAM, one, condition=condition)
                assert caught.value.reason is Reason.INVALID_ARGUMENT
            # That of another one is an attribute like all.
            await plain(owners, entry(None, 0, updates=(own,)))
            await plain(owners, entry(None, 0, updates=(update(Verb.REPLACE, 5, key=W1),)))
        await send(owners, STREAM, W1, 8, events=3, updates=(update(Verb.REPLACE, 1, key=W2),))
        assert [await number_of(owners, one) for one in (W1, W2)] == [8, 1]


@pytest.mark.covers("E13")
@pytest.mark.parametrize("number", [0, -1, -7])
@on_virtual_time
async def test_numbers_begin_with_1(number):
    async with one_owner() as (_, owners):
        for ask in (
            plain(owners, entry(None, 0), entry(W1, number)),
            send(owners, STREAM, W1, number, last=number - 1),
        ):
            with pytest.raises(RefusedError) as caught:
                await ask
            assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert await number_of(owners, W1) is None


@on_virtual_time
async def test_a_plain_append_does_not_set_a_number_back():
    async with one_owner() as (_, owners):
        # The answer to 7 to 10 is lost, and a plain append of 7 comes between.
        sent = [send(owners, STREAM, W1, number, events=3) for number in (3, 6)]
        sent.append(send(owners, STREAM, W1, 10, events=4))
        late = [plain(owners, entry(W2, 1), entry(W1, number)) for number in (7, 10)]
        again = send(owners, STREAM, W1, 10, events=4)
        for one in (*late, again):
            assert (await failed(one))["event_number"] == "10"
        assert (await failed(plain(owners, entry(W2, 9), entry(W2, 8))))["event_number"] == "9"
        for one in sent:
            await one
        await plain(owners, entry(W2, 1), entry(W1, 12), entry(W2, 2))
        assert [await number_of(owners, one) for one in (W1, W2)] == [12, 2]


@pytest.mark.covers("E14", "E25")
@on_virtual_time
async def test_an_append_of_several_writers_is_in_the_order_of_each():
    async with many_writers() as (owners, writers, faults):
        faults.outages.add("attributes.get")
        cold, colder, warm, other = writers[0], writers[1], writers[-1], writers[-2]
        late = [
            send(owners, STREAM, cold, 2),
            send(owners, STREAM, colder, 2),
            plain(owners, entry(warm, 2), entry(cold, 3)),
            send(owners, STREAM, warm, 3),
            plain(owners, entry(warm, 4), entry(colder, 3)),
            send(owners, STREAM, colder, 4),
            send(owners, STREAM, cold, 4),
            send(owners, STREAM, warm, 5),
        ]
        await send(owners, STREAM, other, 2)
        assert not any(one.done() for one in late)
        faults.outages.clear()
        places = [spans(await one) for one in late]
        # Only those that share no writer may change places.
        assert sorted(places[2:]) == places[2:]
        assert places[0] < places[2]
        assert places[1] < places[4]


@pytest.mark.covers("E08")
@on_virtual_time
async def test_updates_that_wait_for_one_value_go_in_the_order_in_which_they_came():
    async with many_writers() as (owners, writers, _):
        key = writers[0]
        sent = [
            plain(owners, entry(None, 0, updates=(step,)))
            for step in (
                update(Verb.REPLACE_IF_EQUALS, 7, key=key, expected=1),
                update(Verb.REPLACE_IF_EQUALS, 8, key=key, expected=7),
                update(Verb.REPLACE_IF_EQUALS, 9, key=key, expected=8),
            )
        ]
        for one in sent:
            await one
        assert await number_of(owners, key) == 9


@on_virtual_time
async def test_many_that_wait_are_not_looked_through_for_each_of_them(monkeypatch):
    looks, wanted = [], AttributeGate.wanted

    def counted(gate, count_max):
        looks.append(count_max)
        return wanted(gate, count_max)

    monkeypatch.setattr(AttributeGate, "wanted", counted)
    async with many_writers() as (owners, writers, _):
        del looks[:]
        for one in [send(owners, STREAM, writer, 2) for writer in writers[:15]]:
            await one
        assert len(looks) < 10
