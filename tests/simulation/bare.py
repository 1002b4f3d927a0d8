"""Simulated applications with bare ledgers: who writes them, and who recovers and reads them.

What ``open_ledgers`` puts together over real servers stands here over the memory twins; all else
is the client's own code.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from tests.simulation.remote import WireNodeConnector
from tests.simulation.services import KEYS, Servers, Service
from tierlog.client.ledger_writer import LedgerAppender
from tierlog.client.ledgers import Ledgers, LedgerShape, LedgersLimits
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.recovery import Recovery
from tierlog.model.errors import IndeterminateError, TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.wire.connection import Hello
from tierlog.wire.messages import ROLE_OWNER
from tierlog.wiring.ledgers import LedgerParts

LIMITS = LedgersLimits(in_flight_bytes_max=64 * 1024, frame_bytes_max=256 * 1024)
SHAPES = (
    LedgerShape(ensemble_size=3, write_quorum=3, ack_quorum=2),
    LedgerShape(ensemble_size=3, write_quorum=3, ack_quorum=2),
    LedgerShape(ensemble_size=3, write_quorum=2, ack_quorum=2, stripe_entries=1),
    LedgerShape(ensemble_size=4, write_quorum=3, ack_quorum=2, stripe_entries=2),
)
RECOVERY_S_MAX = 60.0
DELETED_SHARE = 0.2


class _LedgerProcess(Service):
    """A process that uses bare ledgers."""

    def __init__(self, name: str, servers: Servers) -> None:
        super().__init__(name, servers)
        self.enough = asyncio.Event()
        """Set to have it end its work."""

    async def main(self) -> None:
        catalog = self.connect()
        cluster = await catalog.nodes.ensure_cluster()
        async with asyncio.TaskGroup() as tasks:
            hello = Hello(cluster_id=cluster.cluster_id, role=ROLE_OWNER, client_name=self.name)
            connector = WireNodeConnector(self.servers.network, self, hello, tasks)
            nodes: NodeDirectory[StorageNodeClient] = NodeDirectory(catalog.nodes.live, connector)
            recovery = Recovery(catalog, nodes, ids=self.ids, keys=KEYS)
            parts = LedgerParts(
                catalog, nodes, recovery, KEYS, self.clock, self.ids, cluster.cluster_id
            )
            ledgers = Ledgers(parts, tasks, limits=LIMITS)
            self.ready.set()
            await self.work(ledgers)
            ledgers.abandon_all()
            await nodes.close()

    async def work(self, ledgers: Ledgers) -> None:
        """Be the application."""
        raise NotImplementedError


class LedgerWriting(_LedgerProcess):
    """Writes one bare ledger after the other; some it closes, some it leaves as they are."""

    def __init__(self, name: str, servers: Servers, *, rest_s_max: float) -> None:
        super().__init__(name, servers)
        self.rest_s_max = rest_s_max
        self.writing: LedgerId | None = None

    def release(self) -> None:
        super().release()
        self.writing = None

    async def work(self, ledgers: Ledgers) -> None:
        while not self.enough.is_set():
            await asyncio.sleep(self.rest_s_max * self.rng.uniform(0, 1))
            try:
                ledger = await ledgers.create(self.rng.choice(SHAPES))
                self.writing = ledger.ledger_id
                await self._fill(ledger)
                if self.rng.random() < 0.6:
                    closed = await ledger.close()
                    end = closed.last_entry_id
                    self.trace.note("bare.closed", ledger=ledger.ledger_id, end=end)
                else:
                    ledger.abandon()
            except TierlogError as error:
                self.trace.note("bare.failed", cause=str(error)[:80])
            self.writing = None

    async def _fill(self, ledger: LedgerAppender) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.rng.randint(1, 16)):
                if ledger.failure is not None or self.enough.is_set():
                    break
                tasks.create_task(self._append(ledger))
                await asyncio.sleep(self.rest_s_max * self.rng.uniform(0, 1) ** 3)

    async def _append(self, ledger: LedgerAppender) -> None:
        checker = self.servers.checker
        tokens = checker.bare.new_entries(f"{self.name}/{ledger.ledger_id}", 1)
        try:
            entry_id = await ledger.append(checker.bare.payload(tokens[0]))
        except IndeterminateError:
            checker.bare.ambiguous(tokens)
        except TierlogError:
            checker.bare.refused(tokens)
        except BaseException:
            checker.bare.ambiguous(tokens)
            raise
        else:
            checker.acknowledged_bare(tokens, [(int(ledger.ledger_id), int(entry_id))])


class LedgerMinding(_LedgerProcess):
    """Recovers bare ledgers, also such as are being written, reads them, deletes a few."""

    def __init__(
        self, name: str, servers: Servers, *, written: Callable[[], Collection[LedgerId]]
    ) -> None:
        super().__init__(name, servers)
        self._written = written
        self.wanted: list[LedgerId] = []
        """Ledgers that it is to recover next, whoever writes them."""
        self.recovered = 0

    async def work(self, ledgers: Ledgers) -> None:
        while not self.enough.is_set():
            try:
                if self.wanted:
                    await self._recover(ledgers, self.wanted.pop(0))
                    continue
                found = await ledgers.ledgers()
                await self._mind(ledgers, found)
            except TierlogError as error:
                self.trace.note("minding.failed", cause=str(error)[:80])
            for _ in range(20):
                if not self.wanted:
                    await asyncio.sleep(self.rng.uniform(0.1, 1.0))

    async def _mind(self, ledgers: Ledgers, found: Mapping[LedgerId, LedgerMetadata]) -> None:
        written = self._written()
        others = [
            ledger_id
            for ledger_id, metadata in sorted(found.items())
            if metadata.state is not LedgerState.CLOSED and ledger_id not in written
        ]
        if others:
            await self._recover(ledgers, self.rng.choice(others))
        if found:
            await self._read(ledgers, self.rng.choice(sorted(found)))
        closed = [one for one in sorted(found) if found[one].state is LedgerState.CLOSED]
        if closed and self.rng.random() < DELETED_SHARE:
            ledger_id = self.rng.choice(closed)
            self.servers.checker.deleted.add(int(ledger_id))
            self.trace.note("bare.deleted", ledger=ledger_id)
            await ledgers.delete(ledger_id)

    async def _recover(self, ledgers: Ledgers, ledger_id: LedgerId) -> None:
        try:
            async with asyncio.timeout(RECOVERY_S_MAX):
                closed = await ledgers.recover(ledger_id)
        except TimeoutError:
            self.trace.note("bare.not_recovered", ledger=ledger_id)
        else:
            self.recovered += 1
            self.trace.note("bare.recovered", ledger=ledger_id, end=closed.last_entry_id)

    async def _read(self, ledgers: Ledgers, ledger_id: LedgerId) -> None:
        """Read a ledger as far as it goes: what is seen once stays."""
        reader = await ledgers.open(ledger_id)
        expected = 0
        async for entry in reader.entries():
            if entry.entry_id != expected:
                text = f"{self.name} got entry {entry.entry_id} of {ledger_id} for {expected}"
                self.servers.checker.complain("a", text)
            at = (int(ledger_id), int(entry.entry_id))
            self.servers.checker.bare.seen(at, entry.data, self.name)
            expected = entry.entry_id + 1
