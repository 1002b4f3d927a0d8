"""The offloader of data and index objects in a bucket (seeds/000, "S3 Implementation").

Owns what drivers over a bucket have in common, and of this one the order of one attempt: blocks
as parts, the side object, then the index, then verification. Does not own the attempt's
place in the metadata, nor how blocks become parts (``tierlog.offload.uploading``).

Invariants:
    * An index object exists only after its data object is complete and its side object is there.
    * Returning means: all objects were verified after they were written, and no other upload of
      the data object's key is open.

Retries: the object store's own short ones; beyond them each request is patiently sent again for
as long as ``retries`` allow, since what a whole attempt costs is far more.

Crash (leaks): an attempt that ends anywhere leaves at most one open upload and its objects,
all under keys that the metadata names; ``delete_offloaded`` takes them away.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar, Final, TypedDict, Unpack
from uuid import UUID

import structlog

from tierlog.format import keys
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.grains import GRAIN_LEN
from tierlog.format.index import IndexEntry, ObjectIndex
from tierlog.format.keys import ObjectRole, Software
from tierlog.format.side import SideBuilder, grain_len_for
from tierlog.format.versions import Format, current
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.ledger import KEY_STREAM
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.blocks import (
    BlockFiller,
    DataObjectLayout,
    block_size_of,
    check_offloadable,
)
from tierlog.offload.budget import UploadBudget
from tierlog.offload.cleaning import delete_attempt
from tierlog.offload.index_loader import INDEX_TTL_S, load_index
from tierlog.offload.offsets import BYTES_MAX, OffsetsCache
from tierlog.offload.patient_store import PatientStore
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.offload.side_reader import SidePages, open_side
from tierlog.offload.tier2_reader import Tier2Handle
from tierlog.offload.uploading import BlockUpload
from tierlog.offload.verify import ReadBack, verify_copy
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore
from tierlog.ports.retrying import Retries
from tierlog.ports.spending import Cause, spending
from tierlog.ports.tracing import within

log = structlog.get_logger()
DRIVER: Final = "aws-s3"
# Names under which the same driver may stand in a location.
DRIVERS: Final = frozenset({DRIVER, "S3"})
RANGE_LIMITS: Final = RangeLimits()
SOFTWARE: Final = Software(version=version("tierlog"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2Settings:
    """Where objects go, who says so, and the limits of an upload."""

    bucket: str
    cluster_id: UUID
    endpoint_name: str = "default"
    key_prefix: str = ""
    cluster_name: str = "tierlog"
    software: Software = SOFTWARE
    part_delay_s: float = 0.0
    ranges: RangeLimits = RANGE_LIMITS
    grain_len: int = GRAIN_LEN
    data_sha256: bool = False
    """Where nobody says so for a stream, as is the next."""
    read_back: ReadBack = ReadBack.SAMPLE


class Tuning(TypedDict, total=False):
    """What all drivers take beside a bucket."""

    cache: SharedCache | None
    index_ttl_s: int
    offsets_bytes_max: int
    budget: UploadBudget | None
    retries: Callable[[], Retries] | None


class BucketOffloader(ABC):
    """What drivers over a bucket have in common: all but the layout of a copy."""

    # What a location that this driver reads may call it.
    NAMES: ClassVar[Collection[str]]

    def __init__(
        self, objects: ObjectStore, settings: Tier2Settings, **tuning: Unpack[Tuning]
    ) -> None:
        self._objects = objects
        self._settings = settings
        self._cache = tuning.get("cache")
        self._index_ttl_s = tuning.get("index_ttl_s", INDEX_TTL_S)
        self._offsets = OffsetsCache(bytes_max=tuning.get("offsets_bytes_max", BYTES_MAX))
        self._budget = tuning.get("budget") or UploadBudget()
        self._patient = PatientStore(objects, tuning.get("retries"))
        self.ranges = Ranges(objects, settings.ranges)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._settings.endpoint_name}/{self._settings.bucket}>"

    @abstractmethod
    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location: ...

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        sha256 = self._settings.data_sha256 if data_sha256 is None else data_sha256
        with spending(Cause.OFFLOAD, stream_of(handle, extra_metadata)):
            return await self._offload(handle, uuid, extra_metadata, data_sha256=sha256)

    @abstractmethod
    async def _offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool,
    ) -> Tier2Copy: ...

    def _upload(self, location: Tier2Location) -> BlockUpload:
        return BlockUpload(
            self._patient,
            self._budget,
            location.data_key,
            part_delay_s=self._settings.part_delay_s,
        )

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
        *,
        read_back: ReadBack | None = None,
    ) -> None:
        location = self._here(ledger_id, uuid, driver_metadata)
        read_back = read_back or self._settings.read_back
        with spending(Cause.VERIFY), within("offload.verify", read_back=read_back.value):
            await verify_copy(self._objects, location, copy, read_back=read_back)

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        location = self._here(ledger_id, uuid, driver_metadata)
        with spending(Cause.SWEEP):
            aborted = await delete_attempt(self._objects, location)
        log.info("attempt.cleaned", ledger_id=ledger_id, uuid=str(uuid), uploads_aborted=aborted)

    def _here(
        self, ledger_id: LedgerId, uuid: UUID, location: Tier2Location | None
    ) -> Tier2Location:
        """Return where an attempt lies; raise unless this driver wrote it, into this bucket."""
        if location is None:
            return self.location(ledger_id, uuid)
        here = (self._settings.endpoint_name, self._settings.bucket)
        if location.driver not in self.NAMES or (location.endpoint_name, location.bucket) != here:
            raise RefusedError(
                f"ledger {ledger_id} lies in bucket {location.bucket} of endpoint "
                f"{location.endpoint_name} ({location.driver}), and this process has "
                f"{here[1]} of {here[0]}",
                remedy="Start a process whose s3 settings name that bucket and endpoint",
                details={"ledger_id": str(ledger_id), "bucket": location.bucket},
            )
        return location


class BlockOffloader(BucketOffloader):
    """``LedgerOffloader`` over a bucket."""

    NAMES = DRIVERS

    def __init__(
        self, objects: ObjectStore, settings: Tier2Settings, **tuning: Unpack[Tuning]
    ) -> None:
        super().__init__(objects, settings, **tuning)
        self._side_pages = SidePages(objects)

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        named = keys.object_keys(self._settings.key_prefix, uuid, ledger_id)
        return Tier2Location(
            driver=DRIVER,
            endpoint_name=self._settings.endpoint_name,
            bucket=self._settings.bucket,
            data_key=named.data,
            index_key=named.index,
            side_key=named.side,
        )

    async def _offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool,
    ) -> Tier2Copy:
        ledger_id, metadata = handle.ledger_id, handle.ledger_metadata
        check_offloadable(ledger_id, metadata, DataObjectLayout())
        builder = self._side_builder(handle, uuid, with_sha256=data_sha256)
        block_size = block_size_of(ledger_id, metadata)
        filler = BlockFiller(handle, DataObjectLayout(builder.sums), block_size=block_size)
        location, settings = self.location(ledger_id, uuid), self._settings
        upload = self._upload(location)
        await upload.begin(user_metadata(settings, ObjectRole.DATA, handle, extra_metadata))
        await upload.send(filler)
        await upload.complete()
        side = builder.finish(filler.entry_count)
        side_raw = side.encode()
        side_metadata = user_metadata(settings, ObjectRole.SIDE, handle, extra_metadata)
        await self._put(location.side_key, side_raw, side_metadata)
        entries = tuple(
            IndexEntry(first_entry_id=first, part_number=part, offset=offset)
            for first, part, offset in upload.blocks
        )
        index = ObjectIndex(data_len=upload.data_len, metadata=metadata, entries=entries)
        raw = index.encode()
        index_metadata = user_metadata(settings, ObjectRole.INDEX, handle, extra_metadata)
        # Last, for it says that everything else is there.
        await self._put(location.index_key, raw, index_metadata)
        copy = Tier2Copy(
            format_version=current(Format.DATA_OBJECT),
            data_len=upload.data_len,
            index_len=len(raw),
            index_sha256=hashlib.sha256(raw).digest(),
            entry_count=filler.entry_count,
            block_count=len(entries),
            side_len=len(side_raw),
            side_sha256=hashlib.sha256(side_raw).digest(),
            side_header_sha256=hashlib.sha256(side_raw[: side.header.header_len]).digest(),
            data_sha256=builder.sums.sha256(),
        )
        with spending(Cause.VERIFY), within("offload.verify"):
            await verify_copy(self._patient, location, copy)
        return copy

    def _side_builder(self, handle: ReadHandle, uuid: UUID, *, with_sha256: bool) -> SideBuilder:
        metadata = handle.ledger_metadata
        frames_len = metadata.length + FRAME_HEADER_LEN * (metadata.last_entry_id + 1)
        return SideBuilder(
            handle.ledger_id,
            uuid,
            grain_len=grain_len_for(frames_len, least=self._settings.grain_len),
            with_sha256=with_sha256,
        )

    async def _put(self, key: str, raw: bytes, metadata: Mapping[str, str]) -> None:
        await self._patient.put(key, raw, metadata=metadata, content_type=keys.CONTENT_TYPE)

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> Tier2Handle:
        location = self._here(ledger_id, uuid, driver_metadata)
        index = await load_index(
            self._objects, location, copy=copy, cache=self._cache, ttl_s=self._index_ttl_s
        )
        side = await open_side(
            self._objects,
            location,
            index,
            self._side_pages,
            copy=copy,
            cache=self._cache,
            ttl_s=self._index_ttl_s,
        )
        return Tier2Handle(
            ledger_id, location, index, ranges=self.ranges, offsets=self._offsets, side=side
        )


def user_metadata(
    settings: Tier2Settings,
    role: ObjectRole,
    handle: ReadHandle,
    extra_metadata: Mapping[str, str],
) -> dict[str, str]:
    """Return what is written beside an object's bytes; of ``extra_metadata`` all is."""
    own = keys.object_metadata(
        role,
        stream=StreamName(stream_of(handle, extra_metadata)),
        cluster_id=settings.cluster_id,
        cluster_name=settings.cluster_name,
        software=settings.software,
    )
    # What is said here wins over what a caller says beside it.
    return {**{name.lower(): value for name, value in extra_metadata.items()}, **own}


def stream_of(handle: ReadHandle, extra_metadata: Mapping[str, str]) -> str:
    """Return the stream of a ledger, for people and for counting."""
    stream = handle.ledger_metadata.custom.get(KEY_STREAM, b"").decode("ascii", "replace")
    return extra_metadata.get("ManagedLedgerName", stream)
