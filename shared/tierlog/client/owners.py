"""The owner of a stream: found, connected to, and sent one append at a time.

Owns finding and connecting, and appends that stand alone. Does not own a writer's pipeline.

Retries: what certainly is not there goes again for ``retry_s_max``. An append whose answer was
lost goes again where its condition makes that harmless, and is told as indeterminate elsewhere.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from tierlog.format.run import Run
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
    first_error,
)
from tierlog.model.ids import StreamName
from tierlog.model.position import AppendedRange
from tierlog.ports.streams import AppendChannel, OwnerInfo, StreamControl

log = structlog.get_logger()

BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 0.5


class OwnerConnections(Protocol):
    """Finds the owner of a stream and connects to it."""

    async def connect(self, stream: StreamName, tasks: asyncio.TaskGroup) -> AppendChannel:
        """Return a channel to whoever owns ``stream`` now."""
        ...

    async def moved(self, stream: StreamName) -> bool:
        """Tell whether ``stream`` has another owner than the one last connected to."""
        ...


class ConnectOwner(Protocol):
    """Connects to an owner, with its reader as one of ``tasks``."""

    async def __call__(self, owner: OwnerInfo, tasks: asyncio.TaskGroup, /) -> AppendChannel: ...


class Owners:
    """``OwnerConnections`` over a cluster's ingest nodes, for one stream."""

    def __init__(self, control: StreamControl, connect_owner: ConnectOwner) -> None:
        self._control = control
        self._connect_owner = connect_owner
        self._epoch = -1

    async def connect(self, stream: StreamName, tasks: asyncio.TaskGroup) -> AppendChannel:
        owner = await self._control.find_owner(stream)
        channel = await self._connect_owner(owner, tasks)
        self._epoch = owner.owner_epoch
        return channel

    async def moved(self, stream: StreamName) -> bool:
        return (await self._control.find_owner(stream)).owner_epoch > self._epoch


async def append_alone(
    owners: OwnerConnections,
    stream: StreamName,
    draft: Run,
    *,
    condition: AppendCondition | None,
    append_s_max: float,
    retry_s_max: float,
    on_doubt: Callable[[], None] | None = None,
) -> list[AppendedRange]:
    """Append one draft over a connection of its own; return where it went.

    With ``on_doubt``, which is told, it goes again after an indeterminate answer, too.
    """
    loop = asyncio.get_running_loop()
    deadline_s, backoff_s = loop.time() + retry_s_max, BACKOFF_S_FIRST
    while True:
        try:
            return await _append_once(owners, stream, draft, condition, append_s_max)
        except TierlogError as error:
            again = isinstance(error, RetryableError) or (
                isinstance(error, RefusedError) and error.reason is Reason.FENCED
            )
            if isinstance(error, IndeterminateError) and on_doubt is not None:
                on_doubt()
                again = True
            if not again or loop.time() + backoff_s >= deadline_s:
                raise
            log.info("append.again", stream=stream, cause=str(error))
        await asyncio.sleep(backoff_s)
        backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)


async def _append_once(
    owners: OwnerConnections,
    stream: StreamName,
    draft: Run,
    condition: AppendCondition | None,
    append_s_max: float,
) -> list[AppendedRange]:
    try:
        async with asyncio.TaskGroup() as tasks:
            channel = await owners.connect(stream, tasks)
            try:
                return await channel.append(
                    stream, draft, deadline_s=append_s_max, condition=condition
                )
            finally:
                await channel.close()
    except BaseExceptionGroup as group:
        known, unknown = group.split(TierlogError)
        if known is None or unknown is not None:
            raise
        raise first_error(known) from group
