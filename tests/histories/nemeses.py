"""What goes wrong in a history: faults, begun and mended again, in a seed's order.

Owns the list of faults and which are possible where. Does not own the processes (``cluster``).

Invariants:
    * A node has one fault at a time, and all are mended when ``infest`` ends: what was acknowledged
      must survive them, and then be readable again.
    * A disk is wiped only where two other copies are, and the next one only when all copies are
      there again: nothing promises to survive the loss of an ack quorum of disks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.histories.cluster import SESSION_S, HistoryCluster, Node

if TYPE_CHECKING:
    import random

    from tests.histories.recorder import History

CALM_S: Final = (0.5, 2.0)
OWNERS: Final = 0.6
"""How often a fault is the stream's owner's, if it can be told."""
REPLICAS_TO_WIPE: Final = 3


@dataclass
class Plague:
    """One history's faults."""

    cluster: HistoryCluster
    history: History
    stream: str
    rng: random.Random
    counts: dict[str, int] = field(default_factory=dict)
    busy: set[Node] = field(default_factory=set)
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by what happens to the whole cluster."""

    @contextlib.asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        """Choose a node that has no fault yet, for one: the stream's owner, or any."""
        owner = await self.cluster.owner_of(self.stream) if self.rng.random() < OWNERS else None
        free = [one for one in self.cluster.nodes if one not in self.busy]
        chosen = owner if owner is not None and owner in free else self.rng.choice(free)
        self.busy.add(chosen)
        try:
            yield chosen
        finally:
            self.busy.remove(chosen)

    def note(self, what: str, node: Node | None = None) -> None:
        """Write down what is done."""
        details = {} if node is None else {"node": node.name}
        self.history.event(what, **details)

    async def last(self, low_s: float, high_s: float) -> None:
        """Let a fault last."""
        await asyncio.sleep(self.rng.uniform(low_s, high_s))


Fault = Callable[[Plague], Awaitable[None]]
"""Begins a fault, lets it last, and mends it."""


async def killed(plague: Plague) -> None:
    """Kill a node with SIGKILL, and start it again over its disk."""
    async with plague.node() as node:
        plague.note("kill -9", node)
        plague.cluster.kill(node)
        await plague.last(0.0, 2.0)
        await plague.cluster.restart(node)
        plague.note("restarted", node)


async def drained(plague: Plague) -> None:
    """End a node with SIGTERM, and start it again."""
    async with plague.node() as node:
        plague.note("drain", node)
        await plague.cluster.drain(node)
        await plague.cluster.restart(node)
        plague.note("restarted", node)


async def paused(plague: Plague) -> None:
    """Stop a node in mid-step, shorter or longer than its session lasts, and let it go on."""
    async with plague.node() as node:
        plague.note("SIGSTOP", node)
        plague.cluster.pause(node)
        try:
            await plague.last(0.2, SESSION_S + 2.0)
        finally:
            plague.cluster.resume(node)
            plague.note("SIGCONT", node)


async def cut_off(plague: Plague) -> None:
    """Cut a node from ZooKeeper for longer than its session: it expires, and others know."""
    async with plague.node() as node:
        plague.note("cut from ZooKeeper", node)
        plague.cluster.cut_off(node)
        try:
            await plague.last(SESSION_S + 1.0, SESSION_S + 4.0)
        finally:
            plague.cluster.join(node)
            plague.note("joined", node)


async def without_zookeeper(plague: Plague) -> None:
    """Kill ZooKeeper, and start it again."""
    async with plague.one_at_a_time:
        plague.note("ZooKeeper killed")
        await plague.cluster.restart_zookeeper(plague.rng.uniform(0.0, 3.0))
        plague.note("ZooKeeper restarted")


async def slow(plague: Plague) -> None:
    """Make each sync of a node's disks take long."""
    async with plague.node() as node:
        plague.note("slow fsync", node)
        node.faults.set(sync_delay_s=plague.rng.choice((0.1, 0.5, 1.5)))
        try:
            await plague.last(1.0, 4.0)
        finally:
            node.faults.set()
            plague.note("quick fsync", node)


async def wiped(plague: Plague) -> None:
    """Take a node and its disk away for good; another one comes, and gets the lost copies."""
    async with plague.one_at_a_time:
        async with plague.node() as node:
            plague.note("disk wiped", node)
            made = await plague.cluster.replace(node)
            plague.note("another node", made)
        await plague.cluster.until_whole()
        plague.note("all copies are there")


FAULTS: Final[Mapping[str, Fault]] = {
    "kill": killed,
    "drain": drained,
    "pause": paused,
    "expire": cut_off,
    "zookeeper": without_zookeeper,
    "slow": slow,
    "wipe": wiped,
}


def possible(plague: Plague, names: tuple[str, ...]) -> list[str]:
    """Return the faults that may come."""
    copies = len(plague.cluster.nodes)
    return [one for one in names if one != "wipe" or copies >= REPLICAS_TO_WIPE]


async def infest(
    plague: Plague, *, seconds: float, names: tuple[str, ...] = tuple(FAULTS), rounds: int = 0
) -> None:
    """Let one fault after the other come, each kind ``rounds`` times at least; mend all."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    usable = possible(plague, names)
    due = usable * rounds
    plague.rng.shuffle(due)
    while due or loop.time() < end_s:
        await plague.last(*CALM_S)
        name = due.pop() if due else plague.rng.choice(usable)
        plague.counts[name] = plague.counts.get(name, 0) + 1
        await FAULTS[name](plague)
