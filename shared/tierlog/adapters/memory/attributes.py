"""The attribute index in memory: one store of checkpoints, any number of processes with it.

Invariants:
    * A published checkpoint never changes; every version can still be read.
    * Whoever loaded or flushed last, by its owner epoch, is the only one that can publish.
    * A flush is published wholly, with its index and its core attributes, or not at all.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final
from uuid import UUID

from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.model.attribute_record import KeyRange
from tierlog.model.attributes import AttributeKey, Checkpoint, IndexRoot, is_core
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.ports.attributes import Salvage

ITERATED_MAX: Final = 100
"""Attributes in one run of ``iterate``."""

Attributes = dict[AttributeKey, int]


class MemoryAttributes:
    """What all processes share: versions of indexes, and the newest checkpoint of each stream."""

    def __init__(self) -> None:
        self.newest: dict[UUID, Checkpoint] = {}
        """By the stream's incarnation."""
        self.flushes = 0
        self._versions: dict[int, Attributes] = {}
        self._epochs: dict[UUID, int] = {}

    def __repr__(self) -> str:
        return f"<MemoryAttributes {len(self.newest)} streams, {self.flushes} flushes>"

    def connect(self, faults: Faults | None = None) -> "MemoryAttributeIndex":
        """Return an index that suffers ``faults``."""
        return MemoryAttributeIndex(self, faults or no_faults())

    def load(self, stream: Stream) -> Checkpoint:
        """Return the newest checkpoint; older owners can't publish any more."""
        self._enter(stream)
        return self.newest.get(stream.incarnation, Checkpoint())

    def attributes(self, checkpoint: Checkpoint) -> Attributes:
        """Return the extended attributes as of a checkpoint."""
        root = checkpoint.root
        return self._versions[root.root_offset] if root.root_length else {}

    def flush(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        changes: Mapping[AttributeKey, int],
        core: Mapping[AttributeKey, int],
        through: Position,
    ) -> Checkpoint:
        """Publish ``base`` with changes, once."""
        assert not any(is_core(key) for key in changes)
        assert all(is_core(key) for key in core)
        self._enter(claimed)
        newest = self.newest.get(claimed.incarnation, Checkpoint())
        if newest != base:
            if newest.through == through:
                return newest  # this very flush, whose answer was lost
            raise _fenced(f"the index of stream {claimed.name} moved on to {newest.through}")
        assert base.through is None or base.through <= through
        values = self.attributes(base) | dict(changes)
        return self._published(claimed, base, values, core=core, through=through)

    def make_anew(
        self, claimed: Stream, base: Checkpoint, values: Mapping[AttributeKey, int]
    ) -> Checkpoint:
        """Publish another index as of the entry of ``base``, once."""
        self._enter(claimed)
        newest = self.newest.get(claimed.incarnation, Checkpoint())
        if newest != base:
            if newest.through == base.through:
                return newest
            raise _fenced(f"the index of stream {claimed.name} moved on to {newest.through}")
        return self._published(claimed, base, dict(values), core=base.core, through=base.through)

    def _published(
        self,
        claimed: Stream,
        base: Checkpoint,
        version: Attributes,
        *,
        core: Mapping[AttributeKey, int],
        through: Position | None,
    ) -> Checkpoint:
        self.flushes += 1
        self._versions[self.flushes] = version
        made = Checkpoint(
            through=through,
            core=dict(core),
            root=IndexRoot(
                root_offset=self.flushes,
                root_length=1,
                start=self.flushes,
                end=self.flushes + 1,
                count=len(version),
            ),
            generation=base.generation,
        )
        self.newest[claimed.incarnation] = made
        return made

    def _enter(self, stream: Stream) -> None:
        epoch = self._epochs.get(stream.incarnation, 0)
        if stream.owner_epoch < epoch:
            raise _fenced(f"stream {stream.name} has an owner of epoch {epoch}")
        self._epochs[stream.incarnation] = stream.owner_epoch


class MemoryAttributeIndex:
    """The port, as one process has it."""

    def __init__(self, shared: MemoryAttributes, faults: Faults) -> None:
        self._shared = shared
        self.faults = faults

    def __repr__(self) -> str:
        return f"<MemoryAttributeIndex over {self._shared!r}>"

    async def load(self, claimed: Stream) -> Checkpoint:
        return await self.faults.call(
            "attributes.load", lambda: self._shared.load(claimed), changes=False
        )

    async def get(
        self, checkpoint: Checkpoint, keys: Sequence[AttributeKey]
    ) -> dict[AttributeKey, int]:
        def effect() -> Attributes:
            found = self._shared.attributes(checkpoint)
            return {key: found[key] for key in keys if key in found}

        return await self.faults.call("attributes.get", effect, changes=False)

    async def iterate(
        self, checkpoint: Checkpoint, first: AttributeKey, last: AttributeKey
    ) -> AsyncIterator[Sequence[tuple[AttributeKey, int]]]:
        found = sorted(self._shared.attributes(checkpoint).items())
        within = [(key, value) for key, value in found if first <= key <= last]
        for start in range(0, len(within), ITERATED_MAX):
            await self.faults.call("attributes.iterate", lambda: None, changes=False)
            yield within[start : start + ITERATED_MAX]

    async def flush(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        changes: Mapping[AttributeKey, int],
        core: Mapping[AttributeKey, int],
        through: Position,
    ) -> Checkpoint:
        def effect() -> Checkpoint:
            return self._shared.flush(claimed, base, changes=changes, core=core, through=through)

        try:
            return await self.faults.call("attributes.flush", effect, changes=True)
        except IndeterminateError:
            found = await self.load(claimed)
            if found != base:
                return found
            raise RetryableError(
                f"the flush of stream {claimed.name} got lost", remedy="Flush again"
            ) from None

    async def former(self, claimed: Stream) -> Sequence[Checkpoint]:
        return await self.faults.call("attributes.former", list, changes=False)

    async def salvage(self, checkpoint: Checkpoint) -> Salvage:
        return await self.faults.call(
            "attributes.salvage",
            lambda: Salvage(self._shared.attributes(checkpoint), ()),
            changes=False,
        )

    async def make_anew(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        values: Mapping[AttributeKey, int],
        good: Position | None,
        lost: Sequence[KeyRange] = (),
    ) -> Checkpoint:
        return await self.faults.call(
            "attributes.make_anew",
            lambda: self._shared.make_anew(claimed, base, values),
            changes=True,
        )


def _fenced(why: str) -> RefusedError:
    return RefusedError(why, reason=Reason.FENCED, remedy="Find out who owns the stream")
