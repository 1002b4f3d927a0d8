"""Copies, attribute indexes and manifests out of one bucket into another, byte for byte or anew.

Owns one ledger's way, one stream's, and what says that it has arrived. Does not own which ledgers
go, nor in which order streams do (jobs on Spark do).

Invariants:
    * A copy's index object is written last, once all its data were read back where they are now
      and compared: an index that is there says that its copy has arrived. Of a single object,
      which comes at once, only reading says so.
    * A manifest names only copies that have arrived, where they are now. None takes the place of
      one that is surely newer.
    * Another layout is made only of data that were compared with what was written.
    * All that is written has the same key and the same bytes whoever writes it, how often and at
      once with whomever: what another layout makes anew has a UUID out of the one it is made of.
      A manifest's generation is written by one alone; who comes second finds what it wanted.
    * Nothing is deleted, and the source is only read.

Crash: what did not arrive is brought again; at most one open upload is left for each that was
being sent.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID, uuid5

from tierlog.format import attribute_objects as fmt
from tierlog.format import keys
from tierlog.format.attribute_page import check_pages
from tierlog.format.checksum import crc32c
from tierlog.format.index import ObjectIndex
from tierlog.format.manifest import keep
from tierlog.format.side import SideObject
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.errors import CorruptError, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.manifest import (
    KeptLedger,
    ManifestCopy,
    ManifestHead,
    ManifestLedger,
    said_older,
)
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.attribute_restore import checked_attributes
from tierlog.offload.comparing import Comparing, ComparingGrains, ComparingSingle
from tierlog.offload.drivers import Drivers, known_here
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog.offload.restore import moved_here
from tierlog.offload.single_driver import SINGLE_DRIVER
from tierlog.offload.single_reader import load_single_index
from tierlog.offload.verify import ReadBack, is_read_whole, verify_copy
from tierlog.ports.objects import (
    NoSuchUploadError,
    ObjectExistsError,
    ObjectInfo,
    ObjectReads,
    ObjectStore,
    check_length,
)

PIECE_BYTES: Final = 16 * 1024 * 1024
ATTRIBUTE_READS_MAX: Final = 8
TRIES_MAX: Final = 3

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlace:
    """Where a bucket is, as places of copies say it."""

    bucket: str
    endpoint_name: str
    key_prefix: str

    def here(self, ledger: ManifestLedger) -> ManifestLedger:
        """Return a ledger with its copy in this bucket."""
        return moved_here(
            ledger,
            bucket=self.bucket,
            endpoint_name=self.endpoint_name,
            prefix=self.key_prefix,
        )


class CopyMover:
    """Brings copies from ``source`` to ``target``.

    ``layouts``: the source's drivers for reading, and the target's for writing, where copies are
    to have another layout; None: they stay byte for byte what they are. ``restores``: the target is
    what the source was made of, so that its export copies are newer, if they are others.
    """

    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        *,
        origin: BucketPlace,
        place: BucketPlace,
        read_back: ReadBack = ReadBack.FULL,
        layouts: tuple[Drivers, Drivers] | None = None,
        restores: bool = False,
    ) -> None:
        self._source = source
        self._target = target
        self._origin = origin
        self._place = place
        self._read_back = read_back
        self._layouts = layouts
        self._restores = restores

    def __repr__(self) -> str:
        return f"<CopyMover {self._origin.bucket} to {self._place.bucket}>"

    def wanted_uuid(self, copy: ManifestCopy) -> UUID:
        """Return the UUID under which a copy lies in the target."""
        if self._layouts is None:
            return copy.uuid
        writes = self._layouts[1].writes
        same = copy.location.is_single == (writes == SINGLE_DRIVER)
        return copy.uuid if same else uuid5(copy.uuid, writes)

    async def arrived(
        self, ledger: ManifestLedger, known: ManifestLedger | None, *, deep: bool, tell: bool
    ) -> ManifestLedger | None:
        """Return a ledger as the target has it; None: its copy has not arrived, or not whole.

        ``known``: as the target's manifest has it. ``deep``: all data are read and compared.
        ``tell``: ``CorruptError`` says of which object, and why.
        """
        assert ledger.copy is not None
        uuid = self.wanted_uuid(ledger.copy)
        named = known if known and known.copy and known.copy.uuid == uuid else None
        if uuid == ledger.copy.uuid:
            found = self._place.here(ledger)
        elif named is not None:
            found = self._place.here(named)
        else:
            # What another layout made is known by a manifest alone.
            return None
        assert found.copy is not None
        location, copy = found.copy.location, found.copy.copy
        try:
            if deep or location.is_single:
                # What is named there had arrived; of all else reading alone tells.
                how = ReadBack.FULL if deep else ReadBack.NONE if named else self._read_back
                await verify_copy(self._target, location, copy, read_back=how)
            else:
                await self._check_objects(location, copy)
        except CorruptError:
            if tell:
                raise
            return None
        return found

    async def _check_objects(self, location: Tier2Location, copy: Tier2Copy) -> None:
        await _whole(self._target, location.index_key, copy.index_sha256, copy.index_len)
        lengths = {location.data_key: copy.data_len}
        if copy.side_len:
            lengths[location.side_key] = copy.side_len
        for key, length in lengths.items():
            info = await self._target.head(key)
            if info is None or info.size != length:
                raise CorruptError(f"object {key} is not there, or has not {length} bytes")

    async def bring(
        self, ledger: ManifestLedger, extra: Mapping[str, str], *, named: bool = False
    ) -> ManifestLedger:
        """Bring a ledger's copy, verified where it is then; return the ledger as it is there.

        ``extra`` is put on objects of another layout. ``named``: whoever reads the target may know
        the copy already, and is given nothing damaged in the place of what is missing: it is
        compared as it passes.
        """
        assert ledger.copy is not None
        origin = self._origin.here(ledger)
        assert origin.copy is not None
        self.check_movable(ledger)
        for left in reversed(range(TRIES_MAX)):
            try:
                if self.wanted_uuid(origin.copy) != origin.copy.uuid:
                    return await self._anew(origin, extra)
                return await self._same(origin, named=named)
            except CorruptError as error:
                await self._check_source(origin, error)
                if not left:
                    raise
            except NoSuchUploadError:
                # Somebody brings the same, and was done first with a part of it.
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def check_movable(self, ledger: ManifestLedger) -> None:
        """Refuse a copy that can't be moved, or not to the layout that is wanted."""
        copy, ledger_id = ledger.copy, ledger.listed.ledger_id
        assert copy is not None
        if not known_here(copy.location):
            raise RefusedError(
                f"driver {copy.location.driver!r} wrote the copy of ledger {ledger_id}, which "
                "can't be moved",
                remedy="Move it with what wrote it, or leave its stream out",
            )
        if self.wanted_uuid(copy) != copy.uuid and not is_read_whole(copy.location, copy.copy):
            raise RefusedError(
                f"the copy of ledger {ledger_id} has no side object: nothing says what the data "
                "must be, of which another layout would be made",
                remedy="Copy it as it is, without another layout, or leave its stream out",
            )

    async def _check_source(self, origin: ManifestLedger, cause: CorruptError) -> None:
        """Raise what is wrong with the source, if it is that; else the way is to blame."""
        assert origin.copy is not None
        location, copy = origin.copy.location, origin.copy.copy
        try:
            await verify_copy(self._source, location, copy, read_back=ReadBack.FULL)
        except CorruptError as error:
            raise CorruptError(
                f"ledger {origin.listed.ledger_id} is damaged where it comes from, or went from "
                f"there meanwhile: {error.message}",
                remedy="Run this again; what stays damaged, repair in bucket "
                f"{self._origin.bucket}: tierlog scrub --repair --deep",
                details=error.details,
            ) from cause

    async def _same(self, origin: ManifestLedger, *, named: bool) -> ManifestLedger:
        moved = self._place.here(origin)
        assert origin.copy is not None
        assert moved.copy is not None
        source, target, copy = origin.copy.location, moved.copy.location, origin.copy.copy
        compares = named and is_read_whole(source, copy)
        if await self._is_begun(target) or (named and not compares):
            await verify_copy(self._source, source, copy, read_back=ReadBack.FULL)
        key, to_key = source.data_key, target.data_key
        by: Comparing | None = None
        if source.is_single:
            single = await load_single_index(self._source, source, copy=copy)
            if compares:
                by = ComparingSingle(key, copy, single)
            blocks = [(one.offset, one.length) for one in single.blocks()]
            await self._send(key, to_key, [(0, single.index_len), *blocks], by)
            await verify_copy(self._target, target, copy, read_back=self._read_back)
        else:
            index = await _whole(self._source, source.index_key, copy.index_sha256, copy.index_len)
            spans = [(one.offset, one.length) for one in ObjectIndex.decode(index[1]).blocks()]
            side = None
            if copy.side_len:
                side = await _whole(self._source, source.side_key, copy.side_sha256, copy.side_len)
                if compares:
                    by = ComparingGrains(key, copy, SideObject.decode(side[1]))
            await self._send(key, to_key, spans, by)
            if side is not None:
                await self._put(target.side_key, side)
            arriving = _Arriving(self._target, target.index_key, index)
            await verify_copy(arriving, target, copy, read_back=self._read_back)
            await self._put(target.index_key, index)
        await self.bring_export(origin)
        return moved

    async def _is_begun(self, target: Tier2Location) -> bool:
        """Tell whether data are there, which may be sound, or an index that calls them so."""
        for key in dict.fromkeys((target.data_key, target.index_key)):
            if await self._target.head(key) is not None:
                return True
        return False

    async def _anew(self, origin: ManifestLedger, extra: Mapping[str, str]) -> ManifestLedger:
        """Write a copy of another layout out of the one that is there."""
        assert self._layouts is not None
        assert origin.copy is not None
        reads, writes = self._layouts
        found, ledger_id = origin.copy, origin.listed.ledger_id
        uuid = self.wanted_uuid(found)
        await self._check_vouched(found)
        handle = await reads.read_offloaded(ledger_id, found.uuid, found.location, copy=found.copy)
        try:
            copy = await writes.offload(handle, uuid, {**extra, "TierlogCopyOf": str(found.uuid)})
        finally:
            await handle.close()
        location = writes.location(ledger_id, uuid)
        await verify_copy(self._target, location, copy, read_back=self._read_back)
        made = ManifestCopy(uuid=uuid, location=location, complete_ms=found.complete_ms, copy=copy)
        return replace(origin, copy=made)

    async def _check_vouched(self, found: ManifestCopy) -> None:
        """Raise unless all data that are read of a copy are what was written.

        A copy with new checksums calls everything good that it is made of. What has a side object
        is compared as it is read.
        """
        if not found.copy.side_len:
            await verify_copy(self._source, found.location, found.copy, read_back=ReadBack.FULL)

    async def bring_export(self, ledger: ManifestLedger) -> None:
        """Bring the export copy of a ledger whose copy is there, if it has one.

        Nobody depends on it, and it may be made long after the copy. With another layout it stays.
        """
        origin, moved = self._origin.here(ledger).copy, self._place.here(ledger).copy
        assert origin is not None
        assert moved is not None
        if self.wanted_uuid(origin) != origin.uuid:
            return
        key, to_key = keys.export_key(origin.location), keys.export_key(moved.location)
        info = await self._source.head(key)
        if info is None:
            return
        there = await self._target.head(to_key)
        if there is None or (there.size != info.size and not self._restores):
            await self._send(key, to_key, pieces(info.size))

    async def _put(self, key: str, found: tuple[ObjectInfo, bytes]) -> None:
        info, raw = found
        await self._target.put(key, raw, metadata=info.metadata, content_type=keys.CONTENT_TYPE)

    async def _send(
        self, key: str, to_key: str, spans: Sequence[Span], by: Comparing | None = None
    ) -> None:
        """Send an object in these parts, as it was sent before: its ETag stays what it was.

        ``by``: compares it. Nobody sees any of it before all of it was compared.
        """
        info = await self._source.head(key)
        length = sum(size for _, size in spans)
        if info is None or info.size != length:
            raise CorruptError(
                f"object {key} {'is not there' if info is None else f'has not {length} bytes'}",
                details={"object": key, "offset": "0"},
            )
        if not length:
            await self._put(to_key, (info, b""))
            return
        upload_id = await self._target.create_upload(
            to_key, metadata=info.metadata, content_type=keys.CONTENT_TYPE
        )
        try:
            parts = []
            for number, (start, size) in enumerate(spans, 1):
                body = await self._source.get_range(key, start, size)
                if body is None or len(body) != size:
                    raise CorruptError(
                        f"object {key} has no bytes {start} to {start + size}",
                        details={"object": key, "offset": str(start)},
                    )
                if by is not None:
                    by.take(body)
                sending = self._target.upload_part(
                    to_key, upload_id, number, [body], crc32c=crc32c(body)
                )
                parts.append(await sending)
            if by is not None:
                by.end()
            await self._target.complete_upload(to_key, upload_id, parts)
        except TierlogError:
            with contextlib.suppress(TierlogError):
                await self._target.abort_upload(to_key, upload_id)
            raise

    async def bring_attributes(self, head: ManifestHead, *, deep: bool) -> AttributesRecord | None:
        """Bring a stream's attribute index; return the checkpoint that names it there.

        All that the checkpoint needs is read and compared, here and there. ``deep``: so is what
        seems to be there already. What it does not need, a later checkpoint there may. Nothing
        damaged is brought, least of all in the place of what is sound: an index that is damaged
        here, and whole there, has arrived.
        """
        named = head.attributes
        if named is None:
            return None
        slots = asyncio.Semaphore(ATTRIBUTE_READS_MAX)
        folders = [
            fmt.attributes_folder(place.key_prefix, head.stream, head.incarnation)
            for place in (self._origin, self._place)
        ]
        damaged: CorruptError | None = None
        try:
            await checked_attributes(self._source, folders[0], named, slots)
        except CorruptError as error:
            damaged = error
        async for info in self._source.list(folders[0]):
            key = fmt.moved_key(folders[1], info.key)
            there = await self._target.head(key)
            same = there is not None and there.size == info.size
            if same and not deep:
                continue
            found = await self._source.get(info.key)
            if found is None:
                # Swept since it was listed, as nothing needs it.
                continue
            if same and (kept := await self._target.get(key)) is not None and kept[1] == found[1]:
                continue
            if _is_sound(self._origin.key_prefix, info.key, found[1]):
                await self._put(key, found)
        try:
            await checked_attributes(self._target, folders[1], named, slots)
        except CorruptError as error:
            if damaged is not None:
                raise CorruptError(
                    f"in s3://{self._origin.bucket}: {damaged.message}",
                    remedy="Run this again: it may have been swept meanwhile; what stays so, bring "
                    "from a backup that has it; see the how-to scrub-a-bucket",
                    details=damaged.details,
                ) from error
            raise RetryableError(
                f"the attribute index of stream {head.stream} did not arrive whole: "
                f"{error.message}",
                remedy="Delete that object there, and run this again",
            ) from error
        return replace(
            named,
            chunks=tuple(
                replace(one, key=fmt.moved_key(folders[1], one.key)) for one in named.chunks
            ),
            objects=tuple(
                replace(one, key=fmt.moved_key(folders[1], one.key)) for one in named.objects
            ),
        )


async def check_index(objects: ObjectStore, head: ManifestHead, prefix: str) -> None:
    """Read and compare all that the checkpoint needs which a bucket's own manifest names.

    Raises ``CorruptError`` for the first that is missing or is not what was written.
    """
    if head.attributes is None:
        return
    folder = fmt.attributes_folder(prefix, head.stream, head.incarnation)
    try:
        slots = asyncio.Semaphore(ATTRIBUTE_READS_MAX)
        await checked_attributes(objects, folder, head.attributes, slots)
    except CorruptError as error:
        raise CorruptError(
            f"{error.message}, and the backup did not bring it",
            remedy="Run this again; what stays so, bring from a backup that has it; see the how-to "
            "scrub-a-bucket",
            details=error.details,
        ) from error


async def _whole(
    objects: ObjectStore, key: str, sha256: bytes, length: int
) -> tuple[ObjectInfo, bytes]:
    found = await objects.get(key, bytes_max=length)
    if found is None or hashlib.sha256(found[1]).digest() != sha256:
        what = "is not there" if found is None else "has another digest than its manifest says"
        raise CorruptError(f"object {key} {what}", details={"object": key, "offset": "0"})
    return found


class _Arriving(ObjectReads):
    """A bucket in which one object is not there yet, and is shown all the same."""

    def __init__(self, objects: ObjectReads, key: str, found: tuple[ObjectInfo, bytes]) -> None:
        self._objects = objects
        self._key = key
        self._found = found

    async def head(self, key: str) -> ObjectInfo | None:
        return self._found[0] if key == self._key else await self._objects.head(key)

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        if key != self._key:
            return await self._objects.get(key, bytes_max=bytes_max)
        check_length(key, len(self._found[1]), bytes_max)
        return self._found

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return await self._objects.get_range(key, start, length)

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        return await self._objects.get_range_into(key, start, targets)


def _is_sound(prefix: str, key: str, raw: bytes) -> bool:
    """Tell whether an object of an attribute index is what was written, by its own checksums."""
    parsed = fmt.parse_attribute_key(prefix, key)
    if parsed is None:
        return True  # no more is known of it
    try:
        if parsed.is_list:
            fmt.decode_list(raw, key=key)
        else:
            check_pages(raw, parsed.start)
    except CorruptError:
        return False
    except RefusedError:
        return True  # a later version's, behind a checksum that is right
    return True


def pieces(length: int) -> list[Span]:
    """Cut an object that may be cut anywhere."""
    starts = range(0, length, PIECE_BYTES)
    return [(start, min(PIECE_BYTES, length - start)) for start in starts]


async def write_manifest(
    manifests: ManifestStore,
    head: ManifestHead,
    ledgers: Sequence[ManifestLedger],
    *,
    first: bool = False,
) -> bool:
    """Have the newest manifest say this; False: it does already.

    Of two that want the same at once one writes it, and the other finds it. ``first``: there was
    none. One that says something else by now is its scheduler's, who knows more: it stays. So does
    one that knows more than this, from a run that began later.
    """
    wanted: dict[LedgerId, KeptLedger] = {one.listed.ledger_id: keep(one) for one in ledgers}
    for left in reversed(range(TRIES_MAX)):
        known = await manifests.newest(head.stream, head.incarnation)
        if known.head == head and dict(known.ledgers) == wanted:
            return False
        if first and known.generation:
            raise RetryableError(
                f"stream {head.stream} got a manifest of its own meanwhile, which stays",
                remedy="Run this again: it goes by that one then",
            )
        if known.head is not None and is_older(head, wanted, known.head, known.ledgers):
            raise RetryableError(
                f"stream {head.stream} got a newer manifest meanwhile, which stays",
                remedy="Run this again, and one run at a time",
            )
        put = {number: one for number, one in wanted.items() if known.ledgers.get(number) != one}
        gone = [number for number in known.ledgers if number not in wanted]
        try:
            await manifests.write(known, head, put=put, removed=gone)
        except ObjectExistsError:
            if not left:
                raise
        else:
            return True
    raise AssertionError("the last try returns or raises")


def not_named(
    names: Mapping[LedgerId, KeptLedger], head: ManifestHead, ledgers: Mapping[LedgerId, KeptLedger]
) -> list[LedgerId]:
    """Return of which ledgers another manifest should name the copies that one ``names``.

    Trimming alone takes such a name away. Where anything else did, the other one is older.
    """
    copied = {number for number, one in ledgers.items() if one.uuid is not None}
    return [
        number
        for number, one in names.items()
        if one.uuid is not None and number > head.trimmed_through and number not in copied
    ]


def is_older(
    head: ManifestHead,
    ledgers: Mapping[LedgerId, KeptLedger],
    other: ManifestHead,
    others: Mapping[LedgerId, KeptLedger],
) -> bool:
    """Tell whether a stream's manifest is surely older than another one of that incarnation."""
    active = StreamLifecycle.ACTIVE
    return (
        other.owner_epoch > head.owner_epoch
        or other.trimmed_through > head.trimmed_through
        or (head.lifecycle is active and other.lifecycle is not active)
        or said_older(head, other) is not None
        or bool(not_named(others, head, ledgers))
    )


def check_same_stream(source: KnownManifest, target: KnownManifest) -> None:
    """Refuse a target in which the stream is another cluster's, or has gone on by itself."""
    if not target.generation:
        return
    name = source.stream
    if target.cluster_id != source.cluster_id:
        raise RefusedError(
            f"stream {name} in the target is of cluster {target.cluster_id}, not of "
            f"{source.cluster_id}",
            remedy="Choose an empty bucket, or another key prefix",
        )
    assert source.head is not None
    assert target.head is not None
    older = (source.head.owner_epoch, source.head.trimmed_through)
    newer = (target.head.owner_epoch, target.head.trimmed_through)
    if newer[0] > older[0] or newer[1] > older[1]:
        raise RefusedError(
            f"stream {name} in the target has gone on by itself since it was copied",
            remedy="Leave it out, or choose an empty bucket, or another key prefix",
        )
