"""Writers whose appends are conditional on their last number, and what must come of it.

A client of a kind that shares no code with the library's: it sends a burst of numbered events
without waiting, then goes by the answers; whatever it does not know, it sends again.

Rule k: each writer's events are in the stream once, in order, without a gap, all that it was told
are there included; no number that it is told goes back; the attributes are what the entries say.
"""

import asyncio
from collections.abc import Callable, Sequence
from uuid import UUID

from tests.simulation.model import Position
from tests.simulation.services import Producer, Servers
from tierlog.format.attribute_changes import change_in_stream, replayed
from tierlog.format.entry import AttributeUpdate, Verb, decode_entry, encode_entry
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.model.attributes import EVENT_COUNT, AppendCondition, AttributeKey
from tierlog.model.errors import IndeterminateError, Reason, TierlogError
from tierlog.model.ids import StreamName
from tierlog.wire.connection import WireClient

ONCE_STREAM = StreamName("sim.once")
TOTAL = UUID(int=99 << 80)
"""An attribute that every event adds one to."""
BURST_MAX = 6


class OnceModel:
    """What writers were told."""

    def __init__(self, complain: Callable[[str, str], None]) -> None:
        self.acked: dict[UUID, int] = {}
        """The highest number of each writer that is known to be there."""
        self.sent: dict[UUID, int] = {}
        self.repeats = 0
        """Events that were found to be there when they were sent again."""
        self._complain = complain

    def __repr__(self) -> str:
        return f"<OnceModel {sum(self.acked.values())} events, {self.repeats} repeats>"

    def complain(self, text: str) -> None:
        """Note that rule k is broken."""
        self._complain("k", text)

    def told(self, writer: UUID, number: int) -> None:
        """Note that a number is there."""
        if number < self.acked.get(writer, 0):
            self.complain(f"the number of {writer} went back to {number} of {self.acked[writer]}")
        elif number > self.sent.get(writer, 0):
            self.complain(f"{writer} was told of {number}, which it never sent")
        else:
            self.acked[writer] = number

    def check(self, entries: Sequence[bytes]) -> dict[AttributeKey, int]:
        """Check what is in the stream; return the attributes that it makes."""
        last: dict[UUID, int] = {}
        made: dict[AttributeKey, int] = {EVENT_COUNT: 0}
        for entry in entries:
            header = decode_entry(entry).header
            assert header.writer_id is not None
            expected = last.get(header.writer_id, 0) + 1
            if header.event_number != expected:
                self.complain(
                    f"{header.writer_id} has {header.event_number} where {expected} belongs"
                )
            last[header.writer_id] = max(header.event_number, expected - 1)
            change = change_in_stream(entry)
            assert change is not None
            made[EVENT_COUNT] += change.event_count
            made |= replayed(change, made.get)
        for writer, number in sorted(self.acked.items()):
            if last.get(writer, 0) < number:
                self.complain(f"{writer} was told of {number}, there is {last.get(writer, 0)}")
        return made


class OnceWriter(Producer):
    """One writer."""

    def __init__(self, name: str, servers: Servers, *, model: OnceModel, rest_s_max: float) -> None:
        super().__init__(name, servers, rest_s_max=rest_s_max)
        self.model = model
        self.writer = UUID(int=servers.rng(f"{name}/writer").getrandbits(127) | 1 << 127)

    def entry(self, number: int) -> bytes:
        """Return an event, the same every time."""
        return encode_entry(
            [f"{self.name}/{number}".encode()],
            publish_time_ms=number,
            writer_id=self.writer,
            event_number=number,
            attribute_updates=[AttributeUpdate(key=TOTAL, verb=Verb.ACCUMULATE, value=1)],
        )

    async def _use(self, client: WireClient, tasks: asyncio.TaskGroup) -> None:
        going = True
        while going and not client.closed and not self.enough.is_set():
            first = self.model.acked.get(self.writer, 0) + 1
            numbers = range(first, first + self.rng.randint(1, BURST_MAX))
            flying = [tasks.create_task(self._send(client, number)) for number in numbers]
            answers = [await task for task in flying]
            learnt = [self._learn(*one) for one in zip(numbers, answers, strict=True)]
            going = all(learnt)
            await asyncio.sleep(self.rest_s_max * self.rng.uniform(0, 1) ** 2)
        await client.close()

    async def _send(self, client: WireClient, number: int) -> Position | TierlogError:
        frames, offsets = pack_entries([self.entry(number)])
        sent = self.model.sent
        sent[self.writer] = max(number, sent.get(self.writer, 0))
        try:
            (place,) = await client.append(
                ONCE_STREAM,
                build_run(frames, offsets),
                deadline_s=15.0,
                condition=AppendCondition(last_event_number=number - 1),
            )
        except TierlogError as error:
            return error
        return int(place.ledger_id), int(place.first_entry_id)

    def _learn(self, number: int, answer: Position | TierlogError) -> bool:
        """Go by an answer; False: look for another connection."""
        acked = self.model.acked.get(self.writer, 0)
        if not isinstance(answer, TierlogError):
            self.trace.note("once.acknowledged", writer=self.name, number=number, place=answer)
            # Those before it are there, too: that was its condition.
            self.model.told(self.writer, max(acked, number))
            return True
        if answer.reason is Reason.CONDITIONAL_APPEND_FAILED:
            there = int(answer.details["event_number"])
            self.trace.note("once.failed", writer=self.name, number=number, there=there)
            if there == number - 1:
                self.model.complain(f"{self.name}: {number} failed, though {there} is there")
            if there >= number:
                self.model.repeats += 1
            if there < acked and number <= acked:
                # One before it in the burst was told of a later number.
                return True
            self.model.told(self.writer, there)
            return True
        self._advised = answer.details.get("wire_address")
        self.trace.note("once.untold", writer=self.name, number=number, why=answer.reason.value)
        resting = answer.reason is Reason.RESOURCE_EXHAUSTED
        return resting and not isinstance(answer, IndeterminateError)
