"""What goes wrong in a history: one fault at a time, begun and mended again, in a seed's order.

Owns the list of faults and which are possible where. Does not own the processes (``cluster``).

Invariants:
    * A fault is mended before the next one begins, and all are when ``plague`` ends: what was
      acknowledged must survive any one of them, and then be readable again.
    * A disk is wiped at most once a history, and where two other copies are: nothing promises to
      survive the loss of an ack quorum of disks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.histories.cluster import SESSION_S, HistoryCluster, Node

if TYPE_CHECKING:
    import random

    from tests.histories.recorder import History

CALM_S: Final = (0.5, 2.0)
REPLICAS_TO_WIPE: Final = 3


@dataclass
class Plague:
    """One history's faults."""

    cluster: HistoryCluster
    history: History
    rng: random.Random
    counts: dict[str, int] = field(default_factory=dict)

    def pick(self) -> Node:
        """Choose a node."""
        return self.rng.choice(self.cluster.nodes)

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
    node = plague.pick()
    plague.note("kill -9", node)
    plague.cluster.kill(node)
    await plague.last(0.0, 2.0)
    await plague.cluster.restart(node)
    plague.note("restarted", node)


async def drained(plague: Plague) -> None:
    """End a node with SIGTERM, and start it again."""
    node = plague.pick()
    plague.note("drain", node)
    await plague.cluster.drain(node)
    await plague.cluster.restart(node)
    plague.note("restarted", node)


async def paused(plague: Plague) -> None:
    """Stop a node in mid-step, shorter or longer than its session lasts, and let it go on."""
    node = plague.pick()
    plague.note("SIGSTOP", node)
    plague.cluster.pause(node)
    try:
        await plague.last(0.2, SESSION_S + 2.0)
    finally:
        plague.cluster.resume(node)
        plague.note("SIGCONT", node)


async def cut_off(plague: Plague) -> None:
    """Cut a node from ZooKeeper for longer than its session: it expires, and others know."""
    node = plague.pick()
    plague.note("cut from ZooKeeper", node)
    plague.cluster.cut_off(node)
    try:
        await plague.last(SESSION_S + 1.0, SESSION_S + 2.0)
    finally:
        plague.cluster.join(node)
        plague.note("joined", node)


async def without_zookeeper(plague: Plague) -> None:
    """Kill ZooKeeper, and start it again."""
    plague.note("ZooKeeper killed")
    await plague.cluster.restart_zookeeper(plague.rng.uniform(0.0, 3.0))
    plague.note("ZooKeeper restarted")


async def slow(plague: Plague) -> None:
    """Make each sync of a node's disks take long."""
    node = plague.pick()
    plague.note("slow fsync", node)
    node.faults.set(sync_delay_s=plague.rng.choice((0.1, 0.5, 1.5)))
    try:
        await plague.last(1.0, 4.0)
    finally:
        node.faults.set()
        plague.note("quick fsync", node)


async def wiped(plague: Plague) -> None:
    """Take a node and its disk away for good; another one comes, with an empty disk."""
    node = plague.pick()
    plague.note("disk wiped", node)
    made = await plague.cluster.replace(node)
    plague.note("another node", made)


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
    """Return the faults that may come next."""
    wipe = len(plague.cluster.nodes) >= REPLICAS_TO_WIPE and not plague.counts.get("wipe")
    return [one for one in names if one != "wipe" or wipe]


async def infest(
    plague: Plague, *, seconds: float, names: tuple[str, ...] = tuple(FAULTS), rounds: int = 0
) -> None:
    """Let one fault after the other come, each kind ``rounds`` times at least; mend all."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    due = list(names) * rounds
    plague.rng.shuffle(due)
    while True:
        await plague.last(*CALM_S)
        usable = possible(plague, names)
        due = [one for one in due if one in usable]
        if not due and loop.time() >= end_s:
            return
        name = due.pop() if due else plague.rng.choice(usable)
        plague.counts[name] = plague.counts.get(name, 0) + 1
        await FAULTS[name](plague)
