"""A client whose answers get lost now and then: the append is there, and nobody says so."""

import contextlib
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any, Final

from tierlog.client import Client
from tierlog.client.endpoints import find_endpoints
from tierlog.model.errors import IndeterminateError
from tierlog.runtime.settings import Settings
from tierlog.wiring.client import ClientConnections, open_client_connections

LOST: Final = 0.1
"""Of so many appends the answer is lost."""


class Losing:
    """A connection to an owner that loses answers once the append is there."""

    def __init__(self, channel: Any, rng: random.Random, lost: float) -> None:
        self._channel, self._rng, self._lost = channel, rng, lost

    async def append(self, *asked: Any, **more: Any) -> Any:
        """Append; the answer may be lost."""
        lost = self._rng.random() < self._lost
        ranges = await self._channel.append(*asked, **more)
        if lost:
            raise IndeterminateError("the answer was lost", remedy="Send it again")
        return ranges

    async def close(self, *, drain_s_max: float = 5.0) -> None:
        """Hang up."""
        await self._channel.close(drain_s_max=drain_s_max)


@dataclass(frozen=True, slots=True)
class LosingConnections(ClientConnections):
    """The connections of such a client."""

    rng: random.Random
    lost: float

    async def connect_owner(self, owner: Any, tasks: Any) -> Any:
        """Connect to an owner."""
        channel = await ClientConnections.connect_owner(self, owner, tasks)
        return Losing(channel, self.rng, self.lost)


@contextlib.asynccontextmanager
async def open_losing_client(
    settings: Settings, *, rng: random.Random | None = None, lost: float = LOST
) -> AsyncIterator[Client]:
    """Give such a client; without ``rng``, each process loses other answers."""
    found = find_endpoints(settings.client, settings.state_dir)
    async with open_client_connections(
        settings,
        ingest_grpc=found.ingest_grpc,
        reader_http=found.reader_http,
        scheduler_http=found.scheduler_http,
    ) as connections:
        known = {one.name: getattr(connections, one.name) for one in fields(connections)}
        rng = rng or random.Random(os.getpid())
        yield Client(LosingConnections(**known, rng=rng, lost=lost))
