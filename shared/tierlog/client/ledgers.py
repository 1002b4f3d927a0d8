"""Bare ledgers: create, open, open for recovery, append, read, close, delete (seeds/003).

    async with open_ledgers() as ledgers:
        async with await ledgers.create() as ledger:
            await ledger.append(b"one")
        reader = await ledgers.open(ledger.ledger_id)
        async for entry in reader.entries():
            print(entry.entry_id, entry.data)

The lower of the two APIs: the application is the writer, replicates over storage nodes itself,
and closes, recovers and deletes what it made. It needs the metadata store's address alone, may
be used beside streams in one application, and never touches a stream's ledgers.

Owns putting a ledger together: shape, ensemble, metadata, writer. What a writer and a reader do
is theirs (``ledger_writer``, ``ledger_reader``); nothing offloads, rolls over or trims a ledger.

Invariants:
    * A ledger's metadata says who writes it before the writer sends anything.
    * A ledger whose writer is gone is closed by recovery alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog.naming import NodeRetiredError
from tierlog.client.endpoints import with_zookeeper
from tierlog.client.ledger_reader import LedgerEntry, LedgerReader
from tierlog.client.ledger_writer import AppenderLimits, LedgerAppender
from tierlog.format.block import entry_len_max
from tierlog.format.run import RUN_BYTES_MAX
from tierlog.ledger.ensemble_change import Clients, Ensembles, NodesRefuseError, reach
from tierlog.ledger.writer import LedgerWriter, WriterLimits
from tierlog.model.errors import RefusedError, TierlogError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, NodeId
from tierlog.model.ledger import (
    COMPONENT_BARE,
    KEY_APPLICATION,
    KEY_COMPONENT,
    KEY_KEY_ID,
    KEY_STRIPE_ENTRIES,
    KEY_WRITER,
    DigestType,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from tierlog.model.quorums import STRIPE_ENTRIES, quorums_of, stripe_of
from tierlog.model.replication import CopyTrouble
from tierlog.model.staging import Staging
from tierlog.runtime.settings import Settings, load_settings
from tierlog.wiring.ledgers import LedgerParts, open_ledger_parts

log = structlog.get_logger()

OWN_PREFIX: Final = "tierlog/"
CONNECT_S_MAX: Final = 1.0
"""A node that can't be reached in that time counts as failed, and is replaced."""
FRAME_BYTES_BESIDE_ENTRY: Final = 256
"""Heads of the wire's frame, of a signed run and of its one entry, and some to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerShape:
    """On how many nodes a ledger lies, how many get each entry, and how many acknowledge it."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    stripe_entries: int = STRIPE_ENTRIES
    """So many entries go to the same nodes before the next stripe."""

    @classmethod
    def of_cluster(cls, node_count: int) -> "LedgerShape":
        """Return 3/3/2 where there are so many nodes; two nodes keep two copies, one keeps one."""
        ensemble_size, write_quorum, ack_quorum = quorums_of(node_count)
        return cls(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgersLimits:
    """Every bound of an application's ledgers; bytes count for each ledger."""

    in_flight_bytes_max: int
    frame_bytes_max: int
    append_timeout_s: float = 10.0


class Ledgers:
    """All that an application does with bare ledgers; ``open_ledgers`` makes one."""

    def __init__(
        self, parts: LedgerParts, tasks: asyncio.TaskGroup, *, limits: LedgersLimits
    ) -> None:
        self._parts = parts
        self._tasks = tasks
        self._limits = limits
        self._ensembles = Ensembles(parts.catalog, parts.nodes)
        self._appenders: set[LedgerAppender] = set()

    def __repr__(self) -> str:
        return f"<Ledgers {sorted(one.ledger_id for one in self._appenders)} open>"

    @property
    def cluster_id(self) -> UUID:
        """The cluster's, as its metadata say."""
        return self._parts.cluster_id

    async def create(
        self,
        shape: LedgerShape | None = None,
        *,
        custom: Mapping[str, bytes] | None = None,
        key_id: str | None = None,
    ) -> LedgerAppender:
        """Make a ledger and return its writer; leaving the writer's context closes the ledger.

        ``custom`` is kept in the metadata for the application; ``key_id`` names the key that
        signs the ledger's runs (one of the settings ``keys``).
        """
        writer = self._parts.ids.uuid()
        ledger_id, metadata, clients = await self._make(shape, custom, key_id, writer=writer)
        return self._write(ledger_id, metadata, clients)

    async def make(
        self,
        shape: LedgerShape | None = None,
        *,
        custom: Mapping[str, bytes] | None = None,
        key_id: str | None = None,
    ) -> LedgerId:
        """Make a ledger that whoever asks first will write (``write``); return its id."""
        return (await self._make(shape, custom, key_id, writer=None))[0]

    @property
    def parts(self) -> LedgerParts:
        """What these ledgers stand on."""
        return self._parts

    async def stage(self, staging: Staging, *, key_id: str | None = None) -> LedgerAppender:
        """Make a staging ledger (ADR-0031) and return its writer.

        Its entries are a stream's: each is sent with the time when it was published.
        """
        writer = self._parts.ids.uuid()
        ledger_id, metadata, clients = await self._make(
            None, None, key_id, writer=writer, staging=staging
        )
        fitting = entry_len_max(staging.block_size)
        return self._write(ledger_id, metadata, clients, entry_len_fitting=fitting)

    async def write(self, ledger_id: int) -> LedgerAppender:
        """Become the one writer of a ledger that was made without one, or raise FENCED."""
        wanted = LedgerId(ledger_id)
        writer = self._parts.ids.uuid()
        metadata = await self._parts.catalog.bare.claim(wanted, writer)
        return self._write(wanted, metadata, await self._reach(metadata))

    async def open(self, ledger_id: int, *, recover: bool = False) -> LedgerReader:
        """Open a ledger for reading. With ``recover`` it is closed first, if it is not.

        Its writer, if it still lives, can append nothing more from then on. Without, a ledger
        that is still written is read as far as its entries are acknowledged.
        """
        wanted = LedgerId(ledger_id)
        if recover:
            metadata = await self.recover(wanted)
        else:
            metadata = await self._parts.catalog.bare.get(wanted)
        return LedgerReader(wanted, metadata, self._parts)

    async def recover(self, ledger_id: int) -> LedgerMetadata:
        """Fence a ledger, find its end, and close it; return it as it then is.

        Waits as long as nodes are missing that may hold acknowledged entries.
        """
        wanted, bare = LedgerId(ledger_id), self._parts.catalog.bare
        await bare.get(wanted)
        await self._parts.recovery.recover(None, wanted)
        return await bare.get(wanted)

    def waits_for(self, ledger_id: int) -> str | None:
        """Return what a recovery that was begun here waits for; None: it goes on."""
        return self._parts.recovery.waiting.get(LedgerId(ledger_id))

    async def accept_loss(self, ledger_id: int, *, by: str, wait_s: float) -> LedgerMetadata:
        """Let the recovery of a ledger, of a stream's too, give up what no node can give.

        For when nodes that it waits for never come back. What was given up is on record, as is
        ``by``, and CORRUPT for readers. Returns the ledger once it is closed, or as it is when
        that takes longer than ``wait_s``.
        """
        wanted, ledgers = LedgerId(ledger_id), self._parts.catalog.ledgers
        metadata = await ledgers.accept_loss(wanted, by=by)
        try:
            async with asyncio.timeout(wait_s):
                if metadata.is_bare:
                    return await self.recover(wanted)
                while metadata.state is not LedgerState.CLOSED:
                    found, changed = await ledgers.watch(wanted)
                    if found is None:
                        break
                    metadata = found
                    if metadata.state is not LedgerState.CLOSED:
                        await changed.wait()
        except TimeoutError:
            log.info("ledger.not_closed_yet", ledger_id=wanted, waited_s=wait_s)
        return metadata

    async def delete(self, ledger_id: int) -> None:
        """Delete a ledger, whatever its state; storage nodes free its entries some time later."""
        await self._parts.catalog.bare.delete(LedgerId(ledger_id))

    async def ledgers(self) -> Mapping[LedgerId, LedgerMetadata]:
        """Return all bare ledgers of the cluster."""
        return await self._parts.catalog.bare.list_all()

    def abandon_all(self) -> None:
        """Leave every ledger that is still written as a crash would."""
        for one in list(self._appenders):
            one.abandon()

    async def _make(
        self,
        shape: LedgerShape | None,
        custom: Mapping[str, bytes] | None,
        key_id: str | None,
        *,
        writer: UUID | None,
        staging: Staging | None = None,
    ) -> tuple[LedgerId, LedgerMetadata, Clients]:
        catalog = self._parts.catalog
        if shape is None:
            shape = LedgerShape.of_cluster(len(await catalog.draining.known_nodes()))
        noted = _checked(custom or {})
        if staging is not None:
            noted |= staging.custom()
        digest_type = DigestType.CRC32C
        if key_id is not None:
            # Refused here, before there is a ledger that nobody could write.
            noted[KEY_KEY_ID] = self._parts.keys.named(key_id).key_id.encode()
            digest_type = DigestType.HMAC
        if writer is not None:
            noted[KEY_WRITER] = str(writer).encode()
        stripe_entries = stripe_of(shape.ensemble_size, shape.write_quorum, shape.stripe_entries)
        noted[KEY_STRIPE_ENTRIES] = str(stripe_entries).encode()
        ledger_id = await catalog.ledgers.new_id()
        retired: set[NodeId] = set()
        while True:
            try:
                ensemble, clients = await self._ensembles.open(
                    ensemble_size=shape.ensemble_size,
                    write_quorum=shape.write_quorum,
                    ack_quorum=shape.ack_quorum,
                    seed=f"{ledger_id}".encode(),
                    retired=retired,
                )
            except NodesRefuseError as error:
                raise error.refusal from error
            metadata = LedgerMetadata(
                ensemble_size=shape.ensemble_size,
                write_quorum=shape.write_quorum,
                ack_quorum=shape.ack_quorum,
                segments=(Segment(first_entry_id=EntryId(0), ensemble=ensemble),),
                digest_type=digest_type,
                ctime_ms=self._parts.clock.wall_ms(),
                custom={KEY_COMPONENT: COMPONENT_BARE, **noted},
            )
            try:
                await catalog.bare.create(metadata, ledger_id=ledger_id)
            except NodeRetiredError as error:
                retired.add(error.node_id)  # and nothing was made
            else:
                return ledger_id, metadata, clients

    async def _reach(self, metadata: LedgerMetadata) -> Clients:
        """Return clients of those of the ledger's nodes that are there, side by side."""
        found: Clients = {}

        async def one(node_id: NodeId) -> None:
            client = await reach(self._parts.nodes, node_id, CONNECT_S_MAX)
            if client is not None:
                found[node_id] = client

        async with asyncio.TaskGroup() as tasks:
            for node_id in metadata.segments[-1].ensemble:
                tasks.create_task(one(node_id))
        return found

    def _write(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        clients: Clients,
        *,
        entry_len_fitting: int = INT64_MAX,
    ) -> LedgerAppender:
        parts, limits = self._parts, self._limits
        key = parts.keys.of(ledger_id, metadata)

        async def publish(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
            return await parts.catalog.ledgers.change_ensemble(None, ledger_id, before, after)

        changer = self._ensembles.changer(ledger_id, clients, publish)

        def make_writer(on_confirmed: Callable[[EntryId], None]) -> LedgerWriter:
            return LedgerWriter(
                ledger_id=ledger_id,
                metadata=metadata,
                owner_epoch=0,
                nodes=clients,
                limits=WriterLimits(
                    in_flight_bytes_max=limits.in_flight_bytes_max,
                    append_timeout_s=limits.append_timeout_s,
                    run_bytes_max=RUN_BYTES_MAX,
                ),
                on_confirmed=on_confirmed,
                key=key,
                replace=changer.replace,
                on_failed=changer.note_failed,
            )

        sendable = max(0, limits.frame_bytes_max - FRAME_BYTES_BESIDE_ENTRY)
        appender = LedgerAppender(
            make_writer,
            limits=AppenderLimits(
                entry_len_max=min(sendable, entry_len_fitting),
                queue_bytes_max=limits.in_flight_bytes_max,
                batch_bytes_max=RUN_BYTES_MAX,
            ),
            close=lambda writer: self._close(ledger_id, writer),
        )
        self._appenders.add(appender)
        self._tasks.create_task(self._run(appender), name=f"ledger-{ledger_id}")
        return appender

    async def _run(self, appender: LedgerAppender) -> None:
        try:
            await appender.run()
        finally:
            self._appenders.discard(appender)

    async def _close(self, ledger_id: LedgerId, writer: LedgerWriter) -> LedgerMetadata:
        last_entry_id, length = await writer.finish()
        closed = await self._parts.catalog.bare.close(
            ledger_id, last_entry_id=last_entry_id, length=length
        )
        assert closed.last_entry_id >= last_entry_id, "what was acknowledged is in the ledger"
        if writer.degraded:
            await self._report_lacking(ledger_id, writer)
        return closed

    async def _report_lacking(self, ledger_id: LedgerId, writer: LedgerWriter) -> None:
        """Have the ledger replicated; the periodic check finds it too, where this can't be told."""
        try:
            await self._parts.catalog.underreplicated.add(
                ledger_id, reason=CopyTrouble.MISSING, nodes=writer.lacking
            )
        except TierlogError as error:
            log.warning("ledger.not_reported", ledger_id=ledger_id, cause=str(error))


@contextlib.asynccontextmanager
async def open_ledgers(settings: Settings | None = None) -> AsyncIterator[Ledgers]:
    """Give the bare ledgers of the cluster whose ZooKeeper the settings, or ``tierlog up``, name.

    What is still written when the context is left is left open, as by a crash.
    """
    if settings is None:
        settings = load_settings()
    settings = with_zookeeper(settings)
    limits = LedgersLimits(
        in_flight_bytes_max=settings.client.in_flight_bytes_max,
        frame_bytes_max=settings.wire.frame_bytes_max,
    )
    thrown: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            async with open_ledger_parts(settings, tasks) as parts:
                ledgers = Ledgers(parts, tasks, limits=limits)
                try:
                    yield ledgers
                finally:
                    ledgers.abandon_all()
        except Exception as error:  # noqa: BLE001 - it goes on below, and not as one of a group
            thrown = error
    if thrown is not None:
        raise thrown


def _checked(custom: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return an application's own metadata, or refuse keys that mean something here."""
    for key in custom:
        if key.startswith(OWN_PREFIX) or key == KEY_COMPONENT:
            raise RefusedError(
                f"custom metadata {key[:80]!r} is not the application's to set",
                remedy=f"Use keys that are not {KEY_COMPONENT!r} and don't begin with "
                f"{OWN_PREFIX!r}",
            )
    return {KEY_APPLICATION: b"tierlog", **custom}


__all__ = [
    "LedgerAppender",
    "LedgerEntry",
    "LedgerReader",
    "LedgerShape",
    "Ledgers",
    "LedgersLimits",
    "open_ledgers",
]
