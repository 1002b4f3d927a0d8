"""Objects of attribute indexes that nothing needs any more, and those that are needed and gone.

Owns looking at one stream's folder, and deleting below it. Does not own what is needed: the roots
of the record do (``tierlog.model.attribute_record``), and the one that the newest manifest names.

Steps: list the folder; read the record, the newest manifest, and the lists of chunks that both
name. If something is old and named by neither: raise the generation, read both again, and delete
what neither names then, each after a look at it at that very moment.

Invariants:
    * Nothing is deleted in the generation in which it could still be published: a flush that began
      before the sweep writes its object again under another name.
    * What a record or a manifest names and can't be read stops every deletion of the stream:
      unknown is not empty. So does a record that is not there while the manifest lets the stream
      live.
    * Nothing is told to be missing before record and object were looked at again.
    * Only objects of this cluster go, and none that is younger than the safety age. A leader
      counts it in progress, from the first look of its term that saw the object unneeded: no jump
      of a clock hastens a deletion, nor holds one up. A scrub, which remembers nothing, counts by
      the wall clock from when the object was written: its age is above any jump (a day).

Crash: what is left is found by the next sweep.
"""

import hashlib
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.format import attribute_objects as fmt
from tierlog.format import keys
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.attributes import IndexObject
from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.model.scrub import Finding, FindingKind
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.clock import Clock
from tierlog.ports.objects import ObjectInfo, ObjectStore

log = structlog.get_logger()

Pay = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be read; 0: one more request."""

Ages = Callable[[Iterable[str]], Mapping[str, int]]
"""Takes the keys that nothing needs; says how many ms each was surely seen so, where known."""

UNNEEDED_MAX: Final = 50_000
"""Keys that a leader remembers in all: about 15 MB."""

BRING_BACK = (
    "Bring the object back from another copy of the bucket; see the how-to scrub-a-bucket. What "
    "writers appended is also in the entries of the stream"
)


@dataclass(slots=True, kw_only=True)
class Swept:
    """What became of one stream's folder."""

    objects: int = 0
    unneeded: int = 0
    unneeded_bytes: int = 0
    deleted: int = 0
    too_young: int = 0
    foreign: int = 0
    kept: str = ""
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What must be there: lengths and digests by key; of a list the length is not known (-1)."""

    objects: Mapping[str, tuple[int, bytes]]
    unread: str = ""
    """Why not all of it is known; empty: it is."""


class UnneededSeen:
    """Since when, by its progress, a leader's looks saw that nothing needs an object.

    At most ``limit`` keys. One that finds no room is noted later: it goes late, never early.
    """

    def __init__(self, limit: int = UNNEEDED_MAX) -> None:
        self._room = limit
        self._since_ms: dict[StreamName, dict[str, int]] = {}

    def __repr__(self) -> str:
        return f"<UnneededSeen in {len(self._since_ms)} streams, room for {self._room}>"

    def look(self, name: StreamName, progress_ms: int, keys: Iterable[str]) -> Mapping[str, int]:
        """Note all that a stream does not need now, and return for how many ms that is known."""
        before = self._since_ms.get(name, {})
        self.forget(name)
        # Those that wait already first: whatever comes, each comes to its end.
        some = islice(sorted(keys, key=lambda key: key not in before), self._room)
        since = {key: before.get(key, progress_ms) for key in some}
        if since:
            self._since_ms[name] = since
            self._room -= len(since)
        return {key: progress_ms - since_ms for key, since_ms in since.items()}

    def forget(self, name: StreamName) -> None:
        """Know nothing of a stream."""
        self._room += len(self._since_ms.pop(name, {}))

    def clear(self, *, but: Container[StreamName] = ()) -> None:
        """Know nothing, but of some streams."""
        for name in [one for one in self._since_ms if one not in but]:
            self.forget(name)


class AttributeSweeper:
    """Looks after the attribute indexes of one cluster's part of one bucket."""

    def __init__(
        self,
        *,
        objects: ObjectStore,
        catalog: Catalog,
        manifests: ManifestStore,
        cluster_id: UUID,
        key_prefix: str,
        clock: Clock,
        safety_ms: int,
    ) -> None:
        self._objects = objects
        self._attributes = catalog.attributes
        self._manifests = manifests
        self._cluster_id = cluster_id
        self._prefix = key_prefix
        self._clock = clock
        self._safety_ms = safety_ms

    def __repr__(self) -> str:
        return f"<AttributeSweeper {self._prefix!r} of {self._cluster_id}>"

    async def run(
        self,
        name: StreamName,
        incarnation: UUID,
        *,
        delete: bool,
        pay: Pay,
        deep: bool = False,
        ages: Ages | None = None,
    ) -> Swept:
        """Look at one incarnation's index; ``deep``: read all of what is needed, and compare.

        ``ages``: what the safety age is counted by; None: by the wall clock.
        """
        swept = Swept()
        listed = await self._listed(name, incarnation, pay)
        swept.objects = len(listed)
        needed = await self._needed(name, incarnation, await self._record(name, incarnation), pay)
        await self._missing(name, incarnation, needed, listed, swept, pay)
        if deep:
            await self._deep(name, needed, swept, pay)
        unneeded = [one for one in listed.values() if one.key not in needed.objects]
        old = self._old(unneeded, None if needed.unread else ages)
        swept.too_young = len(unneeded) - len(old)
        swept.unneeded, swept.unneeded_bytes = len(old), sum(one.size for one in old)
        swept.kept = needed.unread
        if old and delete and not needed.unread:
            await self._delete(name, incarnation, old, swept, pay)
        return swept

    async def has_any(self, name: StreamName) -> bool:
        """Tell whether a checkpoint of a stream's attributes was ever made."""
        return await self._attributes.peek(name) is not None

    async def remove(self, name: StreamName, incarnation: UUID, *, at_most: int) -> int:
        """Delete the index of a stream that is being deleted; return how many objects went.

        Nothing is left of it if those are fewer than ``at_most``.
        """
        count = 0
        folder = fmt.attributes_folder(self._prefix, name, incarnation)
        async for info in self._objects.list(folder):
            if count == at_most:
                break
            if fmt.parse_attribute_key(self._prefix, info.key) is not None:
                await self._objects.delete(info.key)
                count += 1
        return count

    async def _record(self, name: StreamName, incarnation: UUID) -> AttributesRecord | None:
        record = await self._attributes.get(name)
        return record if record is not None and record.incarnation == incarnation else None

    async def _listed(self, name: StreamName, incarnation: UUID, pay: Pay) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        await pay(0)
        async for info in self._objects.list(
            fmt.attributes_folder(self._prefix, name, incarnation)
        ):
            if fmt.parse_attribute_key(self._prefix, info.key) is not None:
                found[info.key] = info
        return found

    async def _needed(
        self, name: StreamName, incarnation: UUID, record: AttributesRecord | None, pay: Pay
    ) -> Needed:
        """Return what a record needs, and the newest manifest, which is read after it."""
        await pay(0)
        known = await self._manifests.newest(name, incarnation)
        head, named, unread = known.head, None, ""
        if head is not None and head.lifecycle is not StreamLifecycle.DELETING:
            named = head.attributes
            if record is None:
                # They came back from a backup: newer ones may name what the manifest does not.
                unread = f"the metadata know no attributes of {name}, and its manifest lets it live"
        found: dict[str, tuple[int, bytes]] = {}
        for one in (record, named):
            if one is None:
                continue
            found |= {chunk.key: (-1, chunk.sha256) for chunk in one.chunks}
            every: list[IndexObject] = list(one.objects)
            for chunk in one.chunks:
                try:
                    every += await self._chunk(chunk.key, chunk.sha256, pay)
                except CorruptError as error:
                    unread = unread or error.message
            found |= {
                each.key: (each.length, each.sha256)
                for each in every
                if one.needs(each.start, each.end)
            }
        return Needed(objects=found, unread=unread)

    async def _chunk(self, key: str, sha256: bytes, pay: Pay) -> Iterable[IndexObject]:
        await pay(0)
        found = await self._objects.get(key)
        if found is None or hashlib.sha256(found[1]).digest() != sha256:
            what = "is not there" if found is None else "has another digest than its record says"
            raise CorruptError(
                f"the list {key} of an attribute index {what}", details={"object": key}
            )
        return fmt.decode_list(found[1], key=key)

    async def _missing(
        self,
        name: StreamName,
        incarnation: UUID,
        needed: Needed,
        listed: Mapping[str, ObjectInfo],
        swept: Swept,
        pay: Pay,
    ) -> None:
        """Tell of what is needed and is not there, or has another length; looked at again."""
        doubted = [
            key
            for key, (length, _) in needed.objects.items()
            if key not in listed or length not in (-1, listed[key].size)
        ]
        if not doubted:
            return
        # It may have been written since, or be needed no more.
        record = await self._record(name, incarnation)
        again = await self._needed(name, incarnation, record, pay)
        for key in doubted:
            if key not in again.objects:
                continue
            await pay(0)
            info, length = await self._objects.head(key), again.objects[key][0]
            if info is None:
                swept.findings.append(_finding(FindingKind.MISSING_OBJECT, name, key, "not there"))
            elif length not in (-1, info.size):
                cause = f"it has {info.size} bytes and not {length}"
                swept.findings.append(_finding(FindingKind.WRONG_OBJECT, name, key, cause))

    async def _deep(self, name: StreamName, needed: Needed, swept: Swept, pay: Pay) -> None:
        told = {one.key for one in swept.findings}
        for key, (length, sha256) in needed.objects.items():
            if key in told:
                continue
            await pay(max(0, length))
            found = await self._objects.get(key)
            if found is not None and hashlib.sha256(found[1]).digest() != sha256:
                cause = "its bytes have another digest than was written"
                swept.findings.append(_finding(FindingKind.DAMAGED_DATA, name, key, cause))

    def _old(self, unneeded: Sequence[ObjectInfo], ages: Ages | None) -> list[ObjectInfo]:
        if ages is None:
            now_ms = self._clock.wall_ms()
            ms = {one.key: now_ms - one.modified_ms for one in unneeded}
        else:
            ms = dict(ages(one.key for one in unneeded))
        return [one for one in unneeded if ms.get(one.key, -1) >= self._safety_ms]

    async def _delete(
        self,
        name: StreamName,
        incarnation: UUID,
        old: Iterable[ObjectInfo],
        swept: Swept,
        pay: Pay,
    ) -> None:
        # From here on nothing that was written before can be published any more.
        record = await self._attributes.raise_generation(name, incarnation)
        needed = await self._needed(name, incarnation, record, pay)
        swept.kept = needed.unread
        if needed.unread:
            return
        for one in old:
            if one.key in needed.objects:
                continue
            await pay(0)
            info = await self._objects.head(one.key)
            if info is None:
                continue
            if keys.cluster_of(info.metadata) != self._cluster_id:
                swept.foreign += 1
                continue
            await self._objects.delete(one.key)
            swept.deleted += 1
        log.info("attributes.swept", stream=name, objects=swept.deleted, of=swept.unneeded)


def _finding(kind: FindingKind, name: StreamName, key: str, cause: str) -> Finding:
    return Finding(
        kind=kind,
        stream=name,
        key=key,
        cause=f"an object of the stream's attribute index: {cause}",
        remedy=BRING_BACK,
    )
