"""The ledgers of an owner: what they are made of, and the writer of each (protocols.md 1).

Owns a new ledger's metadata, its nodes and its limits. Does not own when a ledger is opened or
closed, nor trying again: the stream's owner does.

Invariants:
    * A ledger is opened on nodes that were reached a moment before; where some are missing, so
      many only as leave an ack quorum of every write set.
    * A change of a ledger's ensemble is made in the name of the claim that opened the ledger.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.ledger.ensemble_change import Clients, Ensembles
from tierlog.ledger.keys import LedgerKeys
from tierlog.ledger.writer import LedgerWriter, WriterLimits
from tierlog.model.errors import RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import (
    COMPONENT_STREAM,
    KEY_APPLICATION,
    KEY_BLOCK_SIZE,
    KEY_COMPONENT,
    KEY_INCARNATION,
    KEY_KEY_ID,
    KEY_OWNER_EPOCH,
    KEY_RAW,
    KEY_STREAM,
    KEY_STRIPE_ENTRIES,
    DigestType,
    LedgerMetadata,
    Segment,
)
from tierlog.model.quorums import stripe_entries_of, stripe_of
from tierlog.model.replication import CopyTrouble
from tierlog.model.stream import Stream
from tierlog.ports.clock import Clock
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.runtime.settings import OwnerSettings
from tierlog_ingest.streams.rollover import LedgerFill, LedgerLimits, is_due

log = structlog.get_logger()


@dataclass(slots=True)
class OpenLedger:
    """The open ledger."""

    writer: LedgerWriter
    task: asyncio.Task[None]
    limits: LedgerLimits
    block_size: int
    opened_s: float

    def fill(self, now_s: float) -> LedgerFill:
        """Return how far it is."""
        return LedgerFill(
            entry_count=self.writer.entry_count,
            length=self.writer.length,
            age_s=now_s - self.opened_s,
        )

    def is_due(self, now_s: float, *, waits: bool) -> bool:
        """Tell whether it is to be sealed."""
        return is_due(self.fill(now_s), self.limits, waits=waits)


class LedgerOpener:
    """Makes ledgers for one process."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        ensembles: Ensembles,
        clock: Clock,
        keys: LedgerKeys,
        settings: OwnerSettings,
    ) -> None:
        self._catalog = catalog
        self._ensembles = ensembles
        self._clock = clock
        self._keys = keys
        self._settings = settings

    async def choose(
        self,
        snapshot: StreamSnapshot,
        ledger_id: LedgerId,
        *,
        retired: Collection[NodeId],
        like: tuple[int, int] = (0, 0),
        gives_way: Callable[[], bool],
    ) -> tuple[LedgerMetadata, Clients] | None:
        """Choose and reach the nodes of a new ledger, none that is known to be ``retired``.

        ``like``: bytes and number of the entries that wait, for a stream's first ledger. Raises
        UNAVAILABLE or READ_ONLY; None instead, while the caller ``gives_way``.
        """
        settings = self._settings
        try:
            ensemble, clients = await self._ensembles.open(
                ensemble_size=settings.ensemble_size,
                write_quorum=settings.write_quorum,
                ack_quorum=settings.ack_quorum,
                seed=f"{ledger_id}".encode(),
                retired=retired,
            )
        except RetryableError:
            if gives_way():
                return None
            raise
        return self._metadata(snapshot, ensemble, like), clients

    def _stripe_entries(self, snapshot: StreamSnapshot, like: tuple[int, int]) -> int:
        settings = self._settings
        if settings.stripe_entries is not None:
            return settings.stripe_entries
        before = next((one for one in reversed(snapshot.ledgers) if one.entry_count > 0), None)
        length, count = like if before is None else (before.length, before.entry_count)
        return stripe_entries_of(length, count, settings.stripe_bytes)

    def _metadata(
        self, snapshot: StreamSnapshot, ensemble: tuple[NodeId, ...], like: tuple[int, int]
    ) -> LedgerMetadata:
        settings, stream = self._settings, snapshot.stream
        stripe_entries = stripe_of(
            settings.ensemble_size,
            settings.write_quorum,
            self._stripe_entries(snapshot, like),
        )
        custom = {
            KEY_APPLICATION: b"tierlog",
            KEY_COMPONENT: COMPONENT_STREAM,
            KEY_STREAM: stream.name.encode(),
            KEY_INCARNATION: str(stream.incarnation).encode(),
            KEY_OWNER_EPOCH: str(stream.owner_epoch).encode(),
            KEY_STRIPE_ENTRIES: str(stripe_entries).encode(),
            KEY_BLOCK_SIZE: str(block_size_of(snapshot)).encode(),
            KEY_RAW: str(int(stream.raw)).encode(),
        }
        digest_type = DigestType.CRC32C
        if settings.ledger_key_id is not None:
            # Refused here, before there is a ledger that nobody could write.
            custom[KEY_KEY_ID] = self._keys.named(settings.ledger_key_id).key_id.encode()
            digest_type = DigestType.HMAC
        return LedgerMetadata(
            ensemble_size=settings.ensemble_size,
            write_quorum=settings.write_quorum,
            ack_quorum=settings.ack_quorum,
            segments=(Segment(first_entry_id=EntryId(0), ensemble=ensemble),),
            digest_type=digest_type,
            ctime_ms=self._clock.wall_ms(),
            custom=custom,
        )

    def writer(
        self,
        claimed: Stream,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        clients: Mapping[NodeId, StorageNodeClient],
        *,
        on_confirmed: Callable[[EntryId], None],
    ) -> LedgerWriter:
        """Return the writer of a ledger that was opened in the name of ``claimed``."""
        settings = self._settings

        async def publish(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
            return await self._catalog.ledgers.change_ensemble(claimed, ledger_id, before, after)

        changer = self._ensembles.changer(ledger_id, clients, publish)
        return LedgerWriter(
            ledger_id=ledger_id,
            metadata=metadata,
            owner_epoch=claimed.owner_epoch,
            nodes=clients,
            limits=WriterLimits(
                in_flight_bytes_max=settings.in_flight_bytes_max,
                append_timeout_s=settings.append_timeout_s,
                run_bytes_max=settings.run_bytes_max,
                slow_node_s=settings.slow_node_s,
                slow_node_factor=settings.slow_node_factor,
            ),
            on_confirmed=on_confirmed,
            key=self._keys.of(ledger_id, metadata),
            replace=changer.replace,
            on_failed=changer.note_failed,
        )

    async def report_lacking(self, name: StreamName, writer: LedgerWriter) -> None:
        """Have a closed ledger replicated again, if some nodes lack runs of theirs."""
        if not writer.lacking:
            return
        try:
            await self._catalog.underreplicated.add(
                writer.ledger_id, reason=CopyTrouble.MISSING, nodes=writer.lacking
            )
        except TierlogError as error:
            # A check of all copies finds it later.
            log.warning(
                "ledger.lack_not_reported",
                stream=name,
                ledger_id=writer.ledger_id,
                nodes=writer.lacking,
                cause=str(error),
            )


def block_size_of(snapshot: StreamSnapshot) -> int:
    """Return the block size that the stream's next ledger gets."""
    block_size = snapshot.policy.block_size
    assert block_size is not None
    return block_size
