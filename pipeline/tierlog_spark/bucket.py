"""The bucket as the driver and the tasks of a read find it.

Owns opening it, finding streams and ledgers by its own manifests, and the copies themselves.
Does not own what of them is wanted (``planning``), nor taking entries apart.

Invariant: nothing is written, and neither a service nor ZooKeeper is asked.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.pages import IndexPages
from tierlog.attributes.tree import Scan, drive_async, scan
from tierlog.format.attribute_objects import attributes_folder, moved_key
from tierlog.format.index import BlockRange
from tierlog.format.keys import ObjectRole, ParsedKey, key_prefix, object_keys, require_key
from tierlog.format.manifest import unkeep
from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName
from tierlog.model.ledger import KEY_STREAM
from tierlog.model.manifest import ManifestLedger
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.partitions import partition_names, whole_of
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.driver import DRIVER, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers
from tierlog.offload.groups import plain_errors
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog.offload.ranges import RangeLimits
from tierlog.offload.restore import moved_here
from tierlog.offload.single_driver import SINGLE_DRIVER
from tierlog.offload.tier2_reader import ObjectHandle
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import S3Settings, Settings
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.objects import open_bucket
from tierlog_spark.options import FETCH_BYTES
from tierlog_spark.planning import Bounds, StoredLedger

# Who only reads puts no cluster's id on an object.
_NO_CLUSTER: Final = UUID(int=0)
_PULSAR_NAME: Final = "pulsar/managed-ledger"
FETCHES_IN_FLIGHT: Final = 4
KEPT_FETCHES: Final = 3
"""The one that is read from, the one ahead of it, and the one before, whose end is read too.

More would only be fresh memory instead of what was used just now: with eight, exports of large
events ran at four fifths of the rate.
"""
INDEXES_IN_FLIGHT: Final = 16
PAGES_BYTES_MAX: Final = 16 * 1024 * 1024


class Bucket:
    """One bucket, opened for one read."""

    def __init__(self, objects: ObjectStore, s3: S3Settings, *, fetch_bytes: int) -> None:
        self.objects = objects
        self._s3 = s3
        self._fetch_bytes = fetch_bytes
        limits = RangeLimits(
            range_bytes=fetch_bytes,
            in_flight_max=FETCHES_IN_FLIGHT,
            kept_bytes_max=KEPT_FETCHES * fetch_bytes,
        )
        self._drivers = Drivers(
            DriverParts(
                objects=objects,
                settings=Tier2Settings(
                    bucket=s3.bucket,
                    cluster_id=_NO_CLUSTER,
                    endpoint_name=s3.endpoint_name,
                    key_prefix=s3.key_prefix,
                    ranges=limits,
                ),
            )
        )
        indexes = IndexObjects(
            objects, cluster_id=_NO_CLUSTER, ids=system_ids(), key_prefix=s3.key_prefix
        )
        self._pages = IndexPages(indexes, PageCache(limit_bytes=PAGES_BYTES_MAX))
        self.manifests = ManifestStore(
            objects,
            cluster_id=_NO_CLUSTER,
            clock=system_clock(),
            ids=system_ids(),
            key_prefix=s3.key_prefix,
        )

    def __repr__(self) -> str:
        return f"<Bucket {self.place}>"

    @property
    def place(self) -> str:
        """The bucket and its prefix, for people."""
        return f"s3://{self._s3.bucket}/{key_prefix(self._s3.key_prefix)}"

    async def incarnations(
        self, wanted: Sequence[StreamName] = ()
    ) -> list[tuple[StreamName, UUID]]:
        """Return what has manifests: all streams, or those wanted with their partitions.

        Refused where there is none at all, or not that stream. By names alone: a manifest that
        can't be read keeps back no stream that is wanted beside it.
        """
        found = sorted(await self.manifests.streams())
        if not found:
            raise await self._unknown(StreamName(""))
        if not wanted:
            return found
        asked = set(wanted)
        some = [one for one in found if {one[0], whole_of(one[0])} & asked]
        named = {name for one, _ in some for name in (one, whole_of(one))}
        for name in wanted:
            if name not in named:
                raise await self._unknown(name)
        return some

    async def every_stream(self) -> list[KnownManifest]:
        """Return the newest living incarnation of each stream."""
        names = sorted({name for name, _ in await self.manifests.streams()})
        found = await self._load(names)
        return [known for known in found if known is not None]

    async def check_ours(self) -> None:
        """Refuse a place where no cluster ever wrote; one without streams has its own manifest."""
        if not await self.manifests.streams() and not await self.manifests.clusters():
            raise await self._unknown(StreamName(""))

    async def streams(
        self, wanted: Sequence[StreamName], *, whole: Bounds | None = None
    ) -> list[KnownManifest]:
        """Return streams by their names, each once; of a partitioned one, its partitions.

        ``whole``: refuse to pass over a partition of which rows within it may be lost.
        """
        found: list[KnownManifest] = []
        for name, known in zip(wanted, await self._load(wanted), strict=True):
            if known is None:
                raise await self._unknown(name)
            assert known.head is not None
            if not known.head.partitions:
                found.append(known)
                continue
            names = partition_names(name, known.head.partitions)
            parts = dict(zip(names, await self._load(names), strict=True))
            # One that is new may have no manifest yet, and one that was deleted is not missed.
            found += [one for one in parts.values() if one is not None]
            if whole is not None:
                missing = [one for one in names if parts[one] is None and whole.wants_stream(one)]
                await self._check_none_lost(name, names, missing)
        # A partition may be named beside the stream that it is of.
        return list({known.stream: known for known in found}.values())

    async def _check_none_lost(
        self, whole: StreamName, names: Sequence[StreamName], missing: Sequence[StreamName]
    ) -> None:
        """Refuse to pass over a partition that has no manifest; one that was deleted has one."""
        for name in missing:
            if not await self.manifests.streams(name):
                raise RefusedError(
                    f"stream {whole} has {len(names)} partitions, and below {self.place} there is "
                    f"no manifest of {name}",
                    reason=Reason.STREAM_NOT_FOUND,
                    remedy="A scheduler of its cluster writes it soon, if one runs; else bring it "
                    "back with: tierlog spark restore; or read what is there: failOnDataLoss=false",
                    details={"stream": name},
                )

    async def _load(self, names: Sequence[StreamName]) -> list[KnownManifest | None]:
        slots = asyncio.Semaphore(INDEXES_IN_FLIGHT)

        async def one(name: StreamName) -> KnownManifest | None:
            async with slots:
                incarnations = await self.manifests.streams(name)
                loaded = [await self.manifests.newest(*key) for key in sorted(incarnations)]
            living = [
                known
                for known in loaded
                if known.head is not None and known.head.lifecycle is StreamLifecycle.ACTIVE
            ]
            return max(living, key=_created_ms, default=None)

        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(name)) for name in names]
        return [task.result() for task in tasks]

    async def _unknown(self, name: StreamName) -> RefusedError:
        known = sorted({one for one, _ in await self.manifests.streams()})
        if not known:
            return RefusedError(
                f"there are no manifests below {self.place}, so it is not a bucket of Tierlog",
                reason=Reason.STREAM_NOT_FOUND,
                remedy="Correct bucket and prefix; objects of Apache Pulsar are read by keys",
                details={"bucket": self._s3.bucket},
            )
        return RefusedError(
            f"there is no stream {name} below {self.place}",
            reason=Reason.STREAM_NOT_FOUND,
            remedy=f"There are {', '.join(known[:20])}{' and more' if len(known) > 20 else ''}; "
            "one of which nothing was offloaded is read with readMode=service",
            details={"stream": name},
        )

    def ledgers_of(self, known: KnownManifest) -> list[ManifestLedger]:
        """Return a stream's closed ledgers in order, their copies where the bucket is now."""
        return [
            moved_here(
                unkeep(kept.packed),
                bucket=self._s3.bucket,
                endpoint_name=self._s3.endpoint_name,
                prefix=self._s3.key_prefix,
            )
            for _, kept in sorted(known.ledgers.items())
        ]

    def attributes_of(self, known: KnownManifest) -> Checkpoint | None:
        """Return the attributes that a manifest names, their objects where the bucket is now."""
        assert known.head is not None
        named = known.head.attributes
        if named is None:
            return None
        folder = attributes_folder(self._s3.key_prefix, known.stream, known.head.incarnation)
        found = named.checkpoint
        return replace(
            found,
            chunks=tuple(replace(one, key=moved_key(folder, one.key)) for one in found.chunks),
            objects=tuple(replace(one, key=moved_key(folder, one.key)) for one in found.objects),
        )

    async def scan(self, checkpoint: Checkpoint, first: AttributeKey, last: AttributeKey) -> Scan:
        """Return the next attributes of a checkpoint from ``first`` on."""
        return await drive_async(scan(checkpoint.root, first, last), self._pages.of(checkpoint))

    async def by_keys(self, keys: Iterable[str]) -> list[tuple[StoredLedger, list[BlockRange]]]:
        """Return ledgers by the keys of their data objects, each once, and their blocks."""
        found = []
        names = [require_key(self._s3.key_prefix, key) for key in keys]
        # A ledger's other objects name it too; a single object is a copy by itself.
        for parsed in {(one.uuid, one.ledger_id, is_single(one)): one for one in names}.values():
            named = object_keys(self._s3.key_prefix, parsed.uuid, parsed.ledger_id)
            single = is_single(parsed)
            side = None if single else await self.objects.head(named.side)
            location = Tier2Location(
                driver=SINGLE_DRIVER if single else DRIVER,
                endpoint_name=self._s3.endpoint_name,
                bucket=self._s3.bucket,
                data_key=named.single if single else named.data,
                index_key=named.single if single else named.index,
                side_key=named.side if side is not None else "",
            )
            ledger = StoredLedger(
                stream=StreamName(""),
                raw=True,
                ledger_id=parsed.ledger_id,
                uuid=parsed.uuid,
                location=location,
                copy=None,
            )
            handle = await self.open(ledger)
            copy = None
            if side is not None:
                copy = Tier2Copy(
                    format_version=1,
                    data_len=handle.index.end,
                    index_len=0,
                    index_sha256=b"",
                    entry_count=handle.index.last_entry_id + 1,
                    block_count=len(handle.index.entries),
                    side_len=side.size,
                )
            custom = handle.index.metadata.custom
            name = custom.get(KEY_STREAM) or custom.get(_PULSAR_NAME) or b""
            stored = replace(ledger, stream=StreamName(name.decode("utf-8", "replace")), copy=copy)
            found.append((stored, list(handle.index.blocks())))
        return found

    async def open(self, ledger: StoredLedger) -> ObjectHandle[Any]:
        """Return a copy as what reads it, its index and what it says of checksums loaded."""
        handle = await self._drivers.read_offloaded(
            ledger.ledger_id, ledger.uuid, ledger.location, copy=ledger.copy
        )
        assert isinstance(handle, ObjectHandle), "both layouts are objects"
        return handle

    async def blocks_of(self, ledgers: Sequence[StoredLedger]) -> list[list[BlockRange]]:
        """Return the blocks of each ledger."""
        slots = asyncio.Semaphore(INDEXES_IN_FLIGHT)

        async def one(ledger: StoredLedger) -> list[BlockRange]:
            async with slots:
                return list((await self.open(ledger)).index.blocks())

        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(ledger)) for ledger in ledgers]
        return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def opened(
    s3: S3Settings, *, fetch_bytes: int = FETCH_BYTES, meter: CostMeter | None = None
) -> AsyncIterator[Bucket]:
    """Give the bucket that the settings name, as it is; ``meter`` counts its requests."""
    async with opened_store(s3, meter=meter) as objects:
        yield Bucket(objects, s3, fetch_bytes=fetch_bytes)


def opened_store(
    s3: S3Settings, *, meter: CostMeter | None = None
) -> contextlib.AbstractAsyncContextManager[ObjectStore]:
    """Give the objects of the bucket that the settings name."""
    # Nothing else is needed, least of all the environment of an executor.
    return open_bucket(Settings.model_construct(s3=s3), s3.bucket, meter=meter)


def is_single(key: ParsedKey) -> bool:
    """Tell whether a key is of an object that holds its index too."""
    return key.role is ObjectRole.SINGLE


def _created_ms(known: KnownManifest) -> int:
    assert known.head is not None
    return known.head.created_ms


def stored(known: KnownManifest, ledger: ManifestLedger) -> StoredLedger:
    """Return a ledger's copy, which it has."""
    assert known.head is not None
    assert ledger.copy is not None
    return StoredLedger(
        stream=known.stream,
        raw=known.head.raw,
        ledger_id=ledger.listed.ledger_id,
        uuid=ledger.copy.uuid,
        location=ledger.copy.location,
        copy=ledger.copy.copy,
    )
