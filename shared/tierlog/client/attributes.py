"""A stream's attributes: read by key, listed, and updated without an append of events.

An attribute has a key of 16 bytes, written as a UUID, and a signed value of 64 bits. Updates of one
call are made all or none, each by its verb, as an entry without events in the order of the stream.

Owns nothing but the calls. Core attributes can be read like others, and are not set by clients.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from tierlog.client.batches import updates_alone
from tierlog.client.owners import BACKOFF_S_FIRST, BACKOFF_S_MAX, OwnerConnections, append_alone
from tierlog.format.entry import AttributeUpdate
from tierlog.model.attributes import AppendCondition, AttributeKey, is_core
from tierlog.model.core_attributes import name_of
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.position import Edge, Position
from tierlog.ports.clock import Clock
from tierlog.ports.streams import ATTRIBUTES_MAX, FIRST_KEY, LAST_KEY, StreamControl

Result = TypeVar("Result")

FIRST: Final = UUID(bytes=bytes(FIRST_KEY))
LAST: Final = UUID(bytes=bytes(LAST_KEY))


class StreamAttributes:
    """The attributes of one stream."""

    def __init__(
        self,
        stream: StreamName,
        *,
        control: StreamControl,
        owners: OwnerConnections,
        clock: Clock,
        append_s_max: float,
        retry_s_max: float,
    ) -> None:
        self.stream = stream
        self._control = control
        self._owners = owners
        self._clock = clock
        self._append_s_max = append_s_max
        self._retry_s_max = retry_s_max

    def __repr__(self) -> str:
        return f"<StreamAttributes {self.stream}>"

    async def get(self, keys: Sequence[UUID]) -> Mapping[UUID, int]:
        """Return the values of those of the keys that are there, as of the last confirmed entry."""
        found: dict[UUID, int] = {}
        for begin in range(0, len(keys), ATTRIBUTES_MAX):
            some = [AttributeKey(one.bytes) for one in keys[begin : begin + ATTRIBUTES_MAX]]
            answer = await self._patiently(partial(self._control.get_attributes, self.stream, some))
            found |= {UUID(bytes=bytes(key)): value for key, value in answer.values.items()}
        return found

    async def list(
        self, first: UUID = FIRST, last: UUID = LAST
    ) -> AsyncGenerator[tuple[UUID, int], None]:
        """Iterate over keys and values between two keys, both included, ascending.

        Each ``ATTRIBUTES_MAX`` of them are of one moment.
        """
        where = first
        while where <= last:
            answer = await self._patiently(
                partial(
                    self._control.list_attributes,
                    self.stream,
                    first=AttributeKey(where.bytes),
                    last=AttributeKey(last.bytes),
                    limit=ATTRIBUTES_MAX,
                )
            )
            for key, value in answer.values.items():
                where = UUID(bytes=bytes(key))
                yield where, value
            if len(answer.values) < ATTRIBUTES_MAX or where == LAST:
                return
            where = UUID(int=where.int + 1)

    async def update(
        self, updates: Sequence[AttributeUpdate], *, after: Position | Edge | None = None
    ) -> Position:
        """Make all updates, or none; return the position of the entry that carries them.

        CONDITIONAL_APPEND_FAILED tells by ``key`` and ``value`` which attribute is otherwise, or
        by ``last_position`` where the stream's last entry is. An answer that was lost is told.
        """
        if not updates:
            raise RefusedError("no updates", remedy="Give at least one")
        for one in updates:
            check_settable(one.key)
        # In a raw stream the entry would be an event; a stream that is none yet is made.
        await self._patiently(
            partial(self._control.create_stream, self.stream, raw=False, policy=None, exist_ok=True)
        )
        places = await append_alone(
            self._owners,
            self.stream,
            updates_alone(updates, now_ms=self._clock.wall_ms()),
            condition=AppendCondition(after=after) if after is not None else None,
            append_s_max=self._append_s_max,
            retry_s_max=self._retry_s_max,
        )
        return Position(places[-1].ledger_id, places[-1].last_entry_id)

    async def _patiently(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        loop = asyncio.get_running_loop()
        deadline_s, backoff_s = loop.time() + self._retry_s_max, BACKOFF_S_FIRST
        while True:
            try:
                return await ask()
            except RetryableError:
                if loop.time() + backoff_s >= deadline_s:
                    raise
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)


def check_settable(key: UUID) -> None:
    """Refuse the id of a core attribute."""
    if is_core(key.bytes):
        raise RefusedError(
            f"{name_of(AttributeKey(key.bytes))} is a core attribute, which only Tierlog sets",
            remedy="Set an attribute whose first eight bytes are not all zero; limits of ledgers "
            "are set by tierlog policy set",
        )
