"""Streams in the metadata store: creating, reading whole, and claiming them.

Invariants:
    * A snapshot is of one moment: the stream's znode did not move while its pages were read.
    * Whoever claims raises the owner epoch; a deposed owner's changes then fail.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tierlog.catalog.change import MOVED, Moved, ensure_node, settle
from tierlog.catalog.policies import in_step_with_levels, read_levels
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.partitions import is_partitioned, partition_names
from tierlog.model.policy import NO_LEVELS, Policy, PolicyLevels
from tierlog.model.stream import (
    LedgerPageRef,
    ListedLedger,
    OffloadPause,
    Owner,
    Stream,
    StreamLifecycle,
)
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import Create, MetadataStore, NodeExistsError, Put

PAUSE_CAUSE_LEN_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSnapshot:
    """A stream as of one moment. ``ledgers`` is the whole list, pages included.

    ``levels``: what is said above it about thresholds, as of a moment after.
    """

    stream: Stream
    version: int
    ledgers: tuple[ListedLedger, ...]
    levels: PolicyLevels = NO_LEVELS

    @property
    def policy(self) -> Policy:
        """What holds for the stream, every value set that has a default."""
        return self.levels.effective(self.stream.name, self.stream.policy)


class StreamCatalog:
    """The streams of a cluster."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def create(
        self,
        name: StreamName,
        *,
        raw: bool = False,
        policy: Policy | None = None,
        partitions: int = 0,
    ) -> tuple[Stream, bool]:
        """Create a stream, or return the one of that name and shape; True when it is new.

        With ``partitions`` each of those is created first: once a partitioned stream is there, so
        are they, and a call that was cut short is completed by the next one.
        """
        children = partition_names(name, partitions) if partitions else []
        wanted = Stream(
            name=name,
            incarnation=self._ids.uuid(),
            created_ms=self._clock.wall_ms(),
            raw=raw,
            policy=policy or Policy(),
            partitions=partitions,
        )
        path = paths.stream_path(name)

        async def one_round() -> tuple[Stream, bool]:
            found = await self._store.get(path)
            if found is None:
                # A name that is taken is refused before anything is made.
                for one in children:
                    await self.create(one, raw=raw, policy=policy)
                # Thresholds must hold together with the levels above them too.
                above = await in_step_with_levels(self._store, name, wanted.policy)
                data = records.encode_stream(wanted)
                await ensure_node(self._store, paths.STREAMS)
                await self._store.transact([Create(path, data), *above])
                return wanted, True
            stream = records.decode_stream(found.data)
            check_not_deleting(stream)
            if stream.incarnation == wanted.incarnation:
                return stream, True
            _check_shape(stream, wanted, any_policy=policy is None)
            return stream, False

        return await settle(self._store, self._ids, path, one_round)

    async def names(self) -> list[StreamName]:
        """Return the names of all streams, sorted."""
        children = await self._store.children(paths.STREAMS)
        return [StreamName(name) for name in children or []]

    async def partitions(self, stream: Stream) -> list[StreamName]:
        """Return the partitions of a stream that are there: each may be deleted by itself."""
        if not stream.partitions:
            return []
        there = frozenset(await self.names())
        return [one for one in partition_names(stream.name, stream.partitions) if one in there]

    async def watch_names(self) -> tuple[list[StreamName], asyncio.Event]:
        """Return the names of all streams, and an event that is set once there are others."""
        children, changed = await self._store.watch_children(paths.STREAMS)
        return [StreamName(name) for name in children or []], changed

    async def watch_snapshot(
        self, name: StreamName, known: Mapping[LedgerPageRef, tuple[ListedLedger, ...]]
    ) -> tuple[StreamSnapshot, asyncio.Event, dict[LedgerPageRef, tuple[ListedLedger, ...]]]:
        """Return the stream, an event that is set once it has changed, and its pages.

        ``known`` pages are not read again: a page with another content has another reference.
        The snapshot has no levels.
        """
        path = paths.stream_path(name)

        async def one_round() -> (
            tuple[StreamSnapshot, asyncio.Event, dict[LedgerPageRef, tuple[ListedLedger, ...]]]
            | Moved
        ):
            found, changed = await self._store.watch(path)
            if found is None:
                raise stream_not_found(name)
            stream = records.decode_stream(found.data)
            pages: dict[LedgerPageRef, tuple[ListedLedger, ...]] = {}
            for ref in stream.pages:
                kept = known.get(ref)
                if kept is None:
                    data = await self._store.get(paths.page_path(name, ref.page_number))
                    if data is None or changed.is_set():
                        return MOVED
                    kept = records.decode_page(data.data)
                    if not ref.is_of(kept):
                        return MOVED
                pages[ref] = kept
            paged = [one for page in pages.values() for one in page]
            snapshot = StreamSnapshot(
                stream=stream, version=found.version, ledgers=(*paged, *stream.ledgers)
            )
            return snapshot, changed, pages

        return await settle(self._store, self._ids, path, one_round)

    async def snapshot(self, name: StreamName) -> StreamSnapshot:
        """Return the stream as of now (after ``sync``), or raise STREAM_NOT_FOUND."""
        path = paths.stream_path(name)

        async def one_round() -> StreamSnapshot | Moved:
            await self._store.sync(path)
            found = await self._store.get(path)
            if found is None:
                raise stream_not_found(name)
            stream = records.decode_stream(found.data)
            paged: list[ListedLedger] = []
            for page in stream.pages:
                data = await self._store.get(paths.page_path(name, page.page_number))
                if data is None:
                    return MOVED
                paged.extend(records.decode_page(data.data))
            if stream.pages:
                again = await self._store.get(path)
                if again is None or again.version != found.version:
                    return MOVED
            return StreamSnapshot(
                stream=stream,
                version=found.version,
                ledgers=(*paged, *stream.ledgers),
                levels=await read_levels(self._store),
            )

        return await settle(self._store, self._ids, path, one_round)

    async def get(self, name: StreamName) -> Stream:
        """Return the stream's znode as of now (after ``sync``), or raise STREAM_NOT_FOUND."""
        path = paths.stream_path(name)
        await self._store.sync(path)
        found = await self._store.get(path)
        if found is None:
            raise stream_not_found(name)
        return records.decode_stream(found.data)

    async def claim(
        self, name: StreamName, node_id: NodeId, *, over: Stream | None = None
    ) -> Stream:
        """Become the owner: raise the epoch by one and put a fresh claim beside it.

        Raises FENCED when the stream has another owner than ``over``, if that is given.
        """
        owner = Owner(node_id=node_id, claim=self._ids.uuid())

        def plan(stream: Stream) -> Stream:
            if over is not None:
                check_owner(stream, over)
            if not stream.ledgers or stream.ledgers[-1].closed:
                # One that is open is still to be recovered, and closed.
                check_not_deleting(stream)
            return replace(stream, owner_epoch=stream.owner_epoch + 1, owner=owner)

        return await self.change(name, plan, applied=lambda stream: stream.owner == owner)

    async def release(self, claimed: Stream) -> Stream:
        """Give a claim up, so that whoever is asked next may claim; not if it is another's now."""
        return await self.change(
            claimed.name,
            lambda stream: replace(stream, owner=None),
            applied=lambda stream: (
                stream.owner != claimed.owner or stream.incarnation != claimed.incarnation
            ),
        )

    async def set_policy(self, name: StreamName, policy: Policy) -> Stream:
        """Replace the stream's own thresholds; refused where they contradict those above."""
        return await self.change_policy(name, lambda _: policy)

    async def change_policy(self, name: StreamName, change: Callable[[Policy], Policy]) -> Stream:
        """Make the stream's own thresholds what ``change`` makes of them, as of one moment."""
        path = paths.stream_path(name)

        async def one_round() -> Stream:
            found = await self._store.get(path)
            if found is None:
                raise stream_not_found(name)
            stream = records.decode_stream(found.data)
            policy = change(stream.policy)
            if stream.policy == policy:
                return stream
            changed_ms = max(self._clock.wall_ms(), stream.policy_changed_ms + 1)
            planned = replace(stream, policy=policy, policy_changed_ms=changed_ms)
            above = await in_step_with_levels(self._store, name, policy)
            put = Put(path, records.encode_stream(planned), found.version)
            await self._store.transact([put, *above])
            return planned

        return await settle(self._store, self._ids, path, one_round)

    async def want_offloaded(self, name: StreamName, through: LedgerId) -> Stream:
        """Keep an admin's wish that every sealed ledger up to ``through`` be offloaded."""
        return await self.change(
            name,
            lambda stream: replace(stream, offload_through=through),
            applied=lambda stream: (
                stream.offload_through is not None and stream.offload_through >= through
            ),
        )

    async def pause_offload(self, name: StreamName, cause: str = "") -> Stream:
        """Let no offload of the stream begin, and no copy be deleted; again: the first holds."""
        now_ms = self._clock.wall_ms()
        pause = OffloadPause(since_ms=now_ms, cause=cause[:PAUSE_CAUSE_LEN_MAX])
        return await self.change(
            name,
            lambda stream: replace(
                stream, offload_pause=pause, offload_pauses=max(now_ms, stream.offload_pauses + 1)
            ),
            applied=lambda stream: stream.offload_pause is not None,
        )

    async def resume_offload(self, name: StreamName) -> Stream:
        """Let it go on."""
        return await self.change(
            name,
            lambda stream: replace(stream, offload_pause=None),
            applied=lambda stream: stream.offload_pause is None,
        )

    async def change(
        self,
        name: StreamName,
        plan: Callable[[Stream], Stream],
        *,
        applied: Callable[[Stream], bool],
    ) -> Stream:
        """Replace the stream's znode by ``plan`` of it, unless ``applied`` says it is there."""
        path = paths.stream_path(name)

        async def one_round() -> Stream:
            found = await self._store.get(path)
            if found is None:
                raise stream_not_found(name)
            stream = records.decode_stream(found.data)
            if applied(stream):
                return stream
            planned = plan(stream)
            await self._store.set(path, records.encode_stream(planned), version=found.version)
            return planned

        return await settle(self._store, self._ids, path, one_round)

    async def ensure_roots(self) -> None:
        """Make the folders that transactions rely on."""
        for root in (paths.STREAMS, paths.CONTEXTS):
            try:
                await ensure_node(self._store, root)
            except NodeExistsError:
                continue


def _check_shape(stream: Stream, wanted: Stream, *, any_policy: bool) -> None:
    """Refuse a stream that is there and not as it is wanted."""
    if stream.partitions and not wanted.partitions and stream.raw == wanted.raw:
        raise is_partitioned(stream.name, stream.partitions)
    same_policy = any_policy or stream.policy == wanted.policy
    if (stream.raw, stream.partitions) != (wanted.raw, wanted.partitions) or not same_policy:
        raise RefusedError(
            f"stream {stream.name} exists with another shape",
            remedy="Use another name, or leave raw, policy and partitions as they are",
        )


def stream_not_found(name: StreamName) -> RefusedError:
    """Say that there is no such stream."""
    return RefusedError(
        f"there is no stream {name}",
        reason=Reason.STREAM_NOT_FOUND,
        remedy="Create it by appending to it, or list streams with: tierlog stream ls",
        details={"stream": name},
    )


def check_not_paused(stream: Stream) -> None:
    """Refuse an offload that an admin does not want for now."""
    if stream.offload_pause is not None:
        raise offload_paused(stream.name, stream.offload_pause)


def offload_paused(name: StreamName, pause: OffloadPause) -> RefusedError:
    """Say that an admin wants no offload of the stream for now."""
    return RefusedError(
        f"offloading of stream {name} is paused" + (f": {pause.cause}" if pause.cause else ""),
        remedy=f"Let it go on with: tierlog offload resume {name}",
        details={"stream": name, "since_ms": str(pause.since_ms)},
    )


def check_not_deleting(stream: Stream) -> None:
    """Raise STREAM_NOT_FOUND for a stream that is being deleted."""
    if stream.lifecycle is StreamLifecycle.DELETING:
        raise RefusedError(
            f"stream {stream.name} is being deleted",
            reason=Reason.STREAM_NOT_FOUND,
            remedy="Use another name, or wait until nothing of it is left: "
            f"tierlog stream delete {stream.name} tells how much is",
            details={"stream": stream.name},
        )


def check_owner(stream: Stream, claimed: Stream) -> None:
    """Raise FENCED unless ``stream`` still has the owner and incarnation of ``claimed``."""
    same = (
        stream.owner == claimed.owner
        and stream.owner_epoch == claimed.owner_epoch
        and stream.incarnation == claimed.incarnation
    )
    if not same:
        raise RefusedError(
            f"stream {stream.name} has another owner now, epoch {stream.owner_epoch}",
            reason=Reason.FENCED,
            remedy="Stop appending; find the owner and follow it",
            details={"owner_epoch": str(stream.owner_epoch)},
        )
