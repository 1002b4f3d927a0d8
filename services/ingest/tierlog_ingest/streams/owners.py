"""The streams that this process owns or is about to own.

Owns: one ``StreamOwner`` a stream, made by the first append, by ``tend``, or where retention waits
for a checkpoint; their tasks; giving claims back when the node drains. Does not own the decision
to claim (``claims``).

Invariants:
    * At most one owner object a stream lives at a time.
    * An owner that ended takes no place: the next append decides anew who owns the stream.
    * At most ``streams_max`` streams; at most ``recoveries_max`` are recovered at once unasked.
    * A claim is released only after its owner ended: nothing is acknowledged by it any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import structlog

from tierlog.format.run import Run
from tierlog.model.attribute_record import holds_back
from tierlog.model.attributes import AppendCondition, AttributeKey
from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.node import NodeInfo
from tierlog.model.policy import PolicyLevels
from tierlog.model.position import Position
from tierlog.model.stream import Stream, StreamLifecycle
from tierlog.ports.spending import Cause, spending
from tierlog.ports.streams import Attachment, AttachOutcome, AttributeValues
from tierlog.ports.tracing import apart
from tierlog.ports.waiting import first_of
from tierlog_ingest.streams.appends import Answer, QueueBudget
from tierlog_ingest.streams.claims import Claims
from tierlog_ingest.streams.owner import StreamOwner
from tierlog_ingest.streams.ownership import (
    Elsewhere,
    Mine,
    is_orphan,
    no_owner_yet,
)
from tierlog_ingest.streams.parts import OwnerParts, OwnerState
from tierlog_ingest.streams.traces import AppendTraces

log = structlog.get_logger()

RECOVERIES_MAX: Final = 8
RECOVERY_SLOT_S_MAX: Final = 30.0
BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 5.0
TEND_AGAIN_S: Final = 5.0
"""So long an orphan is left to the node that is to own it before it is looked at again."""
FOLLOW_AGAIN_S: Final = 5.0
FIND_ROUNDS_MAX: Final = 3
DEPOSED_S_MAX: Final = 0.5
"""An owner that is asked who owns its stream waits that long for the metadata."""

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
        self._claims = Claims(parts.catalog, parts.node_id, answers=parts.answers)
        self._traces = AppendTraces(parts.tracer, parts.clock)
        self._recoveries_max = recoveries_max
        self._owners: dict[StreamName, StreamOwner] = {}
        self._lives: dict[StreamOwner, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = asyncio.Event()
        self._emptied = False
        self._look = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Owners {len(self._owners)} streams, {self._parts.budget.used} bytes wait>"

    def statistics(self) -> list[dict[str, object]]:
        """Return the state of each owned stream, by name."""
        return [self._owners[name].statistics() for name in sorted(self._owners)]

    async def run(self) -> None:
        """Hold the owners' tasks until ``drain`` or cancellation."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            attributes = self._parts.attributes
            crowd = None if attributes is None else attributes.crowd
            looking = None if crowd is None else tasks.create_task(crowd.run(), name="crowd")
            await self._stopping.wait()
            if looking is not None:
                looking.cancel()

    async def drain(self) -> None:
        """Hand everything over, and let ``run`` end once that is done.

        Cut short, it leaves what a crash leaves.
        """
        self.hand_over()
        self._stopping.set()

    def hand_over(self) -> None:
        """Take no more appends; answer those that are here, close every ledger, release claims.

        Whoever asks for a stream is sent to the node that is to own it.
        """
        self._claims.draining = True
        for owner in list(self._owners.values()):
            life = self._lives.get(owner)
            if owner.recovered.is_set() or life is None:
                owner.drain()
            else:
                # Whoever claims next recovers too, and maybe reaches what this node waits for.
                life.cancel()

    def take_again(self) -> None:
        """Own streams again after ``hand_over``; not after ``drain``."""
        self._claims.draining = self._stopping.is_set()

    def empty(self, emptied: bool) -> None:  # noqa: FBT001 - a state, given as it was found
        """Learn that this node is being emptied, or is not any more; ``tend`` acts on it."""
        self._emptied = emptied
        self._look.set()

    def _follow(self, nodes: Mapping[NodeId, NodeInfo]) -> None:
        """Hand streams over while the node is being emptied and others can have them."""
        own = self._parts.node_id
        others = any(not one.draining and one.node_id != own for one in nodes.values())
        hands_over = self._emptied and others
        if hands_over and not self._claims.draining:
            self.hand_over()
        elif self._claims.draining and not hands_over:
            self.take_again()

    @property
    def budget(self) -> QueueBudget:
        """The appends of all streams that have no answer yet, and how long answers took."""
        return self._parts.budget

    async def ready(self) -> None:
        """Wait until there is room for another append."""
        await self._parts.budget.ready()

    def submit(
        self,
        stream: StreamName,
        draft: Run,
        *,
        deadline_s: float | None = None,
        condition: AppendCondition | None = None,
    ) -> Answer:
        """Append to a stream, claiming it first if need be. Raises what is refused at once."""
        owner = self._owner(stream)
        answer = owner.submit(draft, deadline_s=deadline_s, condition=condition)
        return self._traces.watch(answer, owner, draft)

    async def seal(self, stream: StreamName) -> LedgerId | None:
        """Close the stream's open ledger; None: nothing was open."""
        return await self._owner(stream).seal()

    async def attach(self, stream: StreamName, wanted: Attachment) -> AttachOutcome:
        """Make staging ledgers part of a stream, claiming it first if need be."""
        return await self._owner(stream).attach(wanted)

    async def get_attributes(
        self, stream: StreamName, keys: Sequence[AttributeKey]
    ) -> AttributeValues:
        """Return those of the attributes that are there, claiming the stream first if need be."""
        return await (await self._owner(stream).attributes()).get(keys)

    async def list_attributes(
        self, stream: StreamName, first: AttributeKey, last: AttributeKey, limit: int
    ) -> AttributeValues:
        """Return the first ``limit`` attributes between two keys."""
        return await (await self._owner(stream).attributes()).listed(first, last, limit)

    def recovering(self) -> dict[str, str]:
        """Return what each recovery that does not go on waits for, by ledger."""
        waiting = self._parts.recovery.waiting
        return {str(ledger_id): waiting[ledger_id] for ledger_id in sorted(waiting)}

    async def find(self, name: StreamName) -> FoundOwner:
        """Return the stream's owner, which is this node where nobody else is to own it.

        A node that is named here answered just now; only its own word makes it the owner.
        """
        if self._claims.draining:
            return await self._named(name)
        for _ in range(FIND_ROUNDS_MAX):
            owner = self._owner(name)
            try:
                await owner.recovered.wait()
                if owner.failure is not None:
                    raise owner.failure
            except RetryableError as error:
                if error.reason is not Reason.NOT_OWNER or "wire_address" not in error.details:
                    raise
                return _found(error.details)
            if await self._is_deposed(owner):
                # It does not know yet, having nothing to write.
                await self._cut_off(owner)
            elif owner.state is not OwnerState.ENDED:
                return FoundOwner(owner_epoch=owner.owner_epoch)
        raise RetryableError(
            f"the owner of stream {name} changed {FIND_ROUNDS_MAX} times",
            remedy="Find the owner again",
        )

    async def _is_deposed(self, owner: StreamOwner) -> bool:
        """Tell whether the metadata names another claim than that of an owner that serves.

        Without the metadata the owner's own word counts: it goes on while its open ledger takes
        what it appends, and a fence tells it when it is deposed.
        """
        try:
            async with asyncio.timeout(DEPOSED_S_MAX):
                stream = await self._parts.catalog.streams.get(owner.name)
        except (RetryableError, TimeoutError):
            return False
        return owner.claimed is None or stream.owner != owner.claimed.owner

    async def _named(self, name: StreamName) -> FoundOwner:
        """Return the owner of a stream that this node must not claim."""
        stream = await self._let_go(name)
        verdict = await self._claims.verdict(stream)
        if isinstance(verdict, Elsewhere):
            return FoundOwner(owner_epoch=stream.owner_epoch, info=verdict.info)
        if isinstance(verdict, Mine):  # the drain was taken back meanwhile
            raise _takes_nothing()
        raise no_owner_yet(stream, verdict)

    async def _let_go(self, name: StreamName) -> Stream:
        """Release a claim of this node's last life, or of an owner that ended; return the stream.

        One that a living owner has is released by its end.
        """
        stream = await self._parts.catalog.streams.get(name)
        mine = stream.owner is not None and stream.owner.node_id == self._parts.node_id
        if not mine or name in self._owners:
            return stream
        return await self._parts.catalog.streams.release(stream)

    async def tend(self) -> None:
        """Recover streams unasked: those of this node's last life, then those of lost nodes.

        A ledger that nobody closes is never offloaded. Runs until it is cancelled, and hands all
        streams over while the node is being emptied.
        """
        await self.recover_own()
        watch = self._parts.catalog.nodes.watch_live
        before: frozenset[NodeId] = frozenset()
        unsettled = True
        while True:
            self._look.clear()
            watched = await self._until_answered("live nodes", watch)
            if watched is None:
                return
            nodes, changed = watched
            self._claims.notice(nodes)
            self._follow(nodes)
            if unsettled or before - nodes.keys():
                unsettled = not await self._adopt(nodes)
            before = frozenset(nodes)
            try:
                async with asyncio.timeout(TEND_AGAIN_S if unsettled else None):
                    await first_of(*changed, self._look)
            except TimeoutError:
                continue

    async def follow(self) -> None:
        """Have owners follow thresholds that change, and close streams that are being deleted.

        A ledger that is open then is sealed by its new age, not the one it was opened with. Runs
        until it is cancelled. Changes in a row cost one look.
        """
        while True:
            watched = await self._until_answered("thresholds", self._parts.catalog.policies.watch)
            if watched is None:
                return
            for owner in list(self._owners.values()):
                await self._until_answered(owner.name, owner.look_again)
            await watched[1].wait()
            await asyncio.sleep(self._parts.ids.uniform(0.5, 1.0) * FOLLOW_AGAIN_S)

    async def see_to_checkpoints(self) -> None:
        """Own streams of nobody whose retention waits for a checkpoint, so that they get one.

        Their owner ended before its last one was there, as while tier 2 was away; whoever owns one
        of them flushes. Runs until it is cancelled.
        """
        if self._parts.attributes is None:
            return
        interval_s = self._parts.attributes.settings.checkpoint_interval_s
        while not self._stopping.is_set():
            await asyncio.sleep(interval_s)
            levels = await self._until_answered("thresholds", self._parts.catalog.policies.levels)
            if levels is not None:
                await self._each_stream(partial(self._own_if_unflushed, levels))

    async def _own_if_unflushed(self, levels: PolicyLevels, name: StreamName) -> bool:
        """Own a stream that is idle, is this node's to own, and whose end is in no checkpoint."""
        if name in self._owners or self._claims.draining:
            return True
        catalog = self._parts.catalog
        stream = await catalog.streams.get(name)
        last = stream.ledgers[-1] if stream.ledgers else None
        if last is None or not last.closed or stream.lifecycle is StreamLifecycle.DELETING:
            return True
        if not levels.effective(name, stream.policy).trims:
            return True
        record = await catalog.attributes.peek(name)
        end = Position(last.ledger_id, last.last_entry_id)
        if holds_back(record, None, end, is_copied=False) is None:
            return True
        if isinstance(await self._claims.verdict(stream), Mine):
            log.info("owner.checkpoint_missing", stream=name, end=str(end))
            await self._recover(name)
        return True

    async def recover_own(self) -> None:
        """Claim and recover what this node owned before it crashed, without waiting for appends."""
        await self._each_stream(self._recover_if_own)

    async def _recover_if_own(self, name: StreamName) -> bool:
        stream = await self._parts.catalog.streams.get(name)
        mine = stream.owner is not None and stream.owner.node_id == self._parts.node_id
        if mine and stream.ledgers and not stream.ledgers[-1].closed:
            await self._recover(name)
        return True

    async def _adopt(self, nodes: Mapping[NodeId, NodeInfo]) -> bool:
        """Recover the orphans that this node is to own; tell whether no other one is left."""

        async def one(name: StreamName) -> bool:
            stream = await self._parts.catalog.streams.get(name)
            if name in self._owners or not is_orphan(stream, nodes):
                return True
            if not isinstance(await self._claims.verdict(stream), Mine):
                return False
            await self._recover(name)
            return True

        return await self._each_stream(one)

    async def _recover(self, name: StreamName) -> None:
        """Own a stream until nothing of it is left to recover; raises what is in the way."""
        owner = self._owner(name)
        try:
            async with asyncio.timeout(RECOVERY_SLOT_S_MAX):
                await owner.recovered.wait()
        except TimeoutError:
            # It waits for a node, says so, and goes on by itself; others get the slot.
            return
        if owner.failure is not None and owner.failure.reason is not Reason.NOT_OWNER:
            raise owner.failure

    async def _each_stream(self, work: Callable[[StreamName], Awaitable[bool]]) -> bool:
        """Do ``work`` for every stream, some at once; tell whether it was done for all.

        Metadata that can't be read is asked again.
        """
        slots = asyncio.Semaphore(self._recoveries_max)
        settled: list[bool] = []

        async def one(name: StreamName) -> None:
            async with slots:
                settled.append(await self._until_answered(name, lambda: work(name)) is not False)

        names = await self._until_answered("all streams", self._parts.catalog.streams.names)
        async with asyncio.TaskGroup() as tasks:
            for name in names or ():
                tasks.create_task(one(name))
        return all(settled)

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
        if self._tasks is None or self._claims.draining:
            raise _takes_nothing()
        streams_max = self._parts.settings.streams_max
        if len(self._owners) >= streams_max:
            raise RetryableError(
                f"this node owns {streams_max} streams, which is its limit",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy="Start another ingest node, or raise ingest.owner.streams_max",
                details={"budget": "owner.streams_max"},
            )
        owner = StreamOwner(name, self._parts, self._claims)
        running = self._run_owner(owner)
        try:
            self._tasks.create_task(running, context=apart())
        except RuntimeError as error:  # the group has ended, and requests still come in
            running.close()
            raise RetryableError("the node stops", remedy="Use another node") from error
        self._owners[name] = owner
        return owner

    async def _run_owner(self, owner: StreamOwner) -> None:
        try:
            # All that an owner asks of the store is for attributes, ledgers' copies too.
            with spending(Cause.ATTRIBUTES, owner.name):
                async with asyncio.TaskGroup() as life:
                    # A task of its own, that can be cut off alone.
                    self._lives[owner] = life.create_task(owner.run())
        finally:
            # One that was cut off before its first step has not answered.
            owner.give_up()
            self._lives.pop(owner, None)
            if self._owners.get(owner.name) is owner:
                del self._owners[owner.name]
        if self._claims.draining and owner.claimed is not None:
            await self._release(owner.claimed)

    async def _release(self, claimed: Stream) -> None:
        """Let another node claim at once. Not done: the next one waits until this one is gone."""
        try:
            await self._parts.catalog.streams.release(claimed)
        except TierlogError as error:
            log.warning("claim.not_released", stream=claimed.name, cause=str(error))
        else:
            log.info("claim.released", stream=claimed.name, epoch=claimed.owner_epoch)

    async def _cut_off(self, owner: StreamOwner) -> None:
        """End an owner where it is, as a crash would, and wait until it has ended."""
        life = self._lives.get(owner)
        if life is not None:
            life.cancel()
            await asyncio.wait({life})


def _takes_nothing() -> RetryableError:
    return RetryableError(
        "this node takes no appends: it starts or shuts down",
        remedy="Nothing was appended; find the stream's owner and retry",
    )


def _found(details: Mapping[str, str]) -> FoundOwner:
    """Read what NOT_OWNER says of the owner."""
    info = NodeInfo(
        node_id=NodeId(details["owner"]),
        wire_address=details["wire_address"],
        grpc_address=details["grpc_address"],
        http_address=details["http_address"],
    )
    return FoundOwner(owner_epoch=int(details["owner_epoch"]), info=info)
