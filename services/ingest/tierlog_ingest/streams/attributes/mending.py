"""An attribute index of which pages are damaged or gone: another one that tells the same.

Attributes as of an entry are a function of the entries up to it. So nothing is lost where all of
them are there still, from the stream's first one on or from a former checkpoint on whose index is
whole. Elsewhere the index is made of what can be read of it, and of what those entries that are
there say of the rest, once an admin accepts that.

Owns which of these is taken, and when it is tried again. Does not own reading entries (``replay``),
nor writing the index.

Invariants:
    * What is made is as of the same entry, so that whoever knows values goes on knowing them.
    * Events are counted anew: where another number comes out, not all entries are there.
    * Nothing is lost without an admin's consent, and what is, is on record. What entries tell that
      a tier gives is not lost by it.
    * Entries that were counted in once are not read again for the same index.

Memory: all attributes of one stream, until its index is mended.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import check_owner
from tierlog.format.attribute_changes import change_in_stream, replayed
from tierlog.model.attribute_record import AttributesRecord, KeptRoot, KeyRange, kept_of
from tierlog.model.attributes import EVENT_COUNT, AttributeKey, Checkpoint
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, Stream
from tierlog.ports.attributes import AttributeIndex, Salvage
from tierlog.ports.ids import Ids
from tierlog_ingest.streams.attributes.replay import CopyAwayError, Entries, Lost

log = structlog.get_logger()

AGAIN_S: Final = 60.0
"""So long a damaged index is left, unless an admin accepts a loss; its objects may come back."""
BACKOFF_S_FIRST: Final = 1.0
BACKOFF_DOUBLINGS_MAX: Final = 3
"""Each try reads the whole index, which may have come back, and a node may be away for long."""
COUNTED_KEPT_MAX: Final = 500_000
"""With more values than that, what was counted is not kept for the next try: some 80 MB."""
LOSS_GRACE_S: Final = 10.0
"""So long an entry that may be given up is asked for still: its nodes may be starting."""

EntriesOf = Callable[[Sequence[ListedLedger], Position | None, Lost], Entries]
"""Gives the entries of ledgers that lie behind a position, but for those that are lost."""


@dataclass(slots=True)
class _Counted:
    """What a former index says, and the entries behind it that are counted in by now."""

    base: KeptRoot
    """The checkpoint whose index is to be made."""
    good: Position | None
    """As of which entry the former index is; None: there is none, all entries are counted."""
    has_all: bool
    """Whether no entry behind it is trimmed that was not counted in before."""
    values: dict[AttributeKey, int]
    events: int
    through: Position | None
    """The last entry that is counted in."""

    async def go_on(self, entries: Entries) -> None:
        """Count in entries that lie behind ``through``."""
        async with aclosing(entries):
            async for place, some in entries:
                # All are read before the first is counted: one that is damaged is met again.
                for change in [change_in_stream(one) for one in some]:
                    if change is not None:
                        self.values |= replayed(change, self.values.get)
                        self.events += change.event_count
                last = EntryId(place.entry_id + len(some) - 1)
                self.through = Position(place.ledger_id, last)


class IndexCare:
    """Looks into what could not be read of one stream's index."""

    def __init__(
        self,
        claimed: Stream,
        entries_of: EntriesOf,
        *,
        index: AttributeIndex,
        catalog: Catalog,
        ids: Ids,
    ) -> None:
        self.is_suspect = False
        """Whether a page could not be read, and nobody has looked into it yet."""
        self._damage: TierlogError | None = None
        """Why the index can't be mended; None: it can, or need not."""
        self._counted: _Counted | None = None
        self._missed: tuple[Position | None, float] | None = None
        """Behind what counting stands still that may be given up, and since when."""
        self._turn = asyncio.Lock()
        """A rebuild may want the index mended while a flush has it mended."""
        self._claimed = claimed
        self._entries_of = entries_of
        self._index = index
        self._catalog = catalog
        self._ids = ids

    def __repr__(self) -> str:
        return f"<IndexCare {self._claimed.name} is_suspect={self.is_suspect} {self._damage!r}>"

    @contextmanager
    def telling(self, look: Callable[[], None]) -> Iterator[None]:
        """Have damage looked into, and tell whoever met it what there is to do."""
        try:
            yield
        except CorruptError as error:
            look()
            if self._damage is not None:
                raise self._damage from error
            raise RetryableError(
                f"the attribute index is being looked into: {error.message}",
                remedy="Ask again",
                retry_after_s=1.0,
            ) from error

    async def sound(self, base: Checkpoint) -> Checkpoint | None:
        """Return the newest checkpoint once its index can be read, however long that takes.

        None: never, as of now; this is not the owner any more.
        """
        name, failures = self._claimed.name, 0
        while True:
            try:
                check_owner(await self._catalog.streams.get(name), self._claimed)
                newest = await self._index.load(self._claimed)
                if kept_of(newest).is_at(kept_of(base)):
                    newest = await self.mended(newest)
            except RefusedError as error:
                log.warning("attributes.not_mended", stream=name, cause=str(error))
                return None
            except TierlogError as error:
                told = not_rebuilt(self._claimed, error)
                log.warning("attributes.not_mended", stream=name, cause=str(told))
                self._damage = told if isinstance(told, CorruptError) else None
                if self._counted is not None and len(self._counted.values) > COUNTED_KEPT_MAX:
                    self._counted = None
                if self._damage is not None:
                    await self._loss_accepted()
                    failures = 0
                backoff_s = BACKOFF_S_FIRST * 2 ** min(failures, BACKOFF_DOUBLINGS_MAX)
                await asyncio.sleep(self._ids.uniform(0.5, 1.0) * backoff_s)
                failures += 1
            else:
                self.is_suspect, self._damage, self._counted = False, None, None
                return newest

    async def _loss_accepted(self) -> None:
        """Wait until an admin accepts a loss, for a while."""
        with suppress(TierlogError, TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                record, changed = await self._catalog.attributes.watch(self._claimed.name)
                while record is not None and not record.loss_accepted:
                    await changed.wait()
                    record, changed = await self._catalog.attributes.watch(self._claimed.name)

    async def mended(self, base: Checkpoint) -> Checkpoint:
        """Return the newest checkpoint, as of the entry of ``base``, with an index that is whole.

        ``CorruptError``: only if an admin accepts that something is lost.
        """
        async with self._turn:
            newest = await self._index.load(self._claimed)
            if newest.through != base.through:
                raise RetryableError(
                    f"another checkpoint of stream {self._claimed.name} was published",
                    remedy="It is looked at again",
                )
            found = await self._index.salvage(newest)
            made = await self._made_of(newest, found) if found.lost else newest
            self._counted = self._missed = None
            return made

    async def _made_of(self, base: Checkpoint, found: Salvage) -> Checkpoint:
        """Make the index of entries, behind a former checkpoint or all; else as an admin accepts.

        Entries that can't be read are in the way of older former checkpoints, too.
        """
        assert base.through is not None, "an index is as of an entry"
        name = self._claimed.name
        log.warning("attributes.index_damaged", stream=name, ranges=len(found.lost))
        record = await self._catalog.attributes.get(name)
        snapshot = await self._catalog.streams.snapshot(name)
        check_owner(snapshot.stream, self._claimed)
        trimmed_end = snapshot.stream.trimmed_end
        ledgers = list(_up_to(snapshot.ledgers, base.through))
        lost, accepted = _given_up(record, ledgers), bool(record and record.loss_accepted)
        rest: Mapping[AttributeKey, int] = {}
        counted = self._resumed(base, trimmed_end)
        if counted is None:
            counted = await self._begun(base, base.through, trimmed_end, accepted=accepted)
        while counted is not None:
            self._counted = counted
            entries = self._entries_of(ledgers, counted.through, lost)
            if not await self._is_counted(counted, entries, accepted=accepted):
                rest = {}
                break
            if counted.has_all and counted.events == _events(base.core):
                return await self._made_anew(base, counted.values, good=counted.good)
            rest = counted.values
            counted = await self._begun(base, counted.good, trimmed_end, accepted=accepted)
        if not accepted:
            raise CorruptError(
                f"{len(found.lost)} parts of the attribute index can't be read, and not all "
                "entries are there of which it was made",
                remedy="Bring its objects back from another copy of the bucket (tierlog scrub "
                "names them)",
            )
        values = {**rest, **found.values}
        made = await self._made_anew(base, values, good=None, lost=found.lost)
        ranges = [f"{one.first.hex()}-{one.last.hex()}" for one in found.lost]
        log.error("attributes.keys_given_up", stream=name, keys=ranges)
        return made

    def _resumed(self, base: Checkpoint, trimmed_end: Position | None) -> _Counted | None:
        """Return what was counted for this index before, unless entries behind it were trimmed."""
        counted = self._counted
        if counted is None or not counted.base.is_at(kept_of(base)):
            return None
        return counted if _has_all_behind(counted.through, trimmed_end) else None

    async def _begun(
        self,
        base: Checkpoint,
        before: Position | None,
        trimmed_end: Position | None,
        *,
        accepted: bool,
    ) -> _Counted | None:
        """Return the newest former index before an entry that is whole and has all behind it.

        In the end there is none, and all entries are counted: not all that were, if a loss is
        accepted. None: neither will do.
        """
        if before is None:
            return None
        for former in (*await self._index.former(self._claimed), Checkpoint()):
            if former.through is not None and former.through >= before:
                continue
            has_all = _has_all_behind(former.through, trimmed_end)
            if not has_all and (former.through is not None or not accepted):
                continue
            whole = await self._index.salvage(former)
            if not whole.lost:
                return _Counted(
                    base=kept_of(base),
                    good=former.through,
                    has_all=has_all,
                    values=dict(whole.values),
                    events=_events(former.core),
                    through=former.through,
                )
        return None

    async def _is_counted(self, counted: _Counted, entries: Entries, *, accepted: bool) -> bool:
        """Count in entries; False: one of them can't be read, or no tier gives it any more."""
        try:
            await counted.go_on(entries)
        except CorruptError as error:
            cause = str(error)
        except CopyAwayError:
            raise
        except RetryableError as error:
            if not (accepted and self._is_given_up(counted.through)):
                raise
            cause = str(error)
        else:
            return True
        log.info("attributes.entries_damaged", stream=self._claimed.name, cause=cause)
        return False

    def _is_given_up(self, through: Position | None) -> bool:
        """Tell whether what lies behind an entry was asked for long enough."""
        now_s = asyncio.get_running_loop().time()
        if self._missed is None or self._missed[0] != through:
            self._missed = through, now_s
        return now_s >= self._missed[1] + LOSS_GRACE_S

    async def _made_anew(
        self,
        base: Checkpoint,
        values: Mapping[AttributeKey, int],
        *,
        good: Position | None,
        lost: Sequence[KeyRange] = (),
    ) -> Checkpoint:
        make = self._index.make_anew
        try:
            made = await make(self._claimed, base, values=values, good=good, lost=lost)
        except RefusedError as error:
            if error.reason is not Reason.FENCED:
                raise
            raise RetryableError(error.message, remedy="It is looked at again") from error
        name = self._claimed.name
        log.info("attributes.index_mended", stream=name, through=str(made.through))
        return made


def not_rebuilt(stream: Stream, error: TierlogError) -> TierlogError:
    """Say of damage what can be done about it."""
    if not isinstance(error, CorruptError):
        return error
    return CorruptError(
        f"the attributes of stream {stream.name} can't be rebuilt: {error.message}",
        remedy=f"{error.remedy}. If it is lost for good: "
        f"tierlog attributes rebuild {stream.name} --accept-loss",
        details=error.details,
    )


def _up_to(ledgers: Sequence[ListedLedger], through: Position) -> Iterator[ListedLedger]:
    """Give the ledgers that a checkpoint covers, the last one as far as it does, open or not."""
    for one in ledgers:
        if one.ledger_id < through.ledger_id:
            yield one
        elif one.ledger_id == through.ledger_id:
            yield replace(one, closed=True, last_entry_id=through.entry_id)


def _given_up(record: AttributesRecord | None, ledgers: Sequence[ListedLedger]) -> Lost:
    if record is None:
        return {}
    return {one.ledger_id: record.given_up_of(one.ledger_id) for one in ledgers}


def _has_all_behind(after: Position | None, trimmed_end: Position | None) -> bool:
    """Tell whether no entry behind a position was trimmed."""
    if trimmed_end is None:
        return True
    if after is None:
        return False
    begin = after.ledger_id, after.entry_id + 1
    return begin >= (trimmed_end.ledger_id, trimmed_end.entry_id)


def _events(core: Mapping[AttributeKey, int]) -> int:
    return core.get(EVENT_COUNT, 0)
