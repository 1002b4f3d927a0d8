"""Offload contexts in the metadata store: attempts, completion, errors, clean-up (protocols.md 3).

Invariants:
    * An attempt's UUID and place are stored before anything of it is uploaded, and the attempt
      before it becomes ``abandoned`` in the same change.
    * Only the newest attempt completes. Workers never create contexts.
    * While a copy is repaired the damaged one stays the ledger's; both are named.
    * What was found wrong with a copy is kept until another one takes its place, or all of it was
      read since and found sound.
"""

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import UUID

from tierlog.catalog.change import settle
from tierlog.catalog.ledgers import context_not_found
from tierlog.format import paths, records
from tierlog.model.ids import LedgerId
from tierlog.model.offload import (
    Doubt,
    OffloadContext,
    OffloadState,
    Tier2Copy,
    Tier2Location,
)
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore

LAST_ERROR_LEN_MAX: Final = 2000


class ContextCatalog:
    """The offload contexts of a cluster's ledgers."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def get(self, ledger_id: LedgerId) -> OffloadContext | None:
        """Return a ledger's context as of now (after ``sync``), or None."""
        path = paths.context_path(ledger_id)
        await self._store.sync(path)
        return await self.peek(ledger_id)

    async def peek(self, ledger_id: LedgerId) -> OffloadContext | None:
        """Return a ledger's context as last seen by this client; may be a little old."""
        found = await self._store.get(paths.context_path(ledger_id))
        return None if found is None else records.decode_context(found.data)

    async def watch(self, ledger_id: LedgerId) -> tuple[OffloadContext | None, asyncio.Event]:
        """Return a ledger's context, and an event that is set once it has changed or gone."""
        found, changed = await self._store.watch(paths.context_path(ledger_id))
        return (None if found is None else records.decode_context(found.data)), changed

    async def begin_attempt(
        self, ledger_id: LedgerId, *, uuid: UUID, location: Tier2Location, worker: str
    ) -> OffloadContext:
        """Store a fresh attempt; refused in a state that allows none (complete, trimming)."""
        now_ms = self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.attempt_begun(
                uuid=uuid, location=location, worker=worker, now_ms=now_ms
            ),
            applied=lambda context: context.uuid == uuid,
        )

    async def complete_attempt(
        self, ledger_id: LedgerId, *, uuid: UUID, copy: Tier2Copy
    ) -> OffloadContext:
        """Mark the attempt complete; raises ``RefusedError`` when it was superseded."""
        now_ms = self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.attempt_completed(uuid=uuid, copy=copy, now_ms=now_ms),
            applied=lambda context: context.complete and context.uuid == uuid,
        )

    async def give_up_attempt(self, ledger_id: LedgerId, *, uuid: UUID) -> OffloadContext:
        """Abandon an attempt with none in its place; changes nothing if it ended since."""
        now_ms = self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.attempt_given_up(uuid, now_ms=now_ms),
            applied=lambda context: (
                context.uuid != uuid or context.state is not OffloadState.OFFLOADING
            ),
        )

    async def record_error(self, ledger_id: LedgerId, *, uuid: UUID, error: str) -> OffloadContext:
        """Keep the error of an attempt for people; changes nothing if it was superseded."""
        text, now_ms = error[:LAST_ERROR_LEN_MAX], self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.failed(uuid, error=text, now_ms=now_ms),
            applied=lambda context: context.uuid != uuid or context.tells_failure(uuid, text),
        )

    async def doubt(self, ledger_id: LedgerId, *, uuid: UUID, cause: str) -> OffloadContext:
        """Keep what is wrong with the objects of a complete copy; nothing if it was superseded.

        From then on the local copy is not deleted in favour of it. Never call it for an error
        that says nothing of the objects.
        """
        doubt = Doubt(
            mark=self._ids.uuid(),
            found_ms=self._clock.wall_ms(),
            cause=cause[:LAST_ERROR_LEN_MAX],
        )
        return await self.change(
            ledger_id,
            lambda context: context.doubted(uuid, doubt),
            applied=lambda context: (
                context.uuid != uuid or not context.complete or context.is_doubted_by(doubt.mark)
            ),
        )

    async def find_sound(self, ledger_id: LedgerId, *, mark: UUID) -> OffloadContext:
        """Take back a doubt that was there before all of the copy was read and found sound."""
        return await self.change(
            ledger_id,
            lambda context: context.found_sound(mark),
            applied=lambda context: not context.is_doubted_by(mark),
        )

    async def mark_swept(self, ledger_id: LedgerId, uuid: UUID) -> OffloadContext:
        """Note that everything of an abandoned attempt was deleted just now."""
        now_ms = self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.attempt_swept(uuid=uuid, now_ms=now_ms),
            applied=lambda context: context.swept_at(uuid) in (None, now_ms),
        )

    async def strike_off(self, ledger_id: LedgerId, uuid: UUID) -> OffloadContext:
        """Forget an abandoned attempt that was swept for the last time."""
        return await self.change(
            ledger_id,
            lambda context: context.attempt_struck_off(uuid),
            applied=lambda context: context.swept_at(uuid) is None,
        )

    async def begin_tier1_deletion(self, ledger_id: LedgerId, *, uuid: UUID) -> OffloadContext:
        """Move a complete ledger to TIER1_DELETING for that very attempt (protocols.md 3.9).

        Refused while the copy is in doubt.
        """
        return await self.change(
            ledger_id,
            lambda context: context.tier1_deletion_begun(uuid),
            applied=lambda context: context.in_tier1_deletion(uuid),
        )

    async def begin_repair(
        self,
        ledger_id: LedgerId,
        *,
        damaged: UUID,
        uuid: UUID,
        location: Tier2Location,
        worker: str,
    ) -> OffloadContext:
        """Move a ledger to REPAIRING, with an attempt beside its damaged copy.

        Refused unless ``damaged`` is its complete copy. From then on nobody deletes the local one,
        and an earlier attempt to repair can't complete.
        """
        now_ms = self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.repair_begun(
                damaged=damaged, uuid=uuid, location=location, worker=worker, now_ms=now_ms
            ),
            applied=lambda context: context.repair is not None and context.repair.uuid == uuid,
        )

    async def complete_repair(
        self, ledger_id: LedgerId, *, uuid: UUID, copy: Tier2Copy
    ) -> OffloadContext:
        """Put the new copy in the place of the damaged one, which is abandoned.

        Raises ``RefusedError`` when the repair was superseded, or the ledger is being trimmed.
        """
        now_ms = self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.repair_completed(uuid=uuid, copy=copy, now_ms=now_ms),
            applied=lambda context: context.complete and context.uuid == uuid,
        )

    async def give_up_repair(
        self, ledger_id: LedgerId, *, uuid: UUID, error: str
    ) -> OffloadContext:
        """Leave the damaged copy as it is, and abandon the attempt that was to replace it."""
        text, now_ms = error[:LAST_ERROR_LEN_MAX], self._clock.wall_ms()
        return await self.change(
            ledger_id,
            lambda context: context.repair_given_up(uuid, error=text, now_ms=now_ms),
            applied=lambda context: context.repair is None or context.repair.uuid != uuid,
        )

    async def change(
        self,
        ledger_id: LedgerId,
        plan: Callable[[OffloadContext], OffloadContext],
        *,
        applied: Callable[[OffloadContext], bool],
    ) -> OffloadContext:
        """Replace the context by ``plan`` of it, unless ``applied`` says that it is there."""
        path = paths.context_path(ledger_id)

        async def one_round() -> OffloadContext:
            found = await self._store.get(path)
            if found is None:
                raise context_not_found(ledger_id)
            context = records.decode_context(found.data)
            if applied(context):
                return context
            planned = plan(context)
            await self._store.set(path, records.encode_context(planned), version=found.version)
            return planned

        return await settle(self._store, self._ids, path, one_round)
