"""Becoming the owner of a stream, or learning who is: ``ownership`` with its reads and its claim.

Invariants:
    * A claim is made over the very owner that was judged: has the stream moved since, it is
      judged anew.
    * A live owner within reach is never claimed over, nor one that lost its session just now and
      still answers: it has ``UNREGISTERED_S_MAX`` to register again, as all have to when the
      metadata store was away.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.node import NodeInfo
from tierlog.model.stream import Stream
from tierlog_ingest.streams.ownership import (
    Elsewhere,
    Mine,
    Verdict,
    decide,
    no_owner_yet,
    not_owner,
)

log = structlog.get_logger()

UNREGISTERED_S_MAX: Final = 5.0

Answers = Callable[[NodeInfo], Awaitable[bool]]
"""Tells whether a registered node answers this one, now."""


async def registration_is_enough(info: NodeInfo) -> bool:
    """Take a registered node's word: what holds where no other node is asked."""
    del info
    return True


class Claims:
    """Claims streams for one node."""

    def __init__(
        self, catalog: Catalog, node_id: NodeId, *, answers: Answers = registration_is_enough
    ) -> None:
        self.draining = False
        """Set to claim nothing more."""
        self._catalog = catalog
        self._node_id = node_id
        self._answers = answers
        self._live: dict[NodeId, NodeInfo] = {}
        self._gone: dict[NodeId, tuple[float, NodeInfo]] = {}
        """Nodes that are not live any more, and since when."""

    def __repr__(self) -> str:
        return f"<Claims of {self._node_id}{' draining' if self.draining else ''}>"

    async def take(self, name: StreamName) -> Stream:
        """Claim a stream. Raises NOT_OWNER with whoever owns it, or is to own it."""
        while True:
            stream = await self._catalog.streams.get(name)
            verdict = await self.verdict(stream)
            if isinstance(verdict, Elsewhere):
                raise not_owner(stream, verdict.info)
            if not isinstance(verdict, Mine):
                raise no_owner_yet(stream, verdict)
            try:
                claimed = await self._catalog.streams.claim(name, self._node_id, over=stream)
            except RefusedError as error:
                if error.reason is not Reason.FENCED:
                    raise
                log.info("claim.overtaken", stream=name, cause=str(error))
                continue
            before = stream.owner.node_id if stream.owner is not None else None
            log.info("claim.made", stream=name, epoch=claimed.owner_epoch, before=before)
            return claimed

    async def verdict(self, stream: Stream) -> Verdict:
        """Decide who is to own a stream; whoever is named answered just now."""
        nodes = self._with_lately_gone(stream, await self._catalog.nodes.live())
        away: frozenset[NodeId] = frozenset()
        while True:
            verdict = decide(stream, self._node_id, nodes, away=away, draining=self.draining)
            if not isinstance(verdict, Elsewhere) or await self._answers(verdict.info):
                return verdict
            # One is away: ask all at once, so that several cost no more time than one.
            away |= {verdict.info.node_id}
            away |= await self._silent({key: nodes[key] for key in nodes if key not in away})

    def notice(self, nodes: Mapping[NodeId, NodeInfo]) -> None:
        """Learn which nodes are live now."""
        now_s = asyncio.get_running_loop().time()
        for node_id in self._live.keys() - nodes.keys():
            self._gone[node_id] = now_s, self._live[node_id]
        self._live = dict(nodes)
        self._gone = {
            node_id: (since_s, info)
            for node_id, (since_s, info) in self._gone.items()
            if node_id not in nodes and now_s - since_s < UNREGISTERED_S_MAX
        }

    def _with_lately_gone(
        self, stream: Stream, nodes: Mapping[NodeId, NodeInfo]
    ) -> Mapping[NodeId, NodeInfo]:
        """Add the stream's owner, if it was live a moment ago: whether it answers is asked then."""
        self.notice(nodes)
        owner = stream.owner.node_id if stream.owner is not None else None
        if owner is None or owner not in self._gone:
            return nodes
        return {**nodes, owner: self._gone[owner][1]}

    async def _silent(self, nodes: Mapping[NodeId, NodeInfo]) -> frozenset[NodeId]:
        silent: set[NodeId] = set()

        async def ask(info: NodeInfo) -> None:
            if not await self._answers(info):
                silent.add(info.node_id)

        async with asyncio.TaskGroup() as tasks:
            for node_id in sorted(nodes):
                if node_id != self._node_id:
                    tasks.create_task(ask(nodes[node_id]))
        return frozenset(silent)
