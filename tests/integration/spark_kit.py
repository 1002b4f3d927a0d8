"""Buckets made without a service, as an offloader and a scheduler write them; and reads of them.

``Read`` asks the data source what Spark asks, in this process: a Spark session takes seconds for
each query. What it hands over is pickled on the way, as there.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pyspark.sql.datasource import CaseInsensitiveDict

from tests.unit.offload.world import ListHandle, metadata_of
from tierlog.format.entry import StructuredEvent, decode_entry, encode_entry
from tierlog.format.frame import pack_entries
from tierlog.format.manifest import keep
from tierlog.format.run import cut_runs
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import ManifestCopy, ManifestHead, ManifestLedger
from tierlog.model.policy import MIB
from tierlog.model.stream import ListedLedger
from tierlog.offload.driver import BlockOffloader, BucketOffloader, Tier2Settings
from tierlog.offload.manifests import ManifestStore
from tierlog.runtime.settings import S3Settings, Settings
from tierlog.wiring.build import open_objects, system_clock, system_ids
from tierlog_spark import TierlogDataSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pyspark.sql.datasource import Filter, InputPartition

    from tierlog.embedded.supervisor import EmbeddedServers
    from tierlog.format.run import Run
    from tierlog.ports.objects import ObjectStore

T0 = 1_790_000_000_000
SIZES = (200, 200, 200, 3000)
BLOCK = 5 * MIB
RUN_ENTRIES = 8


class TimedHandle(ListHandle):
    """A read handle whose runs say when their entries were published."""

    def __init__(self, ledger_id: LedgerId, entries: Sequence[bytes], times: Sequence[int]) -> None:
        super().__init__(ledger_id, entries, metadata_of(entries, block_size=BLOCK))
        self._times = times

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        for start in range(first, last + 1, RUN_ENTRIES):
            stop = min(start + RUN_ENTRIES, last + 1)
            frames, offsets = pack_entries(self.entries[start:stop], start)
            yield cut_runs(
                frames,
                offsets,
                ledger_id=self.ledger_id,
                first_entry_id=start,
                last_add_confirmed=len(self.entries) - 1,
                owner_epoch=1,
                publish_ms_min=min(self._times[start:stop]),
                publish_ms_max=max(self._times[start:stop]),
                stripe_entries=10**9,
            )


def times_of(entries: Sequence[bytes], *, raw: bool) -> list[int]:
    return [0 if raw else decode_entry(one).header.publish_time_ms for one in entries]


def s3_of(servers: EmbeddedServers, bucket: str) -> S3Settings:
    found = servers.endpoints
    return S3Settings.model_validate(
        {
            "endpoint_url": found.s3_endpoint_url,
            "access_key": found.s3_access_key,
            "secret_key": found.s3_secret_key,
            "bucket": bucket,
        }
    )


def options_of(s3: S3Settings, **more: str) -> dict[str, str]:
    """What a user says of where the bucket is."""
    assert s3.secret_key is not None
    return {
        "bucket": s3.bucket,
        "endpointUrl": s3.endpoint_url or "",
        "accessKey": s3.access_key or "",
        "secretKey": s3.secret_key.get_secret_value(),
        **more,
    }


def environment_of(s3: S3Settings) -> dict[str, str]:
    """The settings that say the same."""
    assert s3.secret_key is not None
    return {
        "TIERLOG_S3__ENDPOINT_URL": s3.endpoint_url or "",
        "TIERLOG_S3__BUCKET": s3.bucket,
        "TIERLOG_S3__ACCESS_KEY": s3.access_key or "",
        "TIERLOG_S3__SECRET_KEY": s3.secret_key.get_secret_value(),
    }


def blocks_of(path: Path) -> list[str]:
    """The Python of a document."""
    return re.findall(
        r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@dataclass
class MadeStream:
    """A stream whose ledgers lie in a bucket; ``copies`` by the ids of their ledgers."""

    name: StreamName
    head: ManifestHead
    manifests: ManifestStore
    offloader: BucketOffloader
    copies: dict[LedgerId, ManifestLedger] = field(default_factory=dict)

    async def add(self, ledger_id: int, entries: Sequence[bytes], *, copied: bool = True) -> str:
        """Offload a ledger, or only list it; return the key of its data object."""
        number, copy, attempt = LedgerId(ledger_id), None, uuid.uuid4()
        metadata = metadata_of(entries, block_size=BLOCK)
        location = self.offloader.location(number, attempt)
        if copied:
            handle = TimedHandle(number, entries, times_of(entries, raw=self.head.raw))
            made = await self.offloader.offload(handle, attempt, {})
            copy = ManifestCopy(uuid=attempt, location=location, complete_ms=9, copy=made)
        listed = ListedLedger(
            ledger_id=number,
            opened_ms=1,
            block_size=BLOCK,
            owner_epoch=1,
            closed=True,
            last_entry_id=EntryId(len(entries) - 1),
            length=metadata.length,
            closed_ms=5,
        )
        self.copies[number] = ManifestLedger(listed=listed, copy=copy)
        return location.data_key

    async def write(self, removed: Sequence[LedgerId] = ()) -> None:
        """Write the manifest."""
        known = await self.manifests.newest(self.name, self.head.incarnation)
        kept = {number: keep(one) for number, one in self.copies.items()}
        await self.manifests.write(known, self.head, put=kept, removed=removed)


@dataclass
class MadeBucket:
    """A bucket of its own, and what is put into it."""

    s3: S3Settings
    objects: ObjectStore

    def stream(
        self, name: str, *, layout: type[BucketOffloader] = BlockOffloader, **head: Any
    ) -> MadeStream:
        prefix, cluster_id = self.s3.key_prefix, uuid.UUID(int=7)
        return MadeStream(
            name=StreamName(name),
            head=ManifestHead(
                stream=StreamName(name), incarnation=uuid.uuid4(), created_ms=3, **head
            ),
            manifests=ManifestStore(
                self.objects,
                cluster_id=cluster_id,
                clock=system_clock(),
                ids=system_ids(),
                key_prefix=prefix,
            ),
            offloader=layout(
                self.objects,
                Tier2Settings(bucket=self.s3.bucket, cluster_id=cluster_id, key_prefix=prefix),
            ),
        )


@contextlib.asynccontextmanager
async def made_bucket(servers: EmbeddedServers, name: str) -> AsyncIterator[MadeBucket]:
    s3 = s3_of(servers, f"{name}-{uuid.uuid4().hex[:12]}")
    async with open_objects(Settings(s3=s3)) as objects:
        yield MadeBucket(s3, objects)


class Read:
    """One read, planned; ``rows`` in the order of its parts."""

    def __init__(self, given: dict[str, str], filters: Sequence[Filter] = ()) -> None:
        source = TierlogDataSource(CaseInsensitiveDict(given))
        self.columns = source.schema().names
        self._reader: Any = source.reader(schema=source.schema())
        self.left = self._reader.pushFilters(list(filters)) if filters else []
        self.parts: Sequence[InputPartition] = self._reader.partitions()

    def rows(self) -> list[dict[str, Any]]:
        reader, parts = pickle.loads(pickle.dumps((self._reader, self.parts)))
        return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


async def planned(given: dict[str, str], *filters: Filter, **more: str) -> Read:
    """Plan a read on a thread of its own, since it has a loop of its own."""
    return await asyncio.to_thread(Read, {**given, **more}, filters)


async def rows_read(given: dict[str, str], *filters: Filter, **more: str) -> list[dict[str, Any]]:
    """Plan a read, and read it."""
    read = await planned(given, *filters, **more)
    return await asyncio.to_thread(read.rows)


async def spoil(bucket: MadeBucket, key: str) -> None:
    """Flip a bit in the middle of an object."""
    found = await bucket.objects.get(key)
    assert found is not None
    info, body = found
    spoilt = bytearray(body)
    spoilt[len(body) // 2] ^= 1
    await bucket.objects.put(key, bytes(spoilt), metadata=info.metadata)


def entries_of(rng: random.Random, count: int, *, at_ms: int, first_number: int = 0) -> list[bytes]:
    """Entries of one writer, published a second apart; every 50th is structured."""
    made, number = [], first_number
    for index in range(count):
        payloads = [rng.randbytes(rng.choice(SIZES)) for _ in range(20)]
        number += 20
        structured = [
            StructuredEvent(payload=one, key=b"k", event_time_ms=5, properties={"a": "b"})
            for one in payloads
        ]
        made.append(
            encode_entry(
                structured if index % 50 == 49 else payloads,
                publish_time_ms=at_ms + 1000 * index,
                writer_id=UUID(int=1),
                event_number=number,
            )
        )
    return made


Row = tuple[Any, ...]


def expected(stream: str, ledgers: Mapping[int, Sequence[bytes]]) -> list[Row]:
    rows: list[Row] = []
    for ledger_id, entries in ledgers.items():
        for entry_id, data in enumerate(entries):
            entry = decode_entry(data)
            header = entry.header
            rows += [
                (
                    stream,
                    ledger_id,
                    entry_id,
                    index,
                    header.publish_time_ms,
                    str(header.writer_id),
                    header.event_number - header.event_count + 1 + index,
                    event.event_time_ms,
                    event.key,
                    dict(event.properties) or None,
                    event.payload,
                )
                for index, event in enumerate(entry.structured_events())
            ]
    return rows


def ms_of(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.replace(tzinfo=UTC).timestamp() * 1000)


def plain(row: Any) -> Row:
    """A row of every column, from Spark or from a batch, as ``expected`` has them."""
    return (
        *(row[name] for name in ("stream", "ledger_id", "entry_id", "event_index")),
        ms_of(row["publish_time"]),
        row["writer_id"],
        row["event_number"],
        ms_of(row["event_time"]),
        None if row["key"] is None else bytes(row["key"]),
        dict(row["properties"] or {}) or None,
        bytes(row["payload"]),
    )


def places(offset: Mapping[str, str]) -> dict[str, str]:
    """A streaming read's offset without the incarnations."""
    return {name: where.partition("@")[0] for name, where in offset.items()}
