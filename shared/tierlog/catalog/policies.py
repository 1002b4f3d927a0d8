"""What the cluster and its namespaces say about thresholds, in one node (ADR-0021).

Invariants:
    * What holds for a stream never contradicts itself: a change at any level is refused that
      would break the level's own values, or those of a stream below it, which is then named.
    * A change of a level and one of a stream below it at the same time don't slip past each
      other: both move the version of the one node.
    * Each change says when it was, later than the one before: a backup's levels are known by that.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from tierlog.catalog.change import settle
from tierlog.format import paths, records
from tierlog.model.errors import RefusedError, TierlogError
from tierlog.model.ids import StreamName, namespace_of
from tierlog.model.policy import NO_LEVELS, Policy, PolicyLevels, breaks_below
from tierlog.model.stream import Stream
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import Check, Create, MetadataStore, Operation, Put, Versioned

READS_IN_FLIGHT_MAX: Final = 32


async def read_levels(store: MetadataStore) -> PolicyLevels:
    """Return the levels as this client sees them; nothing is said in a new cluster."""
    found = await store.get(paths.POLICIES)
    return NO_LEVELS if found is None else records.decode_levels(found.data)


async def in_step_with_levels(
    store: MetadataStore, name: StreamName, own: Policy
) -> list[Operation]:
    """Check what a stream is to say against the levels above; return what the change goes with.

    Bounds of ledgers move no version: where two changes of them slip past each other, ledgers
    are rolled in time all the same. Raises POLICY_INVALID.
    """
    found = await store.get(paths.POLICIES)
    levels = NO_LEVELS if found is None else records.decode_levels(found.data)
    levels.check(name, own)
    return _touching(found) if own.has_bounds or own.ledger_age_ms_max is not None else []


async def pinned_levels(store: MetadataStore) -> tuple[PolicyLevels, Operation]:
    """Return the levels, and what a transaction goes with that holds only while they stand."""
    found = await store.get(paths.POLICIES)
    if found is None:
        # There is no checking for what is not there: it is made, as it is.
        return NO_LEVELS, Create(paths.POLICIES, records.encode_levels(NO_LEVELS))
    return records.decode_levels(found.data), Check(paths.POLICIES, found.version)


async def touch_levels(store: MetadataStore) -> list[Operation]:
    """Return what tells everyone who follows the levels to look at the streams below."""
    return _touching(await store.get(paths.POLICIES))


def _touching(found: Versioned | None) -> list[Operation]:
    if found is None:
        return [Create(paths.POLICIES, records.encode_levels(NO_LEVELS))]
    # The same again: whoever judged the streams by its version judges them anew.
    return [Put(paths.POLICIES, found.data, found.version)]


class PolicyCatalog:
    """The levels above streams."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def levels(self) -> PolicyLevels:
        """Return the levels as of now (after ``sync``)."""
        await self._store.sync(paths.POLICIES)
        return await read_levels(self._store)

    async def effective(self, stream: Stream) -> Policy:
        """Return what holds for a stream, of which the caller has read what it says itself."""
        return (await self.levels()).effective(stream.name, stream.policy)

    async def watch(self) -> tuple[PolicyLevels, asyncio.Event]:
        """Return the levels, and an event that is set once something may hold no more.

        It is set too when a stream's own thresholds change that others could contradict, or
        that its owner is to follow; and when a stream is to be deleted.
        """
        found, changed = await self._store.watch(paths.POLICIES)
        levels = NO_LEVELS if found is None else records.decode_levels(found.data)
        return levels, changed

    async def set_level(self, namespace: str | None, policy: Policy) -> PolicyLevels:
        """Replace what a namespace says, or, for None, the cluster; POLICY_INVALID says why not."""
        return await self.change_level(namespace, lambda _: policy)

    async def change_level(
        self, namespace: str | None, change: Callable[[Policy], Policy]
    ) -> PolicyLevels:
        """Make what a level says what ``change`` makes of it, as of one moment."""

        async def one_round() -> PolicyLevels:
            found = await self._store.get(paths.POLICIES)
            before = NO_LEVELS if found is None else records.decode_levels(found.data)
            planned = before.with_level(namespace, change(before.level(namespace)))
            if planned == before:
                return before
            await self._check_streams(planned, namespace)
            planned = planned.changed(namespace, self._clock.wall_ms())
            data = records.encode_levels(planned)
            if found is None:
                await self._store.create(paths.POLICIES, data)
            else:
                await self._store.set(paths.POLICIES, data, version=found.version)
            return planned

        return await settle(self._store, self._ids, paths.POLICIES, one_round)

    async def _check_streams(self, levels: PolicyLevels, namespace: str | None) -> None:
        """Refuse levels that contradict what a stream says; the first by name is told."""
        await self._store.sync(paths.STREAMS)
        names = [StreamName(one) for one in await self._store.children(paths.STREAMS) or []]
        below = [one for one in names if namespace is None or namespace_of(one) == namespace]
        slots = asyncio.Semaphore(READS_IN_FLIGHT_MAX)
        broken: dict[StreamName, RefusedError] = {}
        troubles: list[TierlogError] = []

        async def check(name: StreamName) -> None:
            try:
                async with slots:
                    found = await self._store.get(paths.stream_path(name))
                if found is None:
                    return
                own = records.decode_stream(found.data).policy
            except TierlogError as error:
                troubles.append(error)
                return
            try:
                levels.check(name, own)
            except RefusedError as error:
                broken[name] = error

        async with asyncio.TaskGroup() as group:
            for name in below:
                group.create_task(check(name))
        if troubles:
            # A stream that can't be read may be one that breaks.
            raise troubles[0]
        for name in sorted(broken):
            raise breaks_below(f"stream {name}", broken[name]) from broken[name]
