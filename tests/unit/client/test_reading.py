"""A reader yields what lies between two positions, in order, once; and never what is damaged."""

import asyncio
import pickle
from dataclasses import replace

import pytest

from tests.unit.client.world import LOGS, Service, on_virtual_time
from tierlog.client.reading import PIECE_ENTRIES, ReadEntry, StreamReader, entries_of, events_of
from tierlog.format.entry import StructuredEvent, encode_entry
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import is_partitioned, partition_names
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import FramesAnswer

MIB = 1024 * 1024


def at(ledger_id, entry_id):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def entry(text):
    return encode_entry([text.encode()], publish_time_ms=5)


class Stream(Service):
    """Three ledgers of five, one and four entries."""

    def __init__(self):
        super().__init__()
        self.lay(
            [
                [entry(f"{ledger}:{number}") for number in range(count)]
                for ledger, count in enumerate((5, 1, 4))
            ]
        )
        self.refusals = []
        self.end = at(2, 4)

    async def bounds(self, stream):
        return at(0, 0), self.end

    async def read(self, stream, where, **budget):
        if self.refusals:
            raise self.refusals.pop(0)
        return await super().read(stream, where, **budget)


ALL = [at(0, n) for n in range(5)] + [at(1, 0)] + [at(2, n) for n in range(4)]


async def read(service, **named):
    reader = StreamReader(LOGS, service, **named)
    return [one.position async for one in reader.entries()]


@on_virtual_time
async def test_every_range_gives_what_lies_in_it():
    edges = [*ALL, at(0, 5), at(1, 1), at(2, 4)]
    for start in edges:
        for until in edges:
            wanted = [one for one in ALL if start <= one < until]
            assert await read(Stream(), start=start, until=until) == wanted, (start, until)


@on_virtual_time
async def test_without_an_end_it_is_the_stream_as_of_the_call():
    service = Stream()
    service.end = at(2, 2)
    assert await read(service) == ALL[:-2]


@on_virtual_time
async def test_a_position_in_a_stream_without_entries_is_refused():
    service = Stream()
    service.end = Edge.EARLIEST
    service.refusals = [
        RefusedError("no ledger 7", reason=Reason.LEDGER_NOT_FOUND, remedy="r"),
    ]
    with pytest.raises(RefusedError, match="no ledger 7"):
        await read(service, start=at(7, 0))
    assert await read(service) == []


@on_virtual_time
async def test_limits_count_entries():
    for limit in range(12):
        assert await read(Stream(), limit=limit) == ALL[:limit]


@on_virtual_time
async def test_a_follower_goes_on_where_it_was():
    service = Stream()
    reader = StreamReader(LOGS, service, follow=True, start=at(2, 3))
    found = []

    async def follow():
        async for one in reader.events():
            found.append(one.payload)
            if len(found) == 3:
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(follow())
        await asyncio.sleep(100)
        service.streams.store(LOGS, [entry("2:4")])
        service.lay([[entry("3:0")]])
    assert found == [b"2:3", b"2:4", b"3:0"]
    assert reader.resume == at(3, 1)


@on_virtual_time
async def test_what_may_pass_is_asked_again_and_the_rest_is_told_at_once():
    service = Stream()
    service.refusals = [RetryableError("away", remedy="r"), CorruptError("torn", remedy="r")]
    assert await read(service) == ALL
    service.refusals = [RetryableError("away", remedy="r") for _ in range(1000)]
    with pytest.raises(RetryableError) as caught:
        await read(service, retry_s_max=5.0)
    assert caught.value.reason is Reason.UNAVAILABLE
    service.refusals = [RetryableError("later", reason=Reason.NOT_YET, remedy="r")]
    with pytest.raises(RetryableError, match="later"):
        await read(service)


@on_virtual_time
async def test_a_damaged_entry_is_told_with_its_position_and_never_yielded():
    service = Stream()
    good = service.ledgers[0][2]
    service.ledgers[0][2] = good[:-1] + bytes([good[-1] ^ 1])
    reader = StreamReader(LOGS, service)
    events = reader.events()
    found = [(await anext(events)).payload for _ in range(2)]
    with pytest.raises(CorruptError) as caught:
        await anext(events)
    assert caught.value.details["position"] == "0:2"
    assert found == [b"0:0", b"0:1"]
    assert reader.resume == at(0, 2), "who goes on there does not pass over it"


class Miscounted(Stream):
    """Announces an entry too many from the second ledger on."""

    async def read(self, stream, where, **budget):
        answer = await super().read(stream, where, **budget)
        return replace(answer, count=answer.count + (answer.ledger_id > 0))


@on_virtual_time
async def test_who_goes_on_after_an_answer_that_was_refused_misses_none_of_it():
    reader = StreamReader(LOGS, Miscounted(), start=at(0, 4))
    with pytest.raises(CorruptError, match="announced"):
        assert [one.position async for one in reader.entries()]
    assert reader.resume == at(1, 0)


@on_virtual_time
async def test_wherever_somebody_stops_is_where_to_go_on():
    service = Service()
    service.lay([[entry(str(number)) for number in range(3 * PIECE_ENTRIES // 2)], [entry("last")]])
    reader, count = StreamReader(LOGS, service._reads), 0
    async for one in reader.entries():
        count += 1
        assert reader.resume == at(one.position.ledger_id, one.position.entry_id + 1)
    assert (count, reader.resume) == (3 * PIECE_ENTRIES // 2 + 1, at(1, 1))
    entries = reader.entries()
    for _ in range(PIECE_ENTRIES + 7):
        await anext(entries)
    await entries.aclose()
    assert reader.resume == at(0, PIECE_ENTRIES + 7)
    assert [reader._given.piece, reader._given.last] == [(), None], "nothing is held on to"


@on_virtual_time
async def test_an_iteration_that_is_closed_late_leaves_the_newer_one_alone():
    service = Service()
    service.lay([[entry(str(number)) for number in range(30)]])
    reader = StreamReader(LOGS, service._reads)
    older, newer = reader.entries(), reader.entries()
    for _ in range(7):
        await anext(older)
    for _ in range(2):
        await anext(newer)
    await older.aclose()
    for _ in range(3):
        await anext(newer)
    assert reader.resume == at(0, 5)
    await newer.aclose()
    assert reader.resume == at(0, 5)


@on_virtual_time
async def test_who_stops_amid_the_events_of_an_entry_is_given_it_again():
    service = Service()
    service.lay([[entry("before"), encode_entry([b"a", b"b", b"c"], publish_time_ms=5)]])
    reader, after = StreamReader(LOGS, service), {}
    async for one in reader.events():
        after[one.payload] = reader.resume
    assert after == {b"before": at(0, 1), b"a": at(0, 1), b"b": at(0, 1), b"c": at(0, 2)}
    events = reader.events()
    for _ in range(3):
        await anext(events)
    await events.aclose()
    assert reader.resume == at(0, 1)


@on_virtual_time
async def test_frames_that_are_not_what_was_announced_are_refused():
    answer = await Stream().read(LOGS, Edge.EARLIEST, bytes_max=1)
    short = FramesAnswer(
        resume=answer.resume,
        ledger_id=answer.ledger_id,
        first_entry_id=answer.first_entry_id,
        count=answer.count + 1,
        frames=answer.frames,
    )
    with pytest.raises(CorruptError):
        entries_of(short)


@on_virtual_time
async def test_events_keep_key_time_and_properties():
    service = Service()
    sent = StructuredEvent(payload=b"p", key=b"k", event_time_ms=7, properties={"a": "b"})
    service.lay([[encode_entry([sent, sent], publish_time_ms=5)]])
    (one,) = [one async for one in StreamReader(LOGS, service).entries()]
    first, second = events_of(one)
    assert (first.payload, first.key, first.event_time_ms) == (b"p", b"k", 7)
    assert (first.properties, first.publish_time_ms, second.batch_index) == ({"a": "b"}, 5, 1)


class Watched(Stream):
    """Tells which places were asked for; one of them is never answered."""

    def __init__(self, silent_at=None):
        super().__init__()
        self.asked = []
        self.silent_at = silent_at
        self.given_up = 0

    async def read(self, stream, where, **budget):
        self.asked.append(where)
        try:
            if where == self.silent_at:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return await super().read(stream, where, **budget)


@on_virtual_time
async def test_the_next_answer_is_asked_for_while_one_is_looked_at():
    service, asked = Watched(), {}
    async for one in StreamReader(LOGS, service).entries():
        asked[one.position] = service.asked.copy()
    assert list(asked) == ALL
    assert service.asked == [Edge.EARLIEST, at(0, 3), at(0, 5), at(1, 1), at(2, 3)], "none twice"
    assert asked[at(0, 2)] == [Edge.EARLIEST], "whoever wants one answer gets no more"
    assert asked[at(0, 3)] == [Edge.EARLIEST, at(0, 3), at(0, 5)]
    assert asked[at(2, 3)] == service.asked, "nothing behind the end"


@on_virtual_time
async def test_what_fails_ahead_of_who_reads_is_asked_for_again():
    service, found = Watched(), []
    async for one in StreamReader(LOGS, service).entries():
        found.append(one.position)
        if one.position == at(0, 3):
            service.refusals = [RefusedError("no", reason=Reason.LEDGER_NOT_FOUND, remedy="r")]
    assert found == ALL
    assert service.refusals == []
    assert service.asked.count(at(1, 1)) == 2


@on_virtual_time
async def test_whoever_stops_reading_leaves_nothing_asked_for():
    tasks = len(asyncio.all_tasks())
    service = Watched(silent_at=at(0, 5))
    entries = StreamReader(LOGS, service).entries()
    assert [(await anext(entries)).position for _ in range(4)] == ALL[:4]
    assert service.asked[-1] == at(0, 5)
    await entries.aclose()
    assert service.given_up == 1
    assert len(asyncio.all_tasks()) == tasks


@on_virtual_time
async def test_who_follows_asks_when_it_wants_more():
    service = Watched()
    reader = StreamReader(LOGS, service, follow=True, limit=9)
    async for one in reader.entries():
        if one.position == at(0, 3):
            assert service.asked[-1] == at(0, 3)
    assert reader.resume == at(2, 3)


@pytest.mark.parametrize("end", [at(2, 4), Edge.EARLIEST])
def test_latest_is_decided_once_whatever_fails_before_the_first_answer(end):
    class Moving(Stream):
        """Goes on while the first answer fails."""

        async def read(self, stream, where, **budget):
            asked.append(where)
            if where is Edge.LATEST:
                assert budget["wait_s"] == 0, "it is known at once"
                return FramesAnswer(resume=self.end)
            if len(asked) == 2:
                self.end = at(9, 9)
                raise RetryableError("no room", reason=Reason.RESOURCE_EXHAUSTED, remedy="again")
            return await super().read(stream, where if where != at(2, 4) else at(2, 3), **budget)

    asked: list[Position | Edge] = []

    @on_virtual_time
    async def test():
        service = Moving()
        service.end = end
        reader = StreamReader(LOGS, service, start=Edge.LATEST, follow=True, limit=1)
        assert reader.resume is Edge.LATEST
        (first,) = [one.position async for one in reader.entries()]
        assert asked == [Edge.LATEST, end, end]
        assert first == (at(2, 3) if end == at(2, 4) else at(0, 0))

    test()


def test_events_can_be_handed_to_another_process_and_changed_by_nobody():
    named = StructuredEvent(payload=b"one", properties={"a": "b"})
    structured = encode_entry([named], publish_time_ms=7)
    for data, raw in ((b"just bytes", True), (structured, False)):
        read = ReadEntry(LedgerId(3), EntryId(4), memoryview(data), "tier2", raw)
        (event,) = events_of(read)
        assert pickle.loads(pickle.dumps(event)) == event
        assert event.position == Position(LedgerId(3), EntryId(4))
        with pytest.raises(AttributeError):
            event.payload = b""  # type: ignore[misc]


class Parted(Service):
    """A stream of so many partitions, and how much was asked for of each."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.names = partition_names(LOGS, count)
        self.asked: dict[StreamName, int] = {}

    async def bounds(self, stream):
        raise is_partitioned(LOGS, self.count) if stream == LOGS else AssertionError

    async def read(self, stream, where, *, bytes_max, **budget):
        if stream == LOGS:
            raise is_partitioned(LOGS, self.count)
        self.asked[stream] = bytes_max
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("count", "each"), [(2, 4 * MIB), (100, 64 * MIB // 100), (1024, MIB // 16)]
)
def test_partitions_that_are_followed_share_what_is_asked_for_at_once(count, each):
    @on_virtual_time
    async def test():
        service = Parted(count)
        answers = StreamReader(LOGS, service, follow=True).answers()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await anext(answers)
        assert service.asked == dict.fromkeys(service.names, each)

    test()
