"""Attributes and single appends under a condition, as an application has them."""

from uuid import UUID

import pytest

from tests.unit.client.test_partitioned import opened, payloads
from tests.unit.client.world import LOGS, Service, _Owners, on_virtual_time, writer_of
from tierlog.adapters.memory.clock import SimClock
from tierlog.client import Acked, AttributeUpdate, Edge, StreamAttributes, Verb
from tierlog.client.attributes import FIRST
from tierlog.client.single import append_events
from tierlog.format.attribute_changes import Failed, failed_check
from tierlog.model.attributes import EVENT_COUNT, AppendCondition, AttributeKey
from tierlog.model.core_attributes import CORE_NAMES
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position

ONE, OTHER = UUID(int=1 << 100), UUID(int=2 << 100)
COUNT = UUID(bytes=bytes(EVENT_COUNT))


def put(key, value, verb=Verb.REPLACE, expected=0):
    return AttributeUpdate(key=key, verb=verb, value=value, expected=expected)


@pytest.mark.covers("E09", "E12")
@on_virtual_time
async def test_attributes_are_updated_alone_or_with_an_append_all_or_none():
    on = opened()
    attributes = on.client.attributes("logs")
    await attributes.update([put(ONE, 7), put(OTHER, -(2**63))])
    assert await attributes.get([OTHER, ONE, COUNT]) == {ONE: 7, OTHER: -(2**63), COUNT: 0}
    await on.client.append("logs", [b"a", b"b"], updates=[put(ONE, 1, Verb.ACCUMULATE)])
    with pytest.raises(RefusedError) as caught:
        await on.client.append(
            "logs", [b"c"], updates=[put(OTHER, 0), put(ONE, 9, Verb.REPLACE_IF_EQUALS, 7)]
        )
    assert caught.value.reason is Reason.CONDITIONAL_APPEND_FAILED
    assert (caught.value.details["key"], caught.value.details["value"]) == (str(ONE), "8")
    assert await attributes.get([ONE, OTHER, COUNT]) == {ONE: 8, OTHER: -(2**63), COUNT: 2}
    assert [one.payload for one in await payloads(on.client, "logs")] == [b"a", b"b"]


@on_virtual_time
async def test_an_entry_without_events_is_passed_over_by_readers():
    on = opened()
    attributes = on.client.attributes("logs")
    for number in range(3):
        await attributes.update([put(ONE, number)])
        await on.client.append("logs", [b"%d" % number])
    assert [one.payload for one in await payloads(on.client, "logs")] == [b"0", b"1", b"2"]
    assert len([one async for one in on.client.reader("logs").entries()]) == 6


@on_virtual_time
async def test_many_attributes_are_listed_in_several_answers():
    on = opened()
    attributes = on.client.attributes("logs")
    keys = [UUID(int=(number + 1) << 64) for number in range(2500)]
    await attributes.update([put(key, number) for number, key in enumerate(keys)])
    found = [one async for one in attributes.list()]
    core = [UUID(bytes=key) for key in sorted(CORE_NAMES)]
    assert [key for key, _ in found] == [*core, *keys]
    assert found[0] == (COUNT, 0)
    assert found[len(core) :] == [(key, number) for number, key in enumerate(keys)]
    found = [key async for key, _ in attributes.list(keys[700], keys[1900])]
    assert found == keys[700:1901]
    assert [one async for one in attributes.list(FIRST, FIRST)] == []
    assert len(await attributes.get(keys)) == 2500


@on_virtual_time
async def test_core_attributes_and_raw_streams_are_refused():
    on = opened()
    await on.client.create_stream("raw", raw=True)
    for key, name in CORE_NAMES.items():
        with pytest.raises(RefusedError, match=f"{name} is a core attribute"):
            await on.client.attributes("logs").update([put(UUID(bytes=key), 7)])
    for call in (
        on.client.attributes("raw").update([put(ONE, 1)]),
        on.client.attributes("raw").get([COUNT]),
        on.client.append("raw", [b"x"], after=Edge.EARLIEST),
        on.client.attributes("logs").update([]),
    ):
        with pytest.raises(RefusedError):
            await call
    assert on.streams.stream("raw").ledgers == []


@on_virtual_time
async def test_updates_and_appends_may_want_the_last_entry_to_be_a_certain_one():
    on = opened()
    place = await on.client.append("logs", [b"a"], after=Edge.EARLIEST)
    assert place == Position(LedgerId(0), EntryId(0))
    for call in (
        on.client.append("logs", [b"b"], after=Edge.EARLIEST),
        on.client.attributes("logs").update([put(ONE, 1)], after=Edge.EARLIEST),
    ):
        with pytest.raises(RefusedError) as caught:
            await call
        assert caught.value.details == {"last_position": "0:0"}
    place = await on.client.attributes("logs").update([put(ONE, 1)], after=place)
    assert place == Position(LedgerId(0), EntryId(1))
    assert await on.client.append("logs", [b"b"], after=place) is not None


async def one_append(service, *, last_event_number, after=None):
    return await append_events(
        LOGS,
        [b"a", b"b"],
        owners=_Owners(service),
        clock=SimClock(),
        writer_id=ONE if last_event_number is not None else None,
        condition=AppendCondition(last_event_number=last_event_number, after=after),
        updates=(),
        append_s_max=10.0,
        retry_s_max=60.0,
    )


@pytest.mark.covers("E03")
@pytest.mark.parametrize("fate", ["lost-landed", "lost-gone", "refused"])
def test_a_single_append_behind_a_number_goes_again_whatever_becomes_of_its_answer(fate):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = [fate]
        place = await one_append(service, last_event_number=0)
        assert (place is None) == (fate == "lost-landed")
        assert service.events() == [b"a", b"b"]

    test()


@on_virtual_time
async def test_a_single_append_behind_a_position_is_told_when_its_answer_is_lost():
    """What would be in its way the next time may be itself."""
    service = Service()
    service.script = ["refused", "lost-landed"]
    with pytest.raises(IndeterminateError):
        await one_append(service, last_event_number=None, after=Edge.EARLIEST)
    assert service.events() == [b"a", b"b"]


@pytest.mark.parametrize("script", [[], ["refused"]])
def test_the_number_of_somebody_else_acknowledges_no_single_append(script):
    """Only behind a lost answer can it be one's own."""

    @on_virtual_time
    async def test():
        service = Service()
        await one_append(service, last_event_number=0)
        service.script = list(script)
        with pytest.raises(RefusedError, match="another, or an earlier call") as caught:
            await one_append(service, last_event_number=0)
        assert caught.value.reason is Reason.CONDITIONAL_APPEND_FAILED
        assert caught.value.details["event_number"] == "2"
        assert service.events() == [b"a", b"b"]

    test()


@pytest.mark.parametrize("then", ["away", "denied", "the writer is ahead"])
def test_behind_a_lost_answer_only_the_number_tells_that_nothing_was_appended(then):
    """What ends the tries otherwise leaves the doubt: the first one may have landed."""

    @on_virtual_time
    async def test():
        service = Service()
        service.script = ["lost-landed"]
        if then == "away":
            service.script += ["refused"] * 1000
        elif then == "denied":
            denied = Reason.PERMISSION_DENIED
            service.script.append(RefusedError("not any more", reason=denied, remedy="Ask"))
        else:
            key = AttributeKey(ONE.bytes)
            service.script.append(failed_check(Failed(key, 5, "not 0"), writer=key))
        with pytest.raises(IndeterminateError):
            await one_append(service, last_event_number=0)
        assert service.events()[:2] == [b"a", b"b"]

    test()


@on_virtual_time
async def test_a_single_append_behind_another_number_is_refused():
    service = Service()
    await one_append(service, last_event_number=0)
    for wrong in (1, 7):
        with pytest.raises(RefusedError) as caught:
            await one_append(service, last_event_number=wrong)
        assert caught.value.details["event_number"] == "2"
    with pytest.raises(RefusedError):
        await append_events(
            LOGS,
            [b"x"],
            owners=_Owners(service),
            clock=SimClock(),
            writer_id=ONE,
            condition=AppendCondition(),
            updates=(),
            append_s_max=10.0,
            retry_s_max=60.0,
        )


@on_virtual_time
async def test_attributes_of_an_owner_that_stays_away_are_not_waited_for_for_ever():
    service = Service()
    service.up = False
    attributes = StreamAttributes(
        LOGS,
        control=service,
        owners=_Owners(service),
        clock=SimClock(),
        append_s_max=10.0,
        retry_s_max=5.0,
    )
    with pytest.raises(RetryableError):
        await attributes.get([ONE])


@on_virtual_time
async def test_a_writer_tells_of_each_batch_that_is_there():
    service, told = Service(), list[Acked]()
    service.script = ["ok", "lost-landed", "silent"]
    async with writer_of(service, batch_bytes=10, on_acked=told.append) as writer:
        for number in range(4):
            await writer.send(b"event%d" % number)
    assert [(one.event_number, one.count) for one in told] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert told[1] == Acked(stream=LOGS, event_number=2, count=1, position=None)
    assert told[0].position == Position(LedgerId(0), EntryId(0))
