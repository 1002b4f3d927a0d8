"""The storage-node port in memory: what a node promises, and switches for what may go wrong.

A twin for tests of ledgers and streams. It keeps whole runs; its durability is that of the
object: a test that crashes a writer keeps the node, one that loses a node drops it.

Invariants:
    * A fenced ledger takes no ordinary add, a ledger never seen before included.
    * Ordinary reads end at the LAC; recovery reads fence first.
    * A damaged run is UNKNOWN, never absent.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

from tierlog.format.run import Run
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import INT64_MAX, NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.spans import Spans, union
from tierlog.ports.storage_node import LacAnswer

BATCH_RUNS: Final = 2  # small, so that few runs make many lists


class MemoryStorageNode:
    """One node. Switches: what can go wrong with it, see their docstrings."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.runs: dict[LedgerId, dict[EntryId, Run]] = {}
        self.fenced: set[LedgerId] = set()
        self.freed: set[LedgerId] = set()
        self.lacs: dict[LedgerId, EntryId] = {}
        self.down = False
        """Nothing reaches it: every call is UNAVAILABLE."""
        self.mute = False
        """Adds are stored, but never answered."""
        self.deaf = False
        """Adds are neither stored nor answered."""
        self.hung = False
        """It takes calls, and never answers those that it took."""
        self.read_only = False
        self.delay_s = 0.0
        """How long an add takes, and a fence."""
        self.read_delay_s = 0.0
        """How long it takes until the first runs of a read come."""
        self.damaged: set[tuple[LedgerId, EntryId]] = set()
        """Runs, by first entry, that can't be read."""
        self.doubtful: set[LedgerId] = set()
        """Ledgers whose ends it is not sure of."""
        self.recovery_adds: list[Run] = []
        self.add_count = 0
        self.reads_open = 0
        """Reads that gave something, and are not at their end."""

    def __repr__(self) -> str:
        return f"<MemoryStorageNode {self.node_id} {len(self.runs)} ledgers>"

    def add(self, run: Run, *, recovery: bool = False) -> "asyncio.Future[None]":
        """See ``StorageNodeClient``."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        self.add_count += 1
        refusal = self._refusal(run.header.ledger_id, recovery=recovery)
        if refusal is not None:
            loop.call_later(self.delay_s, _settle, answer, refusal)
        elif not (self.deaf or self.hung):
            self._store(run)
            if recovery:
                self.recovery_adds.append(run)
            if not self.mute:
                loop.call_later(self.delay_s, _settle, answer, None)
        return answer

    def _refusal(self, ledger_id: LedgerId, *, recovery: bool) -> TierlogError | None:
        if self.down:
            return _down(self.node_id)
        if self.read_only and not recovery:
            return RetryableError(
                f"node {self.node_id} is read-only",
                reason=Reason.READ_ONLY,
                remedy="Free disk",
            )
        if ledger_id in self.freed or (ledger_id in self.fenced and not recovery):
            return RefusedError(
                f"ledger {ledger_id} is fenced",
                reason=Reason.FENCED,
                remedy="Stop writing it",
            )
        return None

    def _store(self, run: Run) -> None:
        ledger_id = run.header.ledger_id
        held = self.runs.setdefault(ledger_id, {})
        known = held.get(run.first_entry_id)
        assert known is None or known == run, "an entry id never stands for two contents"
        # Bytes of its own: whoever sent them may write over them.
        held[run.first_entry_id] = Run.decode(bytes(run.encoded))
        self._raise_lac(ledger_id, run.header.last_add_confirmed)

    def _raise_lac(self, ledger_id: LedgerId, lac: EntryId) -> None:
        self.lacs[ledger_id] = max(self.lacs.get(ledger_id, NO_ENTRY), lac)

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        """See ``StorageNodeClient``."""
        if not self.down:
            self._raise_lac(ledger_id, last_add_confirmed)

    async def fence(self, ledger_id: LedgerId) -> LacAnswer:
        """See ``StorageNodeControl``."""
        await asyncio.sleep(self.delay_s)
        await self._check_answers()
        self.fenced.add(ledger_id)
        return self._lac(ledger_id)

    async def last_add_confirmed(self, ledger_id: LedgerId) -> LacAnswer:
        """See ``StorageNodeControl``."""
        await self._check_answers()
        return self._lac(ledger_id)

    def _lac(self, ledger_id: LedgerId) -> LacAnswer:
        held = self.runs.get(ledger_id, {})
        last = max((run.last_entry_id for run in held.values()), default=NO_ENTRY)
        return LacAnswer(self.lacs.get(ledger_id, NO_ENTRY), last, ledger_id in self.doubtful)

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
        """See ``StorageNodeControl``."""
        await self._check_answers()
        if self.read_delay_s:
            await asyncio.sleep(self.read_delay_s)
        if recovery:
            self.fenced.add(ledger_id)
        else:
            await self._wait_for(ledger_id, first_entry_id, wait_s)
        end = EntryId(INT64_MAX) if last_entry_id is None else last_entry_id
        if not recovery:
            end = min(end, self.lacs.get(ledger_id, NO_ENTRY))
        self.reads_open += 1
        batches = self._batches(ledger_id, first_entry_id, end, bytes_max)
        try:
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        finally:
            self.reads_open -= 1

    async def _batches(
        self, ledger_id: LedgerId, first_entry_id: EntryId, end: EntryId, bytes_max: int
    ) -> AsyncGenerator[Sequence[Run], None]:
        batch: list[Run] = []
        for run in self._following(ledger_id, first_entry_id, end):
            if bytes_max <= 0:
                break
            if (ledger_id, run.first_entry_id) in self.damaged:
                if batch:
                    yield batch
                raise RetryableError(
                    f"{run!r} is damaged",
                    reason=Reason.UNKNOWN,
                    remedy="Ask another replica",
                    details={"ledger_id": str(ledger_id), "entry_id": str(run.first_entry_id)},
                )
            bytes_max -= len(run.encoded)
            batch.append(run)
            if len(batch) == BATCH_RUNS:
                yield batch
                batch = []
                await self._check_answers()
        if batch:
            yield batch

    async def _wait_for(self, ledger_id: LedgerId, entry_id: EntryId, wait_s: float) -> None:
        if entry_id > self.lacs.get(ledger_id, NO_ENTRY):
            await asyncio.sleep(wait_s)
        if entry_id > self.lacs.get(ledger_id, NO_ENTRY):
            raise RetryableError(
                f"entry {entry_id} of ledger {ledger_id} is not confirmed yet",
                reason=Reason.NOT_YET,
                remedy="Wait",
            )

    def _following(self, ledger_id: LedgerId, first_entry_id: EntryId, end: EntryId) -> list[Run]:
        held = self.runs.get(ledger_id, {})
        following = sorted(
            (run for run in held.values() if run.last_entry_id >= first_entry_id),
            key=lambda run: run.first_entry_id,
        )
        if not following or following[0].first_entry_id > first_entry_id:
            raise RefusedError(
                f"node {self.node_id} has no entry {first_entry_id} of ledger {ledger_id}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Ask another replica",
            )
        return [run for run in following if run.first_entry_id <= end]

    async def list_ledgers(self) -> list[LedgerId]:
        """See ``StorageNodeControl``."""
        self._check_up()
        return sorted(self.runs)

    async def free(self, ledger_id: LedgerId) -> None:
        """Forget a ledger; its id is refused for ever."""
        self._check_up()
        self.freed.add(ledger_id)
        self.runs.pop(ledger_id, None)

    async def held_entries(self, ledger_id: LedgerId) -> Spans:
        """See ``StorageNodeControl``."""
        await asyncio.sleep(self.delay_s)
        await self._check_answers()
        if ledger_id in self.freed:
            raise RefusedError(
                f"node {self.node_id} freed ledger {ledger_id}",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="Read the ledger's metadata again",
            )
        held = self.runs.get(ledger_id, {})
        return union((run.first_entry_id, run.last_entry_id) for run in held.values())

    async def _check_answers(self) -> None:
        self._check_up()
        if self.hung:
            await asyncio.Event().wait()

    def _check_up(self) -> None:
        if self.down:
            raise _down(self.node_id)


def _down(node_id: NodeId) -> RetryableError:
    return RetryableError(f"node {node_id} can't be reached", remedy="Start it")


def _settle(answer: "asyncio.Future[None]", error: TierlogError | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
