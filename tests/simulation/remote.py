"""Storage nodes of other processes: adds on the simulated wire, the rest by calls across.

Stands for ``tierlog.adapters.rpc.storage_node`` without its sockets. A call runs as a task of the
called process; when either process dies, or may not reach the other, the caller learns that it
has no answer, and no more than that.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tests.simulation.processes import SimProcess
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.format.run import Run
from tierlog.model.errors import RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.node import NodeInfo
from tierlog.model.spans import Spans
from tierlog.ports.storage_node import LacAnswer, StorageNodeControl
from tierlog.wire.connection import Hello, WireClient

T = TypeVar("T")

CALL_S_MAX = 10.0


class Host(Protocol):
    """A process that has a storage node."""

    @property
    def process(self) -> SimProcess:
        """The process itself."""

    @property
    def storage(self) -> StorageNodeControl | None:
        """Its storage node; None while it does not serve."""


class Network:
    """Who reaches whom; the connections are ``memory``'s."""

    def __init__(self, memory: MemoryNetwork) -> None:
        self.memory = memory
        self.hosts: dict[NodeId, Host] = {}
        self.late_s: Callable[[], float | None] = lambda: None
        """Asked for each call: in how many seconds a node gets the request once more, or, as
        often, only then, when nobody waits for the answer any more; None: it does not."""
        self._is_second = False

    async def call(
        self,
        caller: SimProcess,
        node_id: NodeId,
        name: str,
        work: Callable[[StorageNodeControl], Coroutine[Any, Any, T]],
        *,
        timeout_s: float = CALL_S_MAX,
    ) -> T:
        """Run ``work`` on a node; its errors come back, and so does having no answer."""
        await caller.faults.call(f"rpc.{name}", lambda: None, changes=False)
        host = self.hosts[node_id]
        storage = host.storage
        apart = (caller.name, host.process.name) in self.memory.unreachable
        if storage is None or apart or not host.process.running:
            raise _no_answer(node_id, name)
        late_s = self.late_s()
        if late_s is not None:
            host.process.spawn(_do_late(late_s, host, work))
            self._is_second = not self._is_second
            if not self._is_second:
                raise _no_answer(node_id, name)
        task: asyncio.Task[T] = host.process.spawn(work(storage))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()
        if not task.done() or task.cancelled():
            raise _no_answer(node_id, name)
        error = task.exception()
        if error is not None and not isinstance(error, TierlogError):
            raise _no_answer(node_id, name) from error
        await caller.faults.call(f"rpc.{name}.answer", lambda: None, changes=False)
        return task.result()


async def _do_late(
    late_s: float, host: Host, work: Callable[[StorageNodeControl], Coroutine[Any, Any, Any]]
) -> None:
    """Do what was asked, for nobody."""
    await asyncio.sleep(late_s)
    storage = host.storage
    if storage is not None:
        with contextlib.suppress(TierlogError):
            await work(storage)


def _no_answer(node_id: NodeId, name: str) -> RetryableError:
    return RetryableError(
        f"storage node {node_id} gave no answer to {name}", remedy="Check that it runs"
    )


class RemoteNode:
    """``StorageNodeControl`` of another process; with a wire, ``StorageNodeClient``."""

    def __init__(
        self, network: Network, caller: SimProcess, node_id: NodeId, wire: WireClient | None = None
    ) -> None:
        self._network = network
        self._caller = caller
        self._node_id = node_id
        self.wire = wire

    def __repr__(self) -> str:
        return f"<RemoteNode {self._node_id} for {self._caller.name}>"

    def add(self, run: Run, *, recovery: bool = False) -> Awaitable[None]:
        assert self.wire is not None
        return self.wire.add(run, recovery=recovery)

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        assert self.wire is not None
        self.wire.confirm(ledger_id, last_add_confirmed)

    async def fence(self, ledger_id: LedgerId) -> LacAnswer:
        return await self._call("fence", lambda node: node.fence(ledger_id))

    async def last_add_confirmed(self, ledger_id: LedgerId) -> LacAnswer:
        return await self._call("lac", lambda node: node.last_add_confirmed(ledger_id))

    async def list_ledgers(self) -> list[LedgerId]:
        return await self._call("list", lambda node: node.list_ledgers())

    async def held_entries(self, ledger_id: LedgerId) -> Spans:
        return await self._call("held", lambda node: node.held_entries(ledger_id))

    async def read(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        *,
        last_entry_id: EntryId | None = None,
        bytes_max: int,
        wait_s: float = 0.0,
        recovery: bool = False,
    ) -> AsyncIterator[Sequence[Run]]:
        async def collect(node: StorageNodeControl) -> tuple[list[list[Run]], TierlogError | None]:
            lists: list[list[Run]] = []
            found = node.read(
                ledger_id,
                first_entry_id,
                last_entry_id=last_entry_id,
                bytes_max=bytes_max,
                wait_s=wait_s,
                recovery=recovery,
            )
            try:
                async for runs in found:
                    copied = [Run.decode(bytes(run.encoded)) for run in runs]
                    lists.append(copied)
            except TierlogError as error:
                return lists, error
            return lists, None

        lists, error = await self._call("read", collect, timeout_s=CALL_S_MAX + wait_s)
        for runs in lists:
            came: list[Run] = []
            try:
                for run in runs:
                    came.append(run)
                    # A body may be cut behind any run.
                    await self._caller.faults.call("rpc.body", lambda: None, changes=False)
            except TierlogError:
                yield came
                raise
            yield came
        if error is not None:
            raise error

    async def _call(
        self,
        name: str,
        work: Callable[[StorageNodeControl], Coroutine[Any, Any, T]],
        *,
        timeout_s: float = CALL_S_MAX,
    ) -> T:
        return await self._network.call(
            self._caller, self._node_id, name, work, timeout_s=timeout_s
        )


class ControlConnector:
    """Connects readers and offloaders, which write nothing to nodes."""

    def __init__(self, network: Network, caller: SimProcess) -> None:
        self._network = network
        self._caller = caller

    async def connect(self, info: NodeInfo) -> StorageNodeControl:
        return RemoteNode(self._network, self._caller, info.node_id)

    async def close(self, node: StorageNodeControl) -> None:
        """Nothing is held."""


class WireNodeConnector:
    """Connects owners, which write to other nodes too."""

    def __init__(
        self, network: Network, caller: SimProcess, hello: Hello, tasks: asyncio.TaskGroup
    ) -> None:
        self._network = network
        self._caller = caller
        self._hello = hello
        self._tasks = tasks

    async def connect(self, info: NodeInfo) -> RemoteNode:
        transport = self._network.memory.transport(self._caller.name)
        wire = await WireClient.connect(
            transport, info.wire_address, self._hello, tasks=self._tasks
        )
        return RemoteNode(self._network, self._caller, info.node_id, wire)

    async def close(self, node: Any) -> None:
        assert isinstance(node, RemoteNode)
        if node.wire is not None:
            await node.wire.close(drain_s_max=0)
