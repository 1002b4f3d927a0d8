"""One stream that this process owns, from its claim to stepping down.

Owns the order of things: claim, recover what is not closed, then ledger after ledger. Does not
own ids and quorums inside a ledger (``LedgerWriter``) nor the decision to claim (``ownership``).

Invariants:
    * Nothing is written before every ledger of the stream is closed; at most one is open.
    * A ledger's first entry is sent only after the ledger before it was CLOSED.
    * After a conflict (FENCED) the stream's metadata is read first: another owner means stepping
      down, with every sent append indeterminate and every other one NOT_OWNER.
    * A broken writer's ledger is recovered and closed before anything else is sent.
    * Staging ledgers are attached while none is open, and what waits is sent behind them.

Retries: metadata that can't be reached is asked again with back-off; appends wait no longer than
their deadline. Cancellation leaves what a crash leaves: an open ledger that the next owner, maybe
this process, recovers. ``drain`` leaves none.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import structlog

from tierlog.catalog.naming import NodeRetiredError
from tierlog.catalog.streams import StreamSnapshot, check_owner
from tierlog.format.run import Run
from tierlog.ledger.ensemble_change import Clients, Ensembles
from tierlog.ledger.writer import LedgerWriter
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.node import NodeInfo
from tierlog.model.position import Position
from tierlog.model.stream import Stream, StreamLifecycle
from tierlog.ports.streams import Attachment, AttachOutcome
from tierlog_ingest.streams.appends import (
    ENTRY_LEN_SURE,
    Answer,
    AppendQueue,
    largest_entry_len,
    not_sent,
)
from tierlog_ingest.streams.attaching import Attaching, attach_next, is_there, survey
from tierlog_ingest.streams.attributes.gate import AttributeGate
from tierlog_ingest.streams.attributes.keeper import AttributeKeeper
from tierlog_ingest.streams.attributes.state import AttributeState
from tierlog_ingest.streams.claims import Claims
from tierlog_ingest.streams.entry_len import check_entry_len, too_large
from tierlog_ingest.streams.opening import LedgerOpener, OpenLedger, block_size_of
from tierlog_ingest.streams.ownership import going_away, not_owner
from tierlog_ingest.streams.parts import OwnerParts, OwnerState
from tierlog_ingest.streams.rollover import LedgerLimits, fitting
from tierlog_ingest.streams.sealing import Seals
from tierlog_ingest.streams.traces import closing

log = structlog.get_logger()

Result = TypeVar("Result")

WAKE_S_MIN: Final = 0.001
BACKOFF_S_FIRST: Final = 0.05
BACKOFF_S_MAX: Final = 2.0


class StreamOwner:
    """Owns, or tries to own, one stream. ``run`` is its life; it ends when it steps down."""

    def __init__(self, name: StreamName, parts: OwnerParts, claims: Claims) -> None:
        self.name = name
        self.state = OwnerState.CLAIMING
        self.failure: TierlogError | None = None
        """Why it ended; None while it lives, or after a drain."""
        self.recovered = asyncio.Event()
        """Set once the stream has no ledger left to recover, or the owner ended."""
        self._parts = parts
        self._claims = claims
        self._opener = LedgerOpener(
            catalog=parts.catalog,
            ensembles=Ensembles(parts.catalog, parts.nodes, preferred=parts.node_id),
            clock=parts.clock,
            keys=parts.keys,
            settings=parts.settings,
        )
        self._wake = asyncio.Event()
        self._queue = AppendQueue(parts.budget, wake=self._wake.set)
        self._gate = AttributeGate(give_back=self._queue.give_back, wake=self._look_at_attributes)
        self._queue.gate = self._gate
        self._keeper: AttributeKeeper | None = None
        self._rebuilt = asyncio.Event()
        """Set while the attributes are those of the stream, and once the owner ended."""
        self._claimed: Stream | None = None
        self._open: OpenLedger | None = None
        self._seals = Seals(name, self._queue, wake=self._wake.set)
        self._attaches: deque[Attaching] = deque()
        self._draining = False
        self._block_size: int | None = None

    def __repr__(self) -> str:
        return f"<StreamOwner {self.name} {self.state.value} {self._queue!r} {self._open!r}>"

    def statistics(self) -> dict[str, object]:
        """Return what people ask of a stream's owner."""
        writer = self._open.writer if self._open else None
        return {
            "stream": self.name,
            "state": self.state.value,
            "owner_epoch": self._claimed.owner_epoch if self._claimed else None,
            "open_ledger": writer.ledger_id if writer else None,
            "last_add_confirmed": writer.last_add_confirmed if writer else None,
            "ledger_entries": writer.entry_count if writer else 0,
            "ledger_bytes": writer.length if writer else 0,
            "in_flight_bytes": writer.in_flight_bytes if writer else 0,
            "appends_waiting": self._queue.waiting_count,
            "appends_sent": self._queue.sent_count,
            **self._gate.statistics(),
            "trouble": self._queue.trouble,
        }

    @property
    def claimed(self) -> Stream | None:
        """The stream as of this owner's claim; None before it."""
        return self._claimed

    @property
    def owner_epoch(self) -> int:
        """The claim's epoch; 0 before the claim."""
        return self._claimed.owner_epoch if self._claimed else 0

    def submit(
        self, draft: Run, *, deadline_s: float | None, condition: AppendCondition | None = None
    ) -> Answer:
        """Queue an append; its answer is a list of ranges or an error. Raises what is at once."""
        if self.state is OwnerState.ENDED or self._draining:
            raise self.failure or going_away(self.name)
        limit = self._parts.entry_len_max
        largest = largest_entry_len(draft, sure=min(limit, ENTRY_LEN_SURE))
        if largest > limit:
            raise too_large(largest, limit, "raise wire.frame_bytes_max on all nodes")
        if self._block_size is not None:
            check_entry_len(largest, self._block_size)
        timeout_s = self._parts.settings.append_timeout_s
        if deadline_s is not None:
            timeout_s = min(timeout_s, deadline_s)
        return self._queue.add(draft, entry_len=largest, timeout_s=timeout_s, condition=condition)

    async def attributes(self) -> AttributeKeeper:
        """Return what answers for the stream's attributes, once they are rebuilt."""
        if self.state is OwnerState.ENDED or self._draining:
            raise self.failure or going_away(self.name)
        await self._rebuilt.wait()
        if self.failure is not None:
            raise self.failure
        if self._keeper is None:
            raise RefusedError(
                f"{self._gate.refusal}: stream {self.name}",
                remedy="Ask for attributes of a stream that is not raw",
            )
        return self._keeper

    async def seal(self) -> LedgerId | None:
        """Close the open ledger; return its id, or None when nothing was open."""
        if self.state is OwnerState.ENDED or self._draining:
            raise self.failure or going_away(self.name)
        return await self._seals.ask(self._parts.settings.seal_timeout_s)

    async def attach(self, wanted: Attachment) -> AttachOutcome:
        """Make staging ledgers the stream's next ones; not if their writer's number is there."""
        keeper, claimed, parts = await self.attributes(), self._claimed, self._parts
        assert claimed is not None
        assert parts.attributes is not None
        if await is_there(keeper, wanted):
            return AttachOutcome.THERE
        signed = parts.settings.ledger_key_id is not None
        open_ledger = parts.attributes.open_ledger
        surveyed = await survey(wanted, claimed, parts.catalog, open_ledger, signed=signed)
        if self.state is OwnerState.ENDED or self._draining:
            raise self.failure or going_away(self.name)
        one = Attaching(wanted, surveyed, asyncio.get_running_loop().create_future())
        self._attaches.append(one)
        self._wake.set()
        return await one.answer

    async def look_again(self) -> None:
        """Follow what the metadata says now: thresholds of the open ledger, or the stream's end."""
        if self.state is not OwnerState.SERVING or self._draining:
            return
        snapshot = await self._parts.catalog.streams.snapshot(self.name)
        if snapshot.stream.lifecycle is StreamLifecycle.DELETING:
            self.drain()
        elif self._open is not None:
            self._open.limits = LedgerLimits.of(snapshot.policy, self._open.block_size)
            self._wake.set()

    def drain(self) -> None:
        """Take no more appends; ``run`` ends once all are answered and the ledger is closed."""
        self._draining = True
        self._wake.set()

    def give_up(self) -> None:
        """Answer everybody who still waits; for whoever cut ``run`` off."""
        self._end(going_away(self.name))

    async def run(self) -> None:
        """Claim, recover and serve until stepping down or drained. Raises only what is a bug."""
        error: TierlogError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._claim()
                    await self._recover_all()
                    await self._rebuild_attributes()
                    self._enter(OwnerState.SERVING)
                    if self._keeper is not None:
                        self._keeper.begin(tasks)
                    await self._serve(tasks)
                    await self._end_attributes()
                except TierlogError as caught:
                    error = caught
                    self._end(error)
                finally:
                    # While the group ends it takes no more tasks.
                    if self._keeper is not None:
                        self._keeper.end()
        finally:
            self._end(error or going_away(self.name))

    def _enter(self, state: OwnerState) -> None:
        self.state = state
        log.info("owner.entered", stream=self.name, state=state.value, epoch=self.owner_epoch)

    def _end(self, error: TierlogError) -> None:
        """Answer everybody, once."""
        if self.state is OwnerState.ENDED:
            return
        self.failure = error
        self.state = OwnerState.ENDED
        self.recovered.set()
        self._rebuilt.set()
        if self._open is not None:
            self._open.writer.break_off(error)
        if self._keeper is not None:
            self._keeper.end()
        self._queue.fail_sent(error.message)
        self._queue.fail_waiting(error)
        self._gate.end(error)
        self._seals.fail(error)
        for one in self._attaches:
            one.fail(error)
        log.info("owner.ended", stream=self.name, epoch=self.owner_epoch, cause=str(error))

    async def _claim(self) -> None:
        self._claimed = await self._claims.take(self.name)
        self._enter(OwnerState.RECOVERING)

    async def _recover_all(self) -> None:
        """Close every ledger that is not, oldest first."""
        assert self._claimed is not None
        snapshot = await self._own_snapshot()
        self._block_size = block_size_of(snapshot)
        for ledger in snapshot.ledgers:
            if not ledger.closed:
                await self._parts.recovery.recover(self._claimed, ledger.ledger_id)
        self.recovered.set()

    async def _rebuild_attributes(self) -> None:
        """Have the attributes as of the stream's last entry; all its ledgers are closed."""
        claimed, parts = self._claimed, self._parts.attributes
        assert claimed is not None
        if parts is None or claimed.raw:
            whose = "a raw stream has" if claimed.raw else "this node keeps"
            self._gate.refusal = f"{whose} no attributes"
            self._rebuilt.set()
            return
        if self._keeper is None:
            self._keeper = AttributeKeeper(
                claimed,
                self._gate,
                parts,
                catalog=self._parts.catalog,
                ids=self._parts.ids,
                deposed=self._deposed,
                wake=self._wake.set,
            )
        keeper = self._keeper

        async def rebuild() -> AttributeState:
            # Each time as of now: ledgers are trimmed meanwhile, and streams deleted.
            snapshot = await self._parts.catalog.streams.snapshot(self.name)
            check_owner(snapshot.stream, claimed)
            return await keeper.rebuild(snapshot)

        self._gate.state = await self._insist("rebuilding the stream's attributes", rebuild)
        self._rebuilt.set()
        keeper.confirmed()

    def _look_at_attributes(self) -> None:
        if self._keeper is not None:
            self._keeper.look()

    async def _end_attributes(self) -> None:
        """Make a last checkpoint, if that does not take long."""
        if self._keeper is not None:
            await self._keeper.flush_now()

    def _confirmed(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        if last_add_confirmed >= 0:
            # Attributes first: whoever is answered may ask for them at once.
            self._gate.confirm(Position(ledger_id, last_add_confirmed))
        self._queue.confirm(last_add_confirmed)
        if self._keeper is not None:
            self._keeper.confirmed()

    async def _own_snapshot(self) -> StreamSnapshot:
        """Read the stream; raises NOT_OWNER when someone else claimed it."""
        assert self._claimed is not None
        catalog = self._parts.catalog
        snapshot = await self._insist(
            "reading the stream's metadata", lambda: catalog.streams.snapshot(self.name)
        )
        try:
            check_owner(snapshot.stream, self._claimed)
        except RefusedError as error:
            raise await self._deposed(snapshot.stream) from error
        return snapshot

    async def _deposed(self, stream: Stream) -> RetryableError:
        live: dict[NodeId, NodeInfo] = {}
        try:
            live = await self._parts.catalog.nodes.live()
        except TierlogError as error:
            log.info("owner.successor_unknown", stream=self.name, cause=str(error))
        return not_owner(stream, live.get(stream.owner.node_id) if stream.owner else None)

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            one, waits = self._open, self._queue.head() is not None
            if one is not None and one.writer.failure is not None:
                await self._replace(one, one.writer.failure)
            elif self._seals or (one is not None and one.is_due(loop.time(), waits=waits)):
                await self._seal()
            elif self._attaches:
                await self._attach()
            elif waits:
                await self._send_next(tasks)
            elif self._draining and (self._open is not None or not self._gate.is_busy):
                await self._seal()
                if not self._gate.is_busy:
                    return
            else:
                await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        """Wait until something arrives, the ledger is too old, or its writer broke."""
        loop = asyncio.get_running_loop()
        timer = None
        if self._open is not None:
            due_s = self._open.opened_s + self._open.limits.age_ms_max / 1000
            # Never at once: by a rounding error the ledger may not be due yet at its very time.
            timer = loop.call_at(max(due_s, loop.time() + WAKE_S_MIN), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _send_next(self, tasks: asyncio.TaskGroup) -> None:
        if self._open is None:
            self._open = await self._open_ledger(tasks)
        one, head = self._open, self._queue.head()
        if one is None or head is None:
            return
        try:
            check_entry_len(head.entry_len_max, one.block_size)
        except RefusedError as error:
            self._queue.fail_head(error)
            return
        run_bytes_max = self._parts.settings.run_bytes_max
        await one.writer.wait_room(max(head.left_bytes, run_bytes_max))
        head = self._queue.head()
        if head is None or one.writer.ended.is_set():
            return
        fill = one.fill(asyncio.get_running_loop().time())
        frames_len = head.left_bytes
        offsets = head.draft.offsets[head.taken :]
        if head.taken:
            offsets = offsets - offsets[0]
        count = fitting(fill, one.limits, offsets, frames_len)
        if count == 0:
            await self._seal()
            return
        if count == head.left:
            # The whole append goes in, so others may follow it in the same runs.
            count = one.limits.entries_max - fill.entry_count
        self._send(one, count, min(run_bytes_max, one.limits.bytes_max - fill.length))

    def _send(self, one: OpenLedger, count_max: int, bytes_max: int) -> None:
        first = one.writer.next_entry_id
        piece = self._queue.take(count_max, bytes_max, Position(one.writer.ledger_id, first))
        # Noted first: an answer may come before the call returns.
        self._queue.note_sent(piece, one.writer.ledger_id, first)
        one.writer.append(
            piece.frames,
            piece.offsets,
            publish_ms_min=piece.publish_ms[0],
            publish_ms_max=piece.publish_ms[1],
        )

    async def _open_ledger(self, tasks: asyncio.TaskGroup) -> OpenLedger | None:
        """Make a ledger, trying until it is there; None: who needs none to be open comes first."""
        ledgers = self._parts.catalog.ledgers
        ledger_id = await self._insist("taking a ledger id from the metadata", ledgers.new_id)
        snapshot = await self._own_snapshot()
        block_size = self._block_size = block_size_of(snapshot)
        opened = await self._choose_and_open(snapshot, ledger_id, block_size)
        if opened is None:
            return None
        metadata, clients = opened
        writer = self._opener.writer(
            snapshot.stream,
            ledger_id,
            metadata,
            clients,
            on_confirmed=partial(self._confirmed, ledger_id),
        )
        log.info(
            "ledger.opened",
            stream=self.name,
            ledger_id=ledger_id,
            epoch=self.owner_epoch,
            ensemble=metadata.segments[-1].ensemble,
            missing=writer.failed,
        )
        task = tasks.create_task(self._run_writer(writer))
        return OpenLedger(
            writer,
            task,
            LedgerLimits.of(snapshot.policy, block_size),
            block_size,
            asyncio.get_running_loop().time(),
        )

    async def _choose_and_open(
        self, snapshot: StreamSnapshot, ledger_id: LedgerId, block_size: int
    ) -> tuple[LedgerMetadata, Clients] | None:
        ledgers = self._parts.catalog.ledgers
        retired: set[NodeId] = set()
        head = self._queue.head()
        like = (0, 0) if head is None else (head.draft.payload_len, head.draft.header.count)
        choose = partial(
            self._opener.choose,
            *(snapshot, ledger_id),
            retired=retired,
            like=like,
            gives_way=lambda: bool(self._seals or self._attaches),
        )
        while True:
            chosen = await self._insist("choosing storage nodes", choose)
            if chosen is None:
                return None
            opening = partial(
                ledgers.open, snapshot.stream, ledger_id, chosen[0], block_size=block_size
            )
            try:
                await self._insist("opening a ledger in the metadata", opening)
            except NodeRetiredError as error:
                retired.add(error.node_id)  # and nothing was opened
            else:
                return chosen

    async def _run_writer(self, writer: LedgerWriter) -> None:
        try:
            await writer.run()
        finally:
            self._wake.set()

    async def _seal(self) -> None:
        """Close the open ledger, if there is one, and answer those who asked for it."""
        one = self._open
        if one is not None:
            try:
                last_entry_id, length = await one.writer.finish()
            except TierlogError as error:
                # Recovery closes the ledger too.
                await self._replace(one, error)
                return
            await self._close(one, last_entry_id=last_entry_id, length=length)
        self._seals.tell(one.writer.ledger_id if one is not None else None)

    async def _attach(self) -> None:
        """Close the open ledger, and put behind it what waits to be attached."""
        await self._seal()
        claimed, keeper, state = self._claimed, self._keeper, self._gate.state
        assert claimed is not None
        assert keeper is not None
        assert state is not None
        attach = partial(self._parts.catalog.ledgers.attach, claimed)

        async def put(ledger_ids: Sequence[LedgerId]) -> Stream:
            try:
                return await self._insist("attaching ledgers", partial(attach, ledger_ids))
            finally:
                self._queue.trouble = ""

        # It stays among them until it has its answer: whoever cuts the owner off answers the rest.
        await attach_next(self._attaches[0], keeper=keeper, state=state, put=put)
        self._attaches.popleft()

    async def _close(self, one: OpenLedger, *, last_entry_id: EntryId, length: int) -> None:
        claimed, ledger_id = self._claimed, one.writer.ledger_id
        assert claimed is not None
        ledgers, tracer = self._parts.catalog.ledgers, self._parts.tracer
        close = partial(
            ledgers.close, claimed, ledger_id, last_entry_id=last_entry_id, length=length
        )
        with closing(tracer, claimed, ledger_id, opened_s=one.opened_s, length=length):
            stream = await self._insist("closing a ledger in the metadata", close)
        listed = stream.listed(ledger_id)
        end = listed.last_entry_id if listed is not None else NO_ENTRY
        assert end >= last_entry_id, "what was confirmed is in the ledger"
        await self._opener.report_lacking(self.name, one.writer)
        self._open = None
        if self._keeper is not None:
            self._keeper.flush_soon()
        await one.task
        log.info(
            "ledger.closed", stream=self.name, ledger_id=ledger_id, last_entry_id=end, bytes=length
        )

    async def _replace(self, one: OpenLedger, cause: TierlogError) -> None:
        """Recover and close the ledger of a broken writer; the next append opens another one."""
        ledger_id = one.writer.ledger_id
        claimed = self._claimed
        assert claimed is not None
        self._queue.fail_sent(cause.message)
        self._rebuilt.clear()
        self._gate.vanish(cause.message)
        if cause.reason is Reason.FENCED:
            # Someone else recovers the ledger: first ask whether this still is the owner.
            await self._own_snapshot()
        self._queue.fail_waiting(
            not_sent(f"was not sent before ledger {ledger_id} broke off: {cause.message}", cause)
        )
        await one.task
        self._open = None
        self._queue.trouble = f"ledger {ledger_id} is being recovered: {cause.message}"
        self._queue.disk_full = cause if cause.reason is Reason.READ_ONLY else None
        try:
            await self._parts.recovery.recover(claimed, ledger_id)
        except RefusedError as error:
            await self._own_snapshot()
            raise error from None
        self._queue.trouble = ""
        self._queue.disk_full = None
        self._seals.tell(ledger_id)
        await self._rebuild_attributes()

    async def _insist(self, what: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Call until it is answered; appends that wait meanwhile learn why."""
        backoff_s = BACKOFF_S_FIRST
        self._queue.trouble = f"{what}: waits for an answer"
        while True:
            try:
                result = await call()
            except (RetryableError, IndeterminateError) as error:
                if self._draining and self._open is None:
                    raise
                is_full = error.reason is Reason.READ_ONLY
                self._queue.disk_full = error if is_full else None
                self._queue.trouble = f"{what}: {error.message if is_full else error}"
                log.warning("owner.waiting", stream=self.name, cause=str(error))
            except RefusedError as error:
                if error.reason is Reason.FENCED and self._claimed is not None:
                    await self._step_down(error)
                raise
            else:
                self._queue.trouble = ""
                self._queue.disk_full = None
                return result
            await asyncio.sleep(self._parts.ids.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    async def _step_down(self, cause: RefusedError) -> None:
        """Raise NOT_OWNER with the present owner, if the metadata names another one."""
        assert self._claimed is not None
        stream = (await self._parts.catalog.streams.snapshot(self.name)).stream
        if stream.owner != self._claimed.owner:
            raise await self._deposed(stream) from cause
