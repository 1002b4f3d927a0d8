"""Whether a registered node answers: its wire says WELCOME within a second.

A registration outlives its process by a session, and a stopped process keeps its sockets; a
greeting tells at once. It saves time and proves nothing: who is taken for gone by mistake is
fenced, and finds out.

Invariant: a node is greeted by one connection at a time, however many ask.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo
from tierlog.ports.transport import Transport
from tierlog.wire.connection import ClientLimits, Hello, WireClient

log = structlog.get_logger()

WELCOME_S_MAX: Final = 1.0
KNOWN_S_MAX: Final = 0.3
"""So long an answer counts for others who ask; well below what a fail-over may take."""
KNOWN_NODES_MAX: Final = 1024


class Reach:
    """Greets nodes on their wire addresses."""

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        *,
        on_silent: Callable[[NodeId], None],
        welcome_s_max: float = WELCOME_S_MAX,
    ) -> None:
        """Take whom to tell of nodes that don't answer, so that they are not waited for again."""
        self._transport = transport
        self._hello = hello
        self._on_silent = on_silent
        self._limits = ClientLimits(hello_s_max=welcome_s_max)
        self._locks: dict[str, asyncio.Lock] = {}
        self._known: dict[str, tuple[float, bool]] = {}

    def __repr__(self) -> str:
        away = sorted(address for address, (_, answered) in self._known.items() if not answered)
        return f"<Reach away={away}>"

    async def answers(self, info: NodeInfo) -> bool:
        """Tell whether the node said WELCOME just now."""
        address, loop = info.wire_address, asyncio.get_running_loop()
        if len(self._known) > KNOWN_NODES_MAX:
            self._known.clear()
            self._locks = {key: lock for key, lock in self._locks.items() if lock.locked()}
        async with self._locks.setdefault(address, asyncio.Lock()):
            at_s, answered = self._known.get(address, (-KNOWN_S_MAX, False))
            if loop.time() - at_s >= KNOWN_S_MAX:
                answered = await self._greet(info)
                if not answered:
                    self._on_silent(info.node_id)
                self._known[address] = loop.time(), answered
            return answered

    async def _greet(self, info: NodeInfo) -> bool:
        answered = False
        try:
            async with asyncio.TaskGroup() as tasks:
                client = await WireClient.connect(
                    self._transport,
                    info.wire_address,
                    self._hello,
                    tasks=tasks,
                    limits=self._limits,
                )
                answered = client.welcome.node_id == info.node_id
                await client.close(drain_s_max=0)
        except* TierlogError as group:
            error = group.exceptions[0]
            assert isinstance(error, TierlogError)
            # A node that says no, for whatever reason, is there.
            answered = error.reason is not Reason.UNAVAILABLE
            log.info("node.not_greeted", node_id=info.node_id, cause=str(error))
        return answered
