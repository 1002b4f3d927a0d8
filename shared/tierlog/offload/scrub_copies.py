"""A look at one ledger's copy: its objects against each other and against the ledger's context.

Owns the looks of which a scrub is made, wherever it runs. Does not own which ledgers are looked
at, nor what is done about a finding (``tierlog.offload.scrub``).

Invariants:
    * Nothing is told to be wrong before the context was read again, and names that very copy.
    * Only a look at every byte takes a doubt back, and only one that was there before.
    * One ledger whose metadata can't be read keeps no other one from its look.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tierlog.catalog import Catalog
from tierlog.format import keys
from tierlog.format.keys import ObjectKeys
from tierlog.model.errors import CorruptError, Reason, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import copy_of
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.scrub import Finding, FindingKind, ScrubReport
from tierlog.offload import scrub_rules as rules
from tierlog.offload.drivers import known_here
from tierlog.offload.groups import plain_errors
from tierlog.offload.repair import Repairer
from tierlog.offload.verify import ReadBack, is_read_whole, verify_copy
from tierlog.ports.clock import Clock
from tierlog.ports.objects import ObjectInfo, ObjectStore

Pay = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be read; 0: one more request."""


class CopyLook:
    """Looks at copies, one at a time or several at once."""

    def __init__(
        self,
        *,
        objects: ObjectStore,
        catalog: Catalog,
        bucket: str,
        endpoint_name: str,
        clock: Clock,
        safety_ms: int,
        pay: Pay,
    ) -> None:
        self._objects = objects
        self._catalog = catalog
        self._contexts = catalog.contexts
        self._place = (bucket, endpoint_name)
        self._clock = clock
        self._safety_ms = safety_ms
        self._pay = pay

    def __repr__(self) -> str:
        return f"<CopyLook at {self._place[0]}>"

    def is_here(self, context: OffloadContext) -> bool:
        """Tell whether a copy lies in the bucket that this process has, in a layout of ours.

        Whichever driver writes now, if any: it may put its copies somewhere else.
        """
        there = context.location
        assert there is not None
        return known_here(there) and (there.bucket, there.endpoint_name) == self._place

    async def contexts_of(
        self, name: StreamName, some: Sequence[LedgerId], report: ScrubReport
    ) -> tuple[dict[LedgerId, OffloadContext], set[LedgerId]]:
        """Read the contexts of some ledgers at once; return those, and whose can't be read."""
        found: dict[LedgerId, OffloadContext] = {}
        unread: set[LedgerId] = set()

        async def read(ledger_id: LedgerId) -> None:
            try:
                context = await self._contexts.peek(ledger_id)
            except TierlogError as error:
                report.skip(f"ledger {ledger_id} of {name}: {error}")
                unread.add(ledger_id)
                return
            if context is not None:
                found[ledger_id] = context

        with plain_errors():
            async with asyncio.TaskGroup() as group:
                for one in some:
                    group.create_task(read(one))
        return found, unread

    async def stalled(self, context: OffloadContext) -> Finding | None:
        """Look again whether an attempt goes on: others may have been read back for hours."""
        if not self._is_stalled(context):
            return None
        again = await self._contexts.get(context.ledger_id)
        if again is None or not self._is_stalled(again):
            return None
        cause = again.last_error or f"begun by {again.last_worker}"
        return rules.finding_of(again, FindingKind.STALLED_ATTEMPT, cause)

    def _is_stalled(self, context: OffloadContext) -> bool:
        return rules.is_stalled(context, now_ms=self._clock.wall_ms(), safety_ms=self._safety_ms)

    async def local_alone(self, context: OffloadContext) -> Finding | None:
        """Look whether a ledger that has no complete copy is in tier 1."""
        if context.state is OffloadState.TRIMMING:
            return None
        if await self._catalog.ledgers.get(context.ledger_id) is not None:
            return None
        again = await self._contexts.get(context.ledger_id)
        if again is None or again.complete or again.state is OffloadState.TRIMMING:
            return None
        cause = "the ledger is in neither tier"
        return rules.finding_of(again, FindingKind.POINTS_NOWHERE, cause)

    async def confirmed(self, context: OffloadContext) -> Finding | None:
        """Look at the lengths of a copy's objects, as of now."""
        location = context.location
        assert location is not None
        found = {}
        for role, key in keys.roles_of(location).items():
            await self._pay(0)
            found[role] = await self._objects.head(key)
        again = await self._as_before(context)
        if again is None or again.copy is None:
            return None
        sizes = {role: info.size for role, info in found.items() if info is not None}
        verdict = rules.judge_copy(again.copy, sizes, single=location.is_single)
        return rules.finding_of(again, *verdict) if verdict is not None else None

    async def may_be_last(
        self,
        context: OffloadContext | None,
        named: ObjectKeys,
        there: Sequence[ObjectInfo] | None,
    ) -> bool:
        """Tell whether an attempt that nothing names may be the only whole copy of a ledger.

        By metadata from a backup it may seem to be in tier 1, or in a copy that was replaced since:
        that one is looked at again, since the look before may have failed.
        """
        if context is None or not rules.has_ended(named, there):
            return False
        if context.lacks_sound_copy:
            return True
        is_here = context.complete and self.is_here(context)
        return is_here and await self.confirmed(context) is not None

    async def read_whole(self, context: OffloadContext) -> Finding | None:
        """Read all of a copy and compare; what is sound, all of it, is in doubt no more."""
        copy, location = context.copy, context.location
        assert copy is not None
        assert location is not None
        await self._pay(copy.data_len)
        try:
            await verify_copy(self._objects, location, copy, read_back=ReadBack.FULL)
        except CorruptError as error:
            again = await self._as_before(context)
            if again is None:
                return None
            data = error.details.get("object") == location.data_key
            kind = FindingKind.DAMAGED_DATA if data else FindingKind.WRONG_OBJECT
            offset = error.details.get("offset", "0")
            return rules.finding_of(again, kind, f"{error.message} (at byte {offset})")
        if context.doubt is not None and is_read_whole(location, copy):
            # Only what was in doubt before it was read: what came meanwhile may be news.
            await self._contexts.find_sound(context.ledger_id, mark=context.doubt.mark)
        return None

    async def doubted(self, context: OffloadContext) -> Finding | None:
        """Tell what was found of a copy before, by whoever, and is not mended by now."""
        if context.doubt is None:
            return None
        again = await self._as_before(context)
        if again is None or again.doubt is None:
            return None
        cause = f"found before, and not mended since: {again.doubt.cause}"
        return rules.finding_of(again, FindingKind.DAMAGED_DATA, cause)

    async def unknown(
        self, name: StreamName, ledger_id: LedgerId, report: ScrubReport
    ) -> Finding | None:
        """Look again whether a ledger that a stream lists has no context."""
        try:
            snapshot = await self._catalog.streams.snapshot(name)
            there = await self._contexts.get(ledger_id)
        except TierlogError as error:
            if error.reason is not Reason.STREAM_NOT_FOUND:  # else it was deleted meanwhile
                report.skip(f"ledger {ledger_id} of {name}: {error}")
            return None
        if there is not None or all(one.ledger_id != ledger_id for one in snapshot.ledgers):
            return None
        cause = "the ledger is listed and has no context"
        return Finding(
            kind=FindingKind.POINTS_NOWHERE, stream=name, ledger_id=ledger_id, cause=cause
        )

    async def unfinished(self, context: OffloadContext, repairer: Repairer) -> Finding | None:
        """Look whether a repair was begun that nobody is at any more."""
        if context.repair is None or await repairer.is_at_work(context.ledger_id):
            return None
        again = await self._contexts.get(context.ledger_id)
        if again is None or again.repair != context.repair:
            return None
        cause = f"begun by {context.repair.worker}, attempt {context.repair.uuid}"
        return rules.finding_of(again, FindingKind.UNFINISHED_REPAIR, cause)

    async def doubt(self, context: OffloadContext, finding: Finding, report: ScrubReport) -> None:
        """Have the local copy kept, if there is one, whatever comes of a repair."""
        assert context.uuid is not None
        cause = f"{finding.kind.value}: {finding.cause}"
        try:
            await self._contexts.doubt(context.ledger_id, uuid=context.uuid, cause=cause)
        except TierlogError as error:
            report.skip(
                f"ledger {context.ledger_id} of {context.stream} is damaged ({cause}), and that "
                f"could not be kept in its metadata: {error}"
            )

    async def _as_before(self, context: OffloadContext) -> OffloadContext | None:
        """Return a ledger's context as of now, if it still names that complete copy."""
        again = await self._contexts.get(context.ledger_id)
        if again is None or copy_of(again) is None or again.uuid != context.uuid:
            return None
        return again
