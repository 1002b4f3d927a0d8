"""Any of several ingest nodes, as one ``StreamControl``: finds the owner, whoever is away.

Owns which node is asked next. Does not own the calls: a control of one node each does.

The search for an owner begins at the node that was the last one to be right. When that is silent
for ``hedge_s``, or away, the next one is asked too; a node that is named is asked at once.

Invariants:
    * Only a node's own word makes it the owner: it has claimed and recovered the stream by then.
    * A refusal is the answer; only a node that gives none lets another one be asked.
    * Of a search nothing is left behind: calls without an answer are cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import structlog

from tierlog.model.attributes import AttributeKey
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.ports.streams import (
    ATTRIBUTES_MAX,
    FIRST_KEY,
    LAST_KEY,
    AttributeValues,
    OwnerInfo,
    StreamControl,
)

log = structlog.get_logger()

HEDGE_S: Final = 0.15
CREATE_HEDGE_S: Final = 1.0
ALIVE_S_MAX: Final = 0.5
NODES_MAX: Final = 64


class NodeControl(StreamControl, Protocol):
    """The control of one node."""

    async def answers(self) -> bool:
        """Tell whether the node answers now."""
        ...


class IngestNodes:
    """Asks the nodes at these addresses (``host:port``), and those that they name."""

    def __init__(
        self,
        addresses: Sequence[str],
        open_node: Callable[[str], NodeControl],
        *,
        hedge_s: float = HEDGE_S,
    ) -> None:
        self._given = tuple(dict.fromkeys(addresses))
        self._open_node = open_node
        self._hedge_s = hedge_s
        self._nodes: dict[str, NodeControl] = {}
        self._order = list(self._given)
        """The one that was right last comes first."""

    def __repr__(self) -> str:
        return f"<IngestNodes {self._order}>"

    async def create_stream(
        self,
        stream: StreamName,
        *,
        raw: bool,
        policy: Policy | None,
        exist_ok: bool,
        partitions: int = 0,
    ) -> bool:
        """See ``StreamControl``.

        Creating twice is creating once, where that is asked for: then a node that is silent, or
        can do nothing since it does not reach the metadata, lets another one be asked too.
        """

        def create(node: NodeControl) -> Awaitable[bool]:
            return node.create_stream(
                stream, raw=raw, policy=policy, exist_ok=exist_ok, partitions=partitions
            )

        if not exist_ok:  # a lost answer leaves a doubt: ask one that answers
            return await create(await self._some_node())
        if not self._order:
            raise _nobody()
        async with asyncio.TaskGroup() as tasks:
            outcome = await self._any_of(create, tasks)
        if isinstance(outcome, TierlogError):
            raise outcome
        return outcome

    async def _any_of(
        self, call: Callable[[NodeControl], Awaitable[bool]], tasks: asyncio.TaskGroup
    ) -> bool | TierlogError:
        """Call one node after the other until one gives an answer, which may be a refusal."""

        async def ask(address: str) -> bool | TierlogError:
            try:
                return await call(self.node(address))
            except TierlogError as error:
                return error

        left, pending = self.addresses(), dict[asyncio.Task[bool | TierlogError], str]()
        trouble: bool | TierlogError = _nobody()
        try:
            while left or pending:
                if left:
                    address = left.pop(0)
                    pending[tasks.create_task(ask(address))] = address
                done, _ = await asyncio.wait(
                    pending,
                    timeout=CREATE_HEDGE_S if left else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    address, trouble = pending.pop(task), task.result()
                    if not isinstance(trouble, RetryableError | IndeterminateError):
                        self._prefer(address)
                        return trouble
        finally:
            for task in pending:
                task.cancel()
        return trouble

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        """See ``StreamControl``."""
        if not self._order:
            raise _nobody()
        async with asyncio.TaskGroup() as tasks:
            search = _Search(self, stream, tasks)
            try:
                found = await search.run()
            finally:
                search.cancel()
        if isinstance(found, TierlogError):
            raise found
        self._prefer(found.grpc_address)
        return found

    async def seal(self, stream: StreamName) -> LedgerId | None:
        """See ``StreamControl``."""
        owner = await self.find_owner(stream)
        return await self.node(owner.grpc_address).seal(stream)

    async def get_attributes(
        self, stream: StreamName, keys: Sequence[AttributeKey]
    ) -> AttributeValues:
        """See ``StreamControl``."""
        owner = await self.find_owner(stream)
        return await self.node(owner.grpc_address).get_attributes(stream, keys)

    async def list_attributes(
        self,
        stream: StreamName,
        *,
        first: AttributeKey = FIRST_KEY,
        last: AttributeKey = LAST_KEY,
        limit: int = ATTRIBUTES_MAX,
    ) -> AttributeValues:
        """See ``StreamControl``."""
        owner = await self.find_owner(stream)
        node = self.node(owner.grpc_address)
        return await node.list_attributes(stream, first=first, last=last, limit=limit)

    async def close(self) -> None:
        """See ``StreamControl``."""
        while self._nodes:
            _, node = self._nodes.popitem()
            await node.close()

    def node(self, address: str) -> NodeControl:
        """Return the control of the node at an address."""
        found = self._nodes.get(address)
        if found is None:
            found = self._nodes[address] = self._open_node(address)
        return found

    @property
    def hedge_s(self) -> float:
        """So long a node may be silent before another one is asked too."""
        return self._hedge_s

    def addresses(self) -> list[str]:
        """Return the known nodes in the order in which they are asked."""
        return list(self._order)

    def _prefer(self, address: str) -> None:
        others = [one for one in self._order if one != address]
        # Those that were given stay; of those that were named the latest do.
        named = [one for one in others if one not in self._given][:NODES_MAX]
        self._order = [address, *(one for one in others if one in self._given or one in named)]

    async def _some_node(self) -> NodeControl:
        """Return a node that answers; the last resort is the first one."""
        if not self._order:
            raise _nobody()
        if len(self._order) > 1:
            for address in self._order:
                try:
                    async with asyncio.timeout(ALIVE_S_MAX):
                        if await self.node(address).answers():
                            return self.node(address)
                except TimeoutError:
                    continue
        return self.node(self._order[0])


class _Search:
    """One search for the owner of a stream."""

    def __init__(self, nodes: IngestNodes, stream: StreamName, tasks: asyncio.TaskGroup) -> None:
        self._nodes = nodes
        self._stream = stream
        self._tasks = tasks
        self._left = nodes.addresses()
        self._asked: set[str] = set()
        self._pending: dict[asyncio.Task[OwnerInfo | TierlogError], str] = {}
        self._trouble: TierlogError | None = None

    def cancel(self) -> None:
        """End the calls that have no answer."""
        for task in self._pending:
            task.cancel()

    async def run(self) -> OwnerInfo | TierlogError:
        """Return the owner, a refusal, or the last trouble when nobody is left to be asked."""
        self._ask(self._left.pop(0))
        while self._pending:
            hedge_s = self._nodes.hedge_s if self._left else None
            done, _ = await asyncio.wait(
                self._pending, timeout=hedge_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                found = self._take(self._pending.pop(task), task.result())
                if found is not None:
                    return found
            if self._left and (not done or not self._pending):
                self._ask(self._left.pop(0))
        return self._trouble or RetryableError(
            f"the nodes do not agree yet on who owns stream {self._stream}",
            remedy="Find the owner again in a moment",
            retry_after_s=0.1,
        )

    def _take(
        self, address: str, answer: OwnerInfo | TierlogError
    ) -> OwnerInfo | TierlogError | None:
        """Return the outcome, if an answer is one."""
        if isinstance(answer, OwnerInfo):
            if answer.grpc_address == address:
                return answer
            self._ask(answer.grpc_address)
        elif isinstance(answer, RetryableError | IndeterminateError):
            log.info("owner.not_told", stream=self._stream, asked=address, cause=str(answer))
            self._trouble = answer
        else:
            return answer
        return None

    def _ask(self, address: str) -> None:
        if address in self._left:
            self._left.remove(address)
        if address not in self._asked:
            self._asked.add(address)
            task = self._tasks.create_task(self._call(address))
            self._pending[task] = address

    async def _call(self, address: str) -> OwnerInfo | TierlogError:
        try:
            return await self._nodes.node(address).find_owner(self._stream)
        except TierlogError as error:
            return error


def split_addresses(text: str) -> list[str]:
    """Take a list of ``host:port`` apart at its commas."""
    return [one.strip() for one in text.split(",") if one.strip()]


def _nobody() -> RefusedError:
    return RefusedError(
        "no address of an ingest node is known",
        remedy="Start one with: tierlog up; or set TIERLOG_CLIENT__INGEST_ADDRESS",
    )
