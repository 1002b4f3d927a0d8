"""The streams that this process owns or is about to own.

Owns: one ``StreamOwner`` a stream, made by the first append or after a restart; their tasks.

Invariants:
    * At most one owner object a stream lives at a time.
    * An owner that ended takes no place: the next append decides anew who owns the stream.
    * At most ``streams_max`` streams; at most ``recoveries_max`` are recovered at once at start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from tierlog.format.run import Run
from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.node import NodeInfo
from tierlog_ingest.streams.appends import Answer
from tierlog_ingest.streams.owner import OwnerParts, OwnerState, StreamOwner

log = structlog.get_logger()

RECOVERIES_MAX: Final = 8
RECOVERY_SLOT_S_MAX: Final = 30.0
BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 5.0

Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOwner:
    """Who owns a stream; ``info`` None: this very node."""

    owner_epoch: int
    info: NodeInfo | None = None


class Owners:
    """Finds or makes the owner of a stream. ``run`` must be running while it is used."""

    def __init__(self, parts: OwnerParts, *, recoveries_max: int = RECOVERIES_MAX) -> None:
        self._parts = parts
        self._recoveries_max = recoveries_max
        self._owners: dict[StreamName, StreamOwner] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Owners {len(self._owners)} streams, {self._parts.budget.used} bytes wait>"

    def statistics(self) -> list[dict[str, object]]:
        """Return the state of each owned stream, by name."""
        return [self._owners[name].statistics() for name in sorted(self._owners)]

    async def run(self) -> None:
        """Hold the owners' tasks until ``drain`` or cancellation."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._stopping.wait()

    async def drain(self) -> None:
        """Take no more appends; answer those that are here, and close every open ledger.

        Ends when all owners ended. Cut short, it leaves what a crash leaves.
        """
        for owner in self._owners.values():
            owner.drain()
        self._stopping.set()

    async def ready(self) -> None:
        """Wait until there is room for another append."""
        await self._parts.budget.ready()

    def submit(self, stream: StreamName, draft: Run, *, deadline_s: float | None = None) -> Answer:
        """Append to a stream, claiming it first if need be. Raises what is refused at once."""
        return self._owner(stream).submit(draft, deadline_s=deadline_s)

    async def seal(self, stream: StreamName) -> LedgerId | None:
        """Close the stream's open ledger; None: nothing was open."""
        return await self._owner(stream).seal()

    def recovering(self) -> dict[str, str]:
        """Return what each recovery that does not go on waits for, by ledger."""
        waiting = self._parts.recovery.waiting
        return {str(ledger_id): waiting[ledger_id] for ledger_id in sorted(waiting)}

    async def find(self, stream: StreamName) -> FoundOwner:
        """Return the stream's owner, which is this node where nobody alive owns it yet."""
        try:
            owner = self._owner(stream)
            await owner.recovered.wait()
            if owner.failure is not None:
                raise owner.failure
        except RetryableError as error:
            if error.reason is not Reason.NOT_OWNER or "wire_address" not in error.details:
                raise
            return _found(error.details)
        return FoundOwner(owner_epoch=owner.owner_epoch)

    async def recover_own(self) -> None:
        """Claim and recover what this node owned before it crashed, without waiting for appends.

        Metadata that can't be read is asked again: a ledger that nobody closes is never offloaded.
        """
        slots = asyncio.Semaphore(self._recoveries_max)

        async def one(name: StreamName) -> None:
            async with slots:
                await self._until_answered(name, lambda: self._recover_if_own(name))

        names = await self._until_answered("all streams", self._parts.catalog.streams.names)
        async with asyncio.TaskGroup() as tasks:
            for name in names or ():
                tasks.create_task(one(name))

    async def _recover_if_own(self, name: StreamName) -> None:
        """Recover a stream that this node owned; raises what kept it from that for now."""
        snapshot = await self._parts.catalog.streams.snapshot(name)
        claimant = snapshot.stream.owner
        mine = claimant is not None and claimant.node_id == self._parts.node_id
        if mine and not all(ledger.closed for ledger in snapshot.ledgers):
            owner = self._owner(name)
            try:
                async with asyncio.timeout(RECOVERY_SLOT_S_MAX):
                    await owner.recovered.wait()
            except TimeoutError:
                # It waits for a node, says so, and goes on by itself; others get the slot.
                return
            if owner.failure is not None:
                raise owner.failure

    async def _until_answered(
        self, what: str, ask: Callable[[], Awaitable[Answered]]
    ) -> Answered | None:
        """Ask until there is an answer; None: it was refused, or the node shuts down."""
        backoff_s = BACKOFF_S_FIRST
        while not self._stopping.is_set():
            try:
                return await ask()
            except (RetryableError, IndeterminateError) as error:
                log.warning("owner.not_recovered", stream=what, cause=str(error))
            except TierlogError as error:
                log.warning("owner.left_alone", stream=what, cause=str(error))
                return None
            await asyncio.sleep(self._parts.ids.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)
        return None

    def _owner(self, name: StreamName) -> StreamOwner:
        found = self._owners.get(name)
        if found is not None and found.state is not OwnerState.ENDED:
            return found
        if self._tasks is None or self._stopping.is_set():
            raise RetryableError(
                "this node takes no appends: it starts or shuts down",
                remedy="Nothing was appended; find the stream's owner and retry",
            )
        streams_max = self._parts.settings.streams_max
        if len(self._owners) >= streams_max:
            raise RetryableError(
                f"this node owns {streams_max} streams, which is its limit",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy="Start another ingest node, or raise ingest.owner.streams_max",
                details={"budget": "owner.streams_max"},
            )
        owner = StreamOwner(name, self._parts)
        running = self._run_owner(owner)
        try:
            self._tasks.create_task(running)
        except RuntimeError as error:  # the group has ended, and requests still come in
            running.close()
            raise RetryableError("the node stops", remedy="Use another node") from error
        self._owners[name] = owner
        return owner

    async def _run_owner(self, owner: StreamOwner) -> None:
        try:
            await owner.run()
        finally:
            if self._owners.get(owner.name) is owner:
                del self._owners[owner.name]


def _found(details: Mapping[str, str]) -> FoundOwner:
    """Read what NOT_OWNER says of the owner."""
    info = NodeInfo(
        node_id=NodeId(details["owner"]),
        wire_address=details["wire_address"],
        grpc_address=details["grpc_address"],
        http_address=details["http_address"],
    )
    return FoundOwner(owner_epoch=int(details["owner_epoch"]), info=info)
