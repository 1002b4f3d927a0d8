"""One history: clients that append and read while things go wrong, then all of it read back.

Owns what clients do and how a history ends: writers stop, everything is mended, the stream is
sealed, its end is asked (the final bounds), and everything is read once more, so that the judge
knows of each append without an answer whether it is there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from tests.histories.nemeses import FAULTS, Plague, infest
from tests.histories.recorder import History, RecordedClient
from tierlog.client import Client, Edge, Position, StreamWriter, open_client
from tierlog.model.errors import TierlogError
from tierlog.model.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.histories.cluster import HistoryCluster

STREAM: Final = "history.test"
BACKOFF_S: Final = 0.2
END_S_MAX: Final = 90.0
SESSION_APPENDS_MAX: Final = 60
LEDGER_ENTRIES: Final = (30, 200, 100_000)
"""Small, so that a history has many ledgers; or large, so that an owner that others hold for gone
needs nothing but its storage nodes to go on."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much happens in a history, and what goes wrong."""

    seconds: float = 20.0
    writers: int = 5
    readers: int = 2
    faults: tuple[str, ...] = tuple(FAULTS)
    rounds: int = 0
    """Each fault comes so often at least, however long it takes."""
    at_once: int = 1
    """How many faults there may be side by side, on different nodes."""
    size_max: int = 2000


@dataclass
class Life:
    """One running history."""

    cluster: HistoryCluster
    history: History
    client: Client
    plan: Plan
    rng: random.Random
    raw: bool
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def recorded(self, number: int) -> RecordedClient:
        """Return a numbered client."""
        return RecordedClient(self.client, self.history, stream=STREAM, number=number)

    async def written(self, number: int) -> None:
        """Append with connections of one's own: each writer believes what it was told itself."""
        async with open_client(self.cluster.settings) as client:
            await replace(self, client=client).write(number)

    async def write(self, number: int) -> None:
        """Append until told to stop, a while with each writer: a new one may find a new owner."""
        recorded, rng = self.recorded(number), random.Random(self.rng.random())
        while not self.stop.is_set():
            try:
                async with self.client.writer(STREAM, raw=self.raw) as writer:
                    assert isinstance(writer, StreamWriter)
                    for _ in range(rng.randrange(1, SESSION_APPENDS_MAX)):
                        if self.stop.is_set():
                            break
                        await recorded.append(writer, size=rng.randrange(self.plan.size_max))
                        await asyncio.sleep(rng.uniform(0.0, 0.04))
            except TierlogError:
                await asyncio.sleep(BACKOFF_S)

    async def read(self, number: int) -> None:
        """Read at the tail mostly, and now and then from anywhere before it."""
        recorded, rng = self.recorded(number), random.Random(self.rng.random())
        where: Position | Edge = Edge.EARLIEST
        seen: list[Position | Edge] = [where]
        while not self.stop.is_set():
            start = where if rng.random() < 0.8 else rng.choice(seen)
            try:
                await recorded.bounds()
                resume = await recorded.read(start, limit=rng.choice((1, 10, 200)))
                if start is where and resume != where:
                    where = resume
                    seen.append(where)
            except TierlogError:
                await asyncio.sleep(BACKOFF_S)
            await asyncio.sleep(rng.uniform(0.0, 0.2))

    async def end(self) -> None:
        """Seal, ask for the end, and read everything."""
        recorded = self.recorded(0)

        async def seal() -> None:
            await self.client.seal(STREAM)

        async def read() -> None:
            bounds = await recorded.bounds(final=True)
            if isinstance(bounds, Position):
                await recorded.read(Edge.EARLIEST, until=bounds)

        async with asyncio.timeout(END_S_MAX):
            await _until_done(seal)
            await _until_done(read)


async def _until_done(what: Callable[[], Awaitable[None]]) -> None:
    """Try until it is done: everything is mended, and may need a moment to find together."""
    while True:
        try:
            await what()
        except TierlogError:
            await asyncio.sleep(BACKOFF_S)
        else:
            return


async def _infest(plague: Plague, plan: Plan) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(plan.at_once):
            tasks.create_task(
                infest(plague, seconds=plan.seconds, names=plan.faults, rounds=plan.rounds)
            )


async def record(cluster: HistoryCluster, path: Path, *, seed: int, plan: Plan) -> dict[str, int]:
    """Live one history and write it to a file; return how often each fault came."""
    rng = random.Random(seed)
    raw = rng.random() < 0.5
    policy = Policy(ledger_entries_max=rng.choice(LEDGER_ENTRIES))
    header = {
        "stream": STREAM,
        "seed": seed,
        "nodes": len(cluster.nodes),
        "raw": raw,
        "ledger_entries_max": policy.ledger_entries_max,
    }
    with History(path, **header) as history:
        plague = Plague(cluster, history, STREAM, random.Random(rng.random()))
        async with open_client(cluster.settings) as client:
            await client.create_stream(STREAM, raw=raw, policy=policy)
            life = Life(cluster, history, client, plan, rng, raw)
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, plan.writers + 1):
                    tasks.create_task(life.written(number))
                for number in range(1, plan.readers + 1):
                    tasks.create_task(life.read(plan.writers + number))
                await infest(plague, seconds=plan.seconds, names=plan.faults, rounds=plan.rounds)
                life.stop.set()
        # Nodes may have come and gone.
        async with open_client(cluster.settings) as client:
            await Life(cluster, history, client, plan, rng, raw).end()
        assert history.lost() == [], "what is acknowledged is there"
    return plague.counts
