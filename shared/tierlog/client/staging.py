"""Writing into a stream beside its owner: staged by many, attached by one, all or nothing.

    async with open_staging() as staging:
        ledger = await staging.stage("orders", writer_id=job, number=1)   # in each task
        await ledger.send(entry, publish_ms=now)
        await ledger.close()
        await staging.attach("orders", ledger_ids, writer_id=job, number=1, size=size)

A writer's number is an attribute of the stream. What a number stands for is attached once: with
that number in the stream, or a higher one, nothing happens any more (ADR-0031). Each ledger's
first entry must carry the number: ``number_update``.

Owns trying again, copying ledgers that others overtook, and deleting what was staged in vain.
Does not own the attach itself: the stream's owner does.

Invariants:
    * A ledger that was attached is never deleted: the metadata store refuses it; metadata from a
      backup, which know nothing of that, are marked, and by those nothing is swept.
    * A staging ledger is in the metadata before its first byte is anywhere. One whose writer and
      whose job are gone is deleted by the scheduler after some time.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

import structlog

from tierlog.catalog.streams import check_not_deleting
from tierlog.client.blocking import BACKGROUND, Blocking
from tierlog.client.endpoints import find_endpoints, with_zookeeper
from tierlog.client.ledger_writer import LedgerAppender
from tierlog.client.ledgers import Ledgers, open_ledgers
from tierlog.format.entry import AttributeUpdate, Verb, decode_entry
from tierlog.model.errors import (
    IndeterminateError,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import LedgerId, StreamName, stream_name
from tierlog.model.ledger import KEY_KEY_ID
from tierlog.model.partitions import is_partitioned
from tierlog.model.staging import ATTACHED_LEDGERS_MAX, Staging
from tierlog.ports.streams import AttachDesk, Attachment, AttachOutcome
from tierlog.runtime.settings import Settings, load_settings
from tierlog.wiring.client import open_attach_desk

log = structlog.get_logger()

Answer = TypeVar("Answer")

BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 2.0
COPIES_MAX: Final = 5
"""So often the ledgers are copied because the stream's own went past them."""
SURVEY_BYTES_PER_S: Final = 10_000_000
"""An owner reads what it attaches at this speed at least, or is asked again."""


class Staged(NamedTuple):
    """A staging ledger that was written and closed; ``size``: bytes of its entries."""

    ledger_id: LedgerId
    size: int


def number_update(writer_id: UUID, number: int) -> AttributeUpdate:
    """Return what the first entry of each staging ledger sets."""
    return AttributeUpdate(key=writer_id, verb=Verb.REPLACE, value=number)


class StagingDesk:
    """Stages and attaches; ``open_staging`` makes one."""

    def __init__(self, ledgers: Ledgers, desk: AttachDesk, *, retry_s_max: float) -> None:
        self._ledgers = ledgers
        self._catalog = ledgers.parts.catalog
        self._clock = ledgers.parts.clock
        self._desk = desk
        self._retry_s_max = retry_s_max

    def __repr__(self) -> str:
        return f"<StagingDesk {self._ledgers!r}>"

    async def staging(self, name: str, *, writer_id: UUID, number: int) -> Staging:
        """Return what a ledger staged now says, or refuse a stream that takes none."""
        snapshot = await self._catalog.streams.snapshot(stream_name(name))
        stream = snapshot.stream
        check_not_deleting(stream)
        if stream.partitions:
            raise is_partitioned(stream.name, stream.partitions)
        if stream.raw:
            raise RefusedError(
                f"stream {name} is raw: it has no place for what makes a write happen once",
                remedy="Write into a stream that was created without raw",
            )
        block_size = snapshot.policy.block_size
        assert block_size is not None
        return Staging(
            stream=stream.name,
            incarnation=stream.incarnation,
            writer_id=writer_id,
            number=number,
            block_size=block_size,
        )

    async def stage(
        self, name: str, *, writer_id: UUID, number: int, key_id: str | None = None
    ) -> LedgerAppender:
        """Make a staging ledger and return its writer; ``key_id`` names the key that signs it."""
        staging = await self.staging(name, writer_id=writer_id, number=number)
        return await self._made(staging, key_id)

    async def _made(self, staging: Staging, key_id: str | None) -> LedgerAppender:
        """Make a ledger, though too few nodes are there for a moment: one of them starts anew."""

        def make() -> Awaitable[LedgerAppender]:
            return self._ledgers.stage(staging, key_id=key_id)

        return await self._until_answered("stage", staging.stream, make, self._retry_s_max)

    async def attach(
        self,
        name: str,
        ledger_ids: Collection[LedgerId],
        *,
        writer_id: UUID,
        number: int,
        size: int,
        tell_newest: bool = False,
    ) -> int:
        """Make staging ledgers part of the stream, unless the number is there; then clean up.

        ``tell_newest``: return the number that the stream has of the writer then: a higher one than
        ``number`` tells that the writer had gone on, and that nothing was attached. Else return
        ``number``: what is there is not asked about once more, which may fail.

        ``size``: bytes of all of them. Raises ``IndeterminateError`` when no owner answers for as
        long as is tried: asking again, by the same number, settles it.
        """
        stream, left = stream_name(name), sorted(set(ledger_ids))
        if len(left) > ATTACHED_LEDGERS_MAX:
            raise RefusedError(
                f"{len(left)} ledgers are more than are attached at once",
                remedy=f"Write at most {ATTACHED_LEDGERS_MAX} of them: coalesce what is written",
            )
        call_s = self._retry_s_max + size / SURVEY_BYTES_PER_S
        for _ in range(COPIES_MAX + 1):
            wanted = Attachment(ledger_ids=tuple(left), writer_id=writer_id, number=number)
            outcome = await self._attach(stream, wanted, call_s)
            if outcome is not AttachOutcome.IDS_TOO_LOW:
                log.info("attach.ended", stream=stream, number=number, outcome=outcome.value)
                there = number
                if tell_newest and outcome is AttachOutcome.THERE:
                    there = await self._number(stream, writer_id)
                await self._clean_up(stream, writer_id, number)
                return there
            log.info("attach.copied", stream=stream, ledgers=len(left))
            left = await self._copied(left)
        raise RetryableError(
            f"ledgers of stream {stream} went past what is to be attached {COPIES_MAX} times",
            remedy="Let the stream's ledgers grow longer, or attach less at once",
        )

    async def _attach(self, stream: StreamName, wanted: Attachment, call_s: float) -> AttachOutcome:
        def ask() -> Awaitable[AttachOutcome]:
            return self._desk.attach(stream, wanted, deadline_s=call_s)

        within_s = max(self._retry_s_max, call_s)
        return await self._until_answered("attach", stream, ask, within_s)

    async def _number(self, stream: StreamName, writer_id: UUID) -> int:
        def ask() -> Awaitable[int]:
            return self._desk.number(stream, writer_id)

        return await self._until_answered("number", stream, ask, self._retry_s_max)

    async def _until_answered(
        self,
        step: str,
        stream: StreamName,
        ask: Callable[[], Awaitable[Answer]],
        within_s: float,
    ) -> Answer:
        """Ask until there is an answer: while nodes, or the owner, start anew there is none."""
        deadline_s = self._clock.monotonic_s() + within_s
        backoff_s = BACKOFF_S_FIRST
        doubt: IndeterminateError | None = None
        while True:
            try:
                return await ask()
            except (RetryableError, IndeterminateError) as error:
                doubt = error if isinstance(error, IndeterminateError) else doubt
                if self._clock.monotonic_s() + backoff_s >= deadline_s:
                    raise (doubt or error) from None
                log.info("staging.again", step=step, stream=stream, cause=str(error))
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    async def _copied(self, ledger_ids: Sequence[LedgerId]) -> list[LedgerId]:
        """Write the same entries to ledgers with new ids, in the same order."""
        copies: list[LedgerId] = []
        for ledger_id in ledger_ids:
            reader = await self._ledgers.open(ledger_id)
            staging = Staging.of(reader.metadata)
            assert staging is not None, "it was staged, and is not attached"
            key_id = reader.metadata.custom.get(KEY_KEY_ID)
            copy = await self._made(staging, key_id.decode() if key_id else None)
            async with copy:
                async for entry in reader.entries():
                    published = decode_entry(entry.data).header.publish_time_ms
                    await copy.send(entry.data, publish_ms=published)
            copies.append(copy.ledger_id)
        await self.discard(ledger_ids)
        return copies

    async def discard(self, ledger_ids: Iterable[LedgerId]) -> None:
        """Delete staging ledgers; what was attached meanwhile, or is gone, stays as it is."""
        for ledger_id in ledger_ids:
            try:
                await self._ledgers.delete(ledger_id)
            except RefusedError as error:
                log.info("staging.kept", ledger_id=ledger_id, cause=error.message)

    async def sweep(self, name: str, *, writer_id: UUID, through: int) -> int:
        """Delete what a writer staged for numbers up to ``through`` and is not attached.

        For this stream: to another one somebody may write under the same name and number just now.
        Nothing, while the metadata may be a backup's: what was attached since seems to be staged.
        """
        stream = stream_name(name)
        if await self._catalog.scrubs.is_restored():
            cause = "the metadata came back from the bucket or from a backup"
            log.info("staging.not_swept", writer_id=str(writer_id), cause=cause)
            return 0
        staged = await self._catalog.bare.list_staging()
        found = []
        for ledger_id, metadata in sorted(staged.items()):
            staging = Staging.of(metadata)
            if staging is None or staging.number > through:
                continue
            if (staging.stream, staging.writer_id) == (stream, writer_id):
                found.append(ledger_id)
        await self.discard(found)
        return len(found)

    async def _clean_up(self, stream: StreamName, writer_id: UUID, number: int) -> None:
        """Delete what tasks left that failed or were overtaken; the scheduler does it, too."""
        try:
            await self.sweep(stream, writer_id=writer_id, through=number)
        except TierlogError as error:
            log.warning("staging.not_swept", writer_id=str(writer_id), cause=str(error))


@contextlib.asynccontextmanager
async def open_staging(settings: Settings | None = None) -> AsyncIterator[StagingDesk]:
    """Give the staging desk of the cluster that the settings, or ``tierlog up``, name."""
    settings = with_zookeeper(load_settings() if settings is None else settings)
    ingest_grpc = settings.client.ingest_address
    if not ingest_grpc:
        ingest_grpc = find_endpoints(settings.client, settings.state_dir).ingest_grpc
    async with (
        open_ledgers(settings) as ledgers,
        open_attach_desk(settings, ingest_grpc=ingest_grpc, cluster_id=ledgers.cluster_id) as desk,
    ):
        yield StagingDesk(ledgers, desk, retry_s_max=settings.client.timeout_s)


class SyncStaging(Blocking):
    """``StagingDesk``, blocking, for programs without an event loop."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self._desk: StagingDesk = self.enter(open_staging(settings))

    def check(self, name: str) -> None:
        """Refuse a stream that takes no staging ledgers, or that is not there."""
        BACKGROUND.run(self._desk.staging(name, writer_id=UUID(int=0), number=1))

    def write(
        self,
        name: str,
        entries: Iterable[tuple[bytes, int]],
        *,
        writer_id: UUID,
        number: int,
        key_id: str | None = None,
    ) -> Staged:
        """Write entries, with their times of publishing, to a staging ledger of their own.

        ``entries`` is iterated over here. When anything fails the ledger is deleted, if possible.
        """
        made = self._desk.stage(name, writer_id=writer_id, number=number, key_id=key_id)
        ledger = BACKGROUND.run(made)
        try:
            for entry, publish_ms in entries:
                BACKGROUND.run(ledger.send(entry, publish_ms=publish_ms))
            metadata = BACKGROUND.run(ledger.close())
        except BaseException:
            ledger_id = ledger.ledger_id
            with contextlib.suppress(TierlogError):
                BACKGROUND.run(self._desk.discard([ledger_id]))
            raise
        return Staged(ledger.ledger_id, metadata.length)

    def attach(
        self,
        name: str,
        ledger_ids: Collection[LedgerId],
        *,
        writer_id: UUID,
        number: int,
        size: int,
        tell_newest: bool = False,
    ) -> int:
        """See ``StagingDesk.attach``."""
        attach = self._desk.attach(
            name,
            ledger_ids,
            writer_id=writer_id,
            number=number,
            size=size,
            tell_newest=tell_newest,
        )
        return BACKGROUND.run(attach)

    def sweep(self, name: str, *, writer_id: UUID, through: int) -> int:
        """See ``StagingDesk.sweep``."""
        return BACKGROUND.run(self._desk.sweep(name, writer_id=writer_id, through=through))


__all__ = [
    "Staged",
    "StagingDesk",
    "SyncStaging",
    "number_update",
    "open_staging",
]
