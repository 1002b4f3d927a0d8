"""Reads a ledger's runs from tier 1, from any node that holds them (seeds/000, "ReadHandle").

Owns the choice of the node and going on with another one. Does not own who decides to read tier 1,
nor caching, nor the repair of a damaged copy: it is reported.

Invariants:
    * Runs come in order and without a gap: each begins where the one before it ended. Only the
      first may begin before the entry that was asked for, since runs are whole.
    * An entry of a closed ledger that no node gives is UNKNOWN, never absent.
    * A damaged run is never yielded: its replica is passed over for another one. Neither is one
      that is not signed with the ledger's key; without that key there is no handle.
    * Runs come in lists, never in an empty one.
    * What was given up with an admin's consent is CORRUPT, and nothing behind it passes for it.

Retries: the fastest replica is asked first, and the next one beside it once that takes long; the
first answer counts. Each replica of a write set is asked once for an entry before it is UNKNOWN.
Cancellation: replicas that are not needed any more are let go before their answer.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from tierlog.format.run import Run
from tierlog.ledger.directory import NodeDirectory, is_gone
from tierlog.ledger.keys import NO_KEYS, LedgerKeys, authentic
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.ports.storage_node import LacAnswer, StorageNodeControl
from tierlog.ports.waiting import Helpers

log = structlog.get_logger()

Node = TypeVar("Node", bound=StorageNodeControl)

OnDamage = Callable[[LedgerId, NodeId, EntryId | None], None]
"""Takes notice that a node has the run of an entry damaged, or (None) lacks runs. Must not wait."""
Pace = Callable[[int], Awaitable[None]]
"""Waits until as many bytes as came may be followed by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """Every bound of a handle."""

    bytes_max: int = 64 * 1024 * 1024
    """Bytes asked of a node at once where the caller names no budget."""
    speculate_s: float = 0.5
    """A replica that has not answered so long has the next one asked beside it, until it is
    known how long it takes: then it has ``speculate_factor`` times that, within these bounds."""
    speculate_factor: float = 3.0
    speculate_s_min: float = 0.05
    speculate_s_max: float = 2.0
    wait_speculate_s_max: float = 1.0
    """Of the time that a read may wait at the tail, so much at most comes on top of that."""
    stall_s: float = 5.0
    """A replica that stops in the middle for so long is left."""
    lac_patience_s: float = 0.2
    """So long the first answer to where a ledger ends waits for the others."""


DEFAULT_LIMITS = ReaderLimits()


def log_damage(ledger_id: LedgerId, node_id: NodeId, entry_id: EntryId | None) -> None:
    """Say that a copy is damaged or missing, where nobody repairs it."""
    log.warning("replica.damaged", ledger_id=ledger_id, node_id=node_id, entry_id=entry_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEnd:
    """What the nodes of a ledger know of its end; -1 where they know none."""

    last_add_confirmed: EntryId
    last_entry_id: EntryId
    """The last one that any of those who answered has, confirmed or not."""
    covered: bool
    """So many answered, and without doubt, that no acknowledged entry is behind that one."""


@dataclass(slots=True)
class _Wanted:
    """What a handle asks of replicas, and what they answered."""

    first: EntryId
    last: EntryId
    bytes_max: int
    wait_until_s: float
    trouble: list[TierlogError]

    @property
    def wait_s(self) -> float:
        return max(0.0, self.wait_until_s - asyncio.get_running_loop().time())


@dataclass(slots=True)
class _Reading:
    """A read that has begun to come."""

    node_id: NodeId
    head: Sequence[Run]
    rest: AsyncGenerator[Sequence[Run], None]


class ReadHandle(Protocol):
    """A readable ledger, whichever tier holds it; the caller only chooses which to construct."""

    @property
    def ledger_id(self) -> LedgerId:
        """The ledger's id."""
        ...

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        """The ledger's metadata as of when the handle was made."""
        ...

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry that may be read; -1: none."""
        ...

    def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """Iterate over the whole runs that hold these entries, both ends included.

        They come in lists, as large as they were read, and never in an empty one.

        Ends early once ``bytes_max`` is reached, but not before one run. Behind the LAC of an
        open ledger it waits up to ``wait_s``, then raises NOT_YET.
        """
        ...

    async def close(self) -> None:
        """Give back what the handle holds."""
        ...


class Tier1ReadHandle(Generic[Node]):
    """A ledger on storage nodes. Making one raises PERMISSION_DENIED without the ledger's key."""

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        nodes: NodeDirectory[Node],
        *,
        keys: LedgerKeys = NO_KEYS,
        limits: ReaderLimits = DEFAULT_LIMITS,
        on_damage: OnDamage = log_damage,
        pace: Pace | None = None,
    ) -> None:
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._nodes = nodes
        self._key = keys.of(ledger_id, metadata)
        self._limits = limits
        self._on_damage = on_damage
        self._pace = pace

    def __repr__(self) -> str:
        return f"<Tier1ReadHandle {self._ledger_id} {self._metadata.state.name}>"

    @property
    def ledger_id(self) -> LedgerId:
        return self._ledger_id

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        return self._metadata

    @property
    def _closed(self) -> bool:
        return self._metadata.state is LedgerState.CLOSED

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry of a closed ledger, else the highest LAC that a node knows.

        A node that is slow to answer is not waited for once another one has.
        """
        return (await self._ask_end(covering=False)).last_add_confirmed

    async def end(self) -> KnownEnd:
        """Return the last entry of a closed ledger, else the most that its nodes know of its end.

        A node that is slow to answer is not waited for once enough others have.
        """
        return await self._ask_end(covering=True)

    async def _ask_end(self, *, covering: bool) -> KnownEnd:
        if self._closed:
            last = self._metadata.last_entry_id
            return KnownEnd(last_add_confirmed=last, last_entry_id=last, covered=True)
        known: dict[NodeId, LacAnswer] = {}
        trouble: list[TierlogError] = []
        loop = asyncio.get_running_loop()
        async with Helpers() as tasks:
            asked = {
                tasks.spawn(self._ask_lac(node_id, known, trouble)): node_id
                for node_id in self._metadata.segments[-1].ensemble
            }
            known_s: float | None = None
            while asked:
                if known and known_s is None:
                    known_s = loop.time()
                enough = self._is_covered(known) if covering else bool(known)
                if enough and all(map(self._nodes.failed_lately, asked.values())):
                    break
                left_s = None
                if known_s is not None:
                    left_s = max(0.0, known_s + self._limits.lac_patience_s - loop.time())
                done, _ = await asyncio.wait(
                    asked, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    for node_id in asked.values():
                        self._nodes.failed(node_id)
                    break
                for task in done:
                    del asked[task]
        if not known:
            raise RetryableError(
                f"no storage node of ledger {self._ledger_id} says where it ends",
                reason=Reason.UNKNOWN,
                remedy="Check that the ledger's storage nodes are up",
            ) from trouble[0]
        # A segment begins behind the LAC of its time, which its own nodes may not have been told.
        before = EntryId(self._metadata.segments[-1].first_entry_id - 1)
        return KnownEnd(
            last_add_confirmed=max(before, *(one.last_add_confirmed for one in known.values())),
            last_entry_id=max(before, *(one.last_entry_id for one in known.values())),
            covered=self._is_covered(known),
        )

    def _is_covered(self, known: Mapping[NodeId, LacAnswer]) -> bool:
        """Tell whether no acknowledged entry is behind the last one of all who answered."""
        return self._metadata.is_covered([one for one in known if not known[one].doubtful])

    async def _ask_lac(
        self, node_id: NodeId, known: dict[NodeId, LacAnswer], trouble: list[TierlogError]
    ) -> None:
        client: Node | None = None
        try:
            client = await self._nodes.client(node_id)
            known[node_id] = await client.last_add_confirmed(self._ledger_id)
        except TierlogError as error:
            trouble.append(error)
            await self._drop(node_id, client, error)

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """See ``ReadHandle``."""
        if self._closed and last > self._metadata.last_entry_id:
            raise _no_such_entry(self._ledger_id, last, self._metadata.last_entry_id)
        wait_until_s = asyncio.get_running_loop().time() + (0.0 if self._closed else wait_s)
        position, budget = first, bytes_max
        while position <= last and (budget is None or budget > 0):
            wanted = _Wanted(
                position,
                min(last, self._together(position)),
                self._limits.bytes_max if budget is None else budget,
                wait_until_s,
                [],
            )
            reading = await self._begin_fastest(wanted)
            if reading is None:
                raise self._unreadable(position, wanted.trouble)
            runs: Sequence[Run] | None = reading.head
            try:
                while runs is not None:
                    position = EntryId(runs[-1].last_entry_id + 1)
                    if budget is None:
                        yield runs
                    else:
                        within, budget = runs_within(runs, budget)
                        yield within
                        if budget <= 0:
                            return
                    if self._pace is not None:
                        await self._pace(sum(len(run.encoded) for run in runs))
                    runs = await self._next(reading)
            finally:
                await reading.rest.aclose()

    def _together(self, position: EntryId) -> EntryId:
        """Return the last entry that is to be asked for along with ``position``."""
        end = self._metadata.segment_end(position)
        for lost_first, lost_last in self._metadata.lost:
            if lost_first <= position <= lost_last:
                raise _lost(self._ledger_id, lost_first, lost_last)
            if position < lost_first:
                return min(end, EntryId(lost_first - 1))
        return end

    async def _begin_fastest(self, wanted: _Wanted) -> _Reading | None:
        """Return the read that came first of those from the write set; None: none came."""
        left = self._nodes.fastest_first(self._metadata.write_set(wanted.first))
        if len(left) == 1:
            return await self._begin(left[0], wanted)
        begun: list[asyncio.Task[_Reading | None]] = []
        best: _Reading | None = None
        try:
            async with Helpers() as tasks:
                pending: set[asyncio.Task[_Reading | None]] = set()
                while best is None and (left or pending):
                    delay_s = None
                    if left:
                        node_id = left.pop(0)
                        begun.append(tasks.spawn(self._begin(node_id, wanted)))
                        pending.add(begun[-1])
                        delay_s = self._delay_s(node_id, wanted) if left else None
                    done, pending = await asyncio.wait(
                        pending, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    best = next((one.result() for one in done if one.result()), None)
        finally:
            # Whoever came second, or came when nobody waited any more, is let go.
            for task in begun:
                came = task.done() and not task.cancelled() and not task.exception()
                reading = task.result() if came else None
                if reading is not None and reading is not best:
                    await reading.rest.aclose()
        return best

    def _delay_s(self, node_id: NodeId, wanted: _Wanted) -> float:
        """Return how long a node may be silent before the next one is asked."""
        limits = self._limits
        delay_s, expected_s = limits.speculate_s, self._nodes.expected_s(node_id)
        if expected_s is not None:
            delay_s = max(limits.speculate_factor * expected_s, limits.speculate_s_min)
        waits_s = min(wanted.wait_s, limits.wait_speculate_s_max)
        return min(delay_s, limits.speculate_s_max) + waits_s

    async def _begin(self, node_id: NodeId, wanted: _Wanted) -> _Reading | None:
        """Return a node's read with its first runs; None: it has none, see its trouble."""
        loop = asyncio.get_running_loop()
        begun_s, waits = loop.time(), wanted.wait_s > 0
        rest = self._read_node(node_id, wanted)
        try:
            head = await anext(rest, None)
        except asyncio.CancelledError:
            if not waits:
                self._nodes.silent(node_id, loop.time() - begun_s)
            raise
        if head is None:
            return None
        if not waits:
            self._nodes.answered(node_id, loop.time() - begun_s)
        return _Reading(node_id, head, rest)

    async def _next(self, reading: _Reading) -> Sequence[Run] | None:
        """Return what comes next of a read; None: that was all, or it stopped coming."""
        stall_s = self._limits.stall_s
        try:
            async with asyncio.timeout(stall_s):
                return await anext(reading.rest, None)
        except TimeoutError:
            log.warning("replica.stalled", ledger_id=self._ledger_id, node_id=reading.node_id)
            self._nodes.silent(reading.node_id, stall_s)
            return None

    async def _read_node(
        self, node_id: NodeId, wanted: _Wanted
    ) -> AsyncGenerator[Sequence[Run], None]:
        """Yield what one node has of what is wanted, without a gap; note why it ended."""
        expected = first = wanted.first
        # A node knows no LAC behind its last run; of a closed ledger the metadata is the end, and
        # the fence that comes with a recovery read changes nothing any more.
        for recovery in (False, True) if self._closed else (False,):
            client: Node | None = None
            try:
                client = await self._nodes.client(node_id)
                read = client.read(
                    self._ledger_id,
                    first,
                    last_entry_id=wanted.last,
                    bytes_max=wanted.bytes_max,
                    wait_s=wanted.wait_s,
                    recovery=recovery,
                )
                async with closing_runs(read):
                    async for runs in read:
                        good, damage = self._good(runs, expected, wanted)
                        if good:
                            expected = EntryId(good[-1].last_entry_id + 1)
                            yield good
                        if damage is not None:
                            raise damage
                        if expected > wanted.last or len(good) < len(runs):
                            break
            except TierlogError as error:
                wanted.trouble.append(error)
                answers = error.reason in _ANSWERS
                if not answers or (recovery and expected == first):
                    await self._give_up(node_id, client, expected, error)
                if not answers:
                    return
            if expected > first:
                return

    def _good(
        self, runs: Sequence[Run], expected: EntryId, wanted: _Wanted
    ) -> tuple[Sequence[Run], CorruptError | None]:
        """Return the runs up to the first that is not what is expected, and why if damage is."""
        at_start = expected == wanted.first
        return authentic(self._following(runs, expected, wanted.last, at_start=at_start), self._key)

    async def _give_up(
        self, node_id: NodeId, client: Node | None, entry_id: EntryId, error: TierlogError
    ) -> None:
        """Take notice that a replica did not give what it should have."""
        log.warning(
            "replica.unreadable",
            ledger_id=self._ledger_id,
            node_id=node_id,
            entry_id=entry_id,
            cause=str(error),
        )
        if error.reason is Reason.NO_SUCH_ENTRY:
            self._on_damage(self._ledger_id, node_id, None)
        elif _is_damage(error):
            self._on_damage(self._ledger_id, node_id, entry_id)
        await self._drop(node_id, client, error)

    async def _drop(self, node_id: NodeId, client: Node | None, error: TierlogError) -> None:
        """Have this node asked last for a while, by another connection if this one is gone."""
        if error.reason not in _ANSWERS:
            self._nodes.failed(node_id)
        if client is not None and is_gone(error):
            await self._nodes.report_failed(node_id, client)

    def _following(
        self, runs: Sequence[Run], expected: EntryId, last: EntryId, *, at_start: bool
    ) -> Sequence[Run]:
        """Return the runs up to the first that does not follow, or lies behind ``last``."""
        for count, run in enumerate(runs):
            header = run.header
            first, following = header.first_entry_id, header.first_entry_id + header.count
            follows = first == expected or (at_start and first < expected < following)
            if not follows or expected > last or header.ledger_id != self._ledger_id:
                return runs[:count]
            expected, at_start = EntryId(following), False
        return runs

    def _unreadable(self, position: EntryId, trouble: list[TierlogError]) -> TierlogError:
        """Say what it means that no node of a write set gave the entry."""
        not_yet = next((one for one in trouble if one.reason is Reason.NOT_YET), None)
        cause = "; ".join(str(one) for one in trouble) or "the replicas end before it"
        if not self._closed and not_yet is not None:
            return not_yet
        return RetryableError(
            f"entry {self._ledger_id}:{position} could not be read from tier 1: {cause}",
            reason=Reason.UNKNOWN,
            remedy="Check the ledger's storage nodes; it is not known to be lost",
            details={"ledger_id": str(self._ledger_id), "entry_id": str(position)},
        )

    async def close(self) -> None:
        """Nothing is held: connections belong to the directory."""


def runs_within(runs: Sequence[Run], bytes_max: int) -> tuple[Sequence[Run], int]:
    """Return the runs up to the one that reaches ``bytes_max``, and what is left of that."""
    for count, run in enumerate(runs, 1):
        bytes_max -= len(run.encoded)
        if bytes_max <= 0:
            return runs[:count], bytes_max
    return runs, bytes_max


@asynccontextmanager
async def closing_runs(runs: AsyncIterator[Sequence[Run]]) -> AsyncIterator[None]:
    """End an iteration over runs at once, where it is left early, and not some time later."""
    try:
        yield
    finally:
        if isinstance(runs, AsyncGenerator):
            await runs.aclose()


_ANSWERS = frozenset({Reason.NO_SUCH_ENTRY, Reason.NOT_YET})


def _is_damage(error: TierlogError) -> bool:
    """Tell whether it is the copy that is bad, and not the way to it."""
    said_by_node = error.reason is Reason.UNKNOWN and "entry_id" in error.details
    return isinstance(error, CorruptError) or said_by_node


def _lost(ledger_id: LedgerId, first: EntryId, last: EntryId) -> CorruptError:
    return CorruptError(
        f"entries {first} to {last} of ledger {ledger_id} were lost, and given up by an admin",
        remedy=f"Read on from {ledger_id}:{last + 1}",
        details={
            "ledger_id": str(ledger_id),
            "first_entry_id": str(first),
            "last_entry_id": str(last),
        },
    )


def _no_such_entry(ledger_id: LedgerId, entry_id: EntryId, last: EntryId) -> RefusedError:
    has = f"its last entry is {last}" if last > NO_ENTRY else "it is empty"
    return RefusedError(
        f"ledger {ledger_id} has no entry {entry_id}, {has}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="Read within the ledger, or go on with the next one",
        details={"ledger_id": str(ledger_id), "entry_id": str(entry_id)},
    )
