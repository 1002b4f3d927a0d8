"""Reads good runs and writes them to a node that lacks them, within a rate and a bound of bytes.

Owns: the bytes' way. Does not own which entries, nor to whom (``worker``).

Invariants:
    * What is written was read from a replica, verified (and, where the ledger has a key,
      authenticated); it is written whole, header unchanged, as a recovery add.
    * ``copy`` returns once all of it was acknowledged; then it is durable.
    * At most ``IN_FLIGHT_BYTES_MAX`` of one ledger wait for answers, and all copies of a process
      together stay within its rate.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Final

from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import LedgerKeys
from tierlog.ledger.reader import OnDamage, Tier1ReadHandle, closing_runs
from tierlog.model.errors import IndeterminateError, Reason, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.spans import Span, Spans
from tierlog.ports.clock import Clock
from tierlog.ports.storage_node import StorageNodeClient
from tierlog_ingest.storage.compaction.throttle import TokenBucket

IN_FLIGHT_BYTES_MAX: Final = 4 * 1024 * 1024
BURST_BYTES: Final = 4 * 1024 * 1024
ANSWER_S_MAX: Final = 30.0
CONFIRM_S_MAX: Final = 2.0
"""So long a node may take to learn what is confirmed."""


class Copier:
    """Copies for one process."""

    def __init__(
        self,
        nodes: NodeDirectory[StorageNodeClient],
        keys: LedgerKeys,
        *,
        clock: Clock,
        bytes_per_s: float,
    ) -> None:
        self._nodes = nodes
        self._keys = keys
        self._bucket = TokenBucket(clock, bytes_per_s=bytes_per_s, burst_bytes=BURST_BYTES)
        self._runs = 0
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Copier {self._runs} runs, {self._bytes} bytes>"

    def statistics(self) -> dict[str, float]:
        """Return how much was copied so far."""
        return {
            "copied_runs": self._runs,
            "copied_bytes": self._bytes,
            "throttled_seconds": self._bucket.waited_s,
        }

    async def copy(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        spans: Spans,
        target: NodeId,
        *,
        on_damage: OnDamage,
    ) -> None:
        """Write the runs that hold ``spans`` to ``target``; raises what keeps it from that.

        ``on_damage`` learns of copies that could not be read from meanwhile.
        """
        if not spans:
            return
        handle = Tier1ReadHandle(
            ledger_id, metadata, self._nodes, keys=self._keys, on_damage=on_damage
        )
        await self._confirm(ledger_id, metadata)
        client = await self._nodes.client(target)
        try:
            for span in spans:
                await self._copy_span(handle, client, span)
        except _NotTakenError as error:
            await self._nodes.report_failed(target, client)
            raise RetryableError(
                f"node {target} did not take a copy of ledger {ledger_id}: {error}",
                reason=Reason.UNKNOWN,
                remedy="Nothing to do: it is asked again what it has",
            ) from error

    async def _confirm(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> None:
        """Tell the nodes of a ledger that is not closed what its metadata proves to be confirmed.

        A node that left its ensemble was never told of the last runs that it has. Asking it by a
        recovery read would fence it, and with it perhaps the ledger's writer.
        """
        if metadata.state is LedgerState.CLOSED:
            return
        *before, last = metadata.segments
        for node_id in sorted({node for segment in before for node in segment.ensemble}):
            try:
                client = await self._nodes.client(node_id)
            except RetryableError:
                continue
            client.confirm(ledger_id, EntryId(last.first_entry_id - 1))

    async def _copy_span(
        self, handle: Tier1ReadHandle[StorageNodeClient], client: StorageNodeClient, span: Span
    ) -> None:
        waiting: deque[tuple[int, Awaitable[None]]] = deque()
        waiting_bytes = 0
        read = handle.read_runs(*span, wait_s=CONFIRM_S_MAX)
        async with closing_runs(read):
            async for runs in read:
                for run in runs:
                    size = len(run.encoded)
                    await self._bucket.take(size)
                    waiting.append((size, client.add(run, recovery=True)))
                    waiting_bytes += size
                    while waiting_bytes > IN_FLIGHT_BYTES_MAX:
                        waiting_bytes -= await self._answered(*waiting.popleft())
        while waiting:
            await self._answered(*waiting.popleft())

    async def _answered(self, size: int, answer: Awaitable[None]) -> int:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await answer
        except TimeoutError:
            raise _NotTakenError(f"no answer within {ANSWER_S_MAX:g} s") from None
        except (RetryableError, IndeterminateError) as error:
            raise _NotTakenError(str(error)) from error
        self._runs += 1
        self._bytes += size
        return size


class _NotTakenError(Exception):
    """The target's fault, not that of who was read from."""
