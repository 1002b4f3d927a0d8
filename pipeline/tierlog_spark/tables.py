"""Tables about streams, out of the bucket alone: streams, ledgers, attempts, attributes.

Owns their rows. Does not own their columns' types (``columns``).

Invariant: what is held at once of a bucket's list, and of rows, is ``ROWS_A_BATCH`` at most, or one
attempt's. Of ledgers what manifests say is held, which is packed.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from tierlog.format.keys import key_prefix, parse_key
from tierlog.model.attributes import KEY_LEN, AttributeKey
from tierlog.model.core_attributes import CORE_NAMES, derived
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import ManifestLedger
from tierlog.model.policy import NO_LEVELS, PolicyLevels
from tierlog.offload.manifests import KnownManifest
from tierlog.ports.objects import ObjectInfo
from tierlog_spark.bucket import Bucket, opened
from tierlog_spark.columns import Table
from tierlog_spark.options import ReadOptions

Row = dict[str, object]
Attempt = tuple[LedgerId, UUID]
ROWS_A_BATCH: Final = 65_536
_US_A_MS: Final = 1000
_FIRST_KEY: Final = AttributeKey(bytes(KEY_LEN))
_LAST_KEY: Final = AttributeKey(b"\xff" * KEY_LEN)


async def table_batches(
    options: ReadOptions,
    schema: Any,  # noqa: ANN401 - pyarrow ships no types
) -> AsyncGenerator[Any, None]:
    """Iterate over a table; an empty one is one batch without rows."""
    given = 0
    async with (
        opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket,
        contextlib.aclosing(_runs_of(bucket, options)) as runs,
    ):
        rows: list[Row] = []
        async for some in runs:
            for one in some:
                rows.append(one)
                if len(rows) == ROWS_A_BATCH:
                    given += 1
                    yield _batch(rows, schema)
                    rows = []
        if rows or not given:
            yield _batch(rows, schema)


async def _runs_of(bucket: Bucket, options: ReadOptions) -> AsyncGenerator[Iterable[Row], None]:
    """Iterate over a table's rows, some at a time; ``check_ours`` where there is none."""
    known = await (bucket.streams(options.streams) if options.streams else bucket.every_stream())
    if options.table is Table.ATTEMPTS:
        found = False
        # Objects whose manifests are lost, or of Pulsar, are attempts all the same.
        async with contextlib.aclosing(_attempt_rows(bucket, known, options)) as attempts:
            async for row in attempts:
                found = True
                yield [row]
        if not known and not found:
            await bucket.check_ours()
        return
    if not known:
        await bucket.check_ours()
    if options.table is Table.ATTRIBUTES:
        levels = await _levels(bucket, known)
        for one in known:
            async with contextlib.aclosing(_attribute_rows(bucket, one, levels)) as runs:
                async for rows in runs:
                    yield rows
        return
    make = _ROWS[options.table]
    for one in known:
        yield make(one, bucket.ledgers_of(one))


def _batch(rows: Sequence[Row], schema: Any) -> Any:  # noqa: ANN401
    arrays = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _stream_rows(known: KnownManifest, ledgers: Sequence[ManifestLedger]) -> list[Row]:
    head = known.head
    assert head is not None
    return [
        {
            "stream": head.stream,
            "incarnation": str(head.incarnation),
            "created": _time(head.created_ms),
            "lifecycle": head.lifecycle.name.lower(),
            "raw": head.raw,
            "partitions": head.partitions,
            "trimmed_through": head.trimmed_through if head.trimmed_through >= 0 else None,
            "ledgers": len(ledgers),
            "ledgers_copied": sum(one.copy is not None for one in ledgers),
            "entries": sum(one.listed.entry_count for one in ledgers),
            "bytes": sum(one.listed.length for one in ledgers),
            "generation": known.generation,
            "written": _time(known.written_ms),
        }
    ]


def _ledger_rows(known: KnownManifest, ledgers: Sequence[ManifestLedger]) -> list[Row]:
    return [_ledger_row(known.stream, one) for one in ledgers]


def _ledger_row(stream: StreamName, ledger: ManifestLedger) -> Row:
    listed, copy = ledger.listed, ledger.copy
    return {
        "stream": stream,
        "ledger_id": listed.ledger_id,
        "entries": listed.entry_count,
        "bytes": listed.length,
        "opened": _time(listed.opened_ms),
        "closed": _time(listed.closed_ms),
        "attempt": str(copy.uuid) if copy else None,
        "completed": _time(copy.complete_ms) if copy else None,
        "data_object": copy.location.data_key if copy else None,
        "data_bytes": copy.copy.data_len if copy else None,
        "blocks": copy.copy.block_count if copy else None,
        "verified": copy.copy.side_len > 0 if copy else None,
    }


async def _attempt_rows(
    bucket: Bucket, known: Sequence[KnownManifest], options: ReadOptions
) -> AsyncGenerator[Row, None]:
    """Iterate over attempts of which there is an object; manifests say which are copies."""
    named: set[Attempt] = set()
    streams: dict[LedgerId, str] = {}
    for one in known:
        for ledger in bucket.ledgers_of(one):
            streams[ledger.listed.ledger_id] = one.stream
            if ledger.copy is not None:
                named.add((ledger.listed.ledger_id, ledger.copy.uuid))
    async with contextlib.aclosing(_attempts(bucket, options)) as attempts:
        async for (ledger_id, uuid), infos in attempts:
            if options.streams and ledger_id not in streams:
                continue
            yield {
                "attempt": str(uuid),
                "ledger_id": ledger_id,
                "stream": streams.get(ledger_id),
                "is_copy": (ledger_id, uuid) in named,
                "objects": sorted(info.key for info in infos),
                "bytes": sum(info.size for info in infos),
                "modified": _time(max(info.modified_ms for info in infos)),
            }


async def _attempts(
    bucket: Bucket, options: ReadOptions
) -> AsyncGenerator[tuple[Attempt, list[ObjectInfo]], None]:
    """Iterate over attempts and their objects, which a list in the order of keys has together."""
    prefix = options.s3.key_prefix
    last: Attempt | None = None
    infos: list[ObjectInfo] = []
    async for info in bucket.objects.list(key_prefix(prefix)):
        parsed = parse_key(prefix, info.key)
        if parsed is None:
            continue
        here = (parsed.ledger_id, parsed.uuid)
        if last is not None and here != last:
            yield last, infos
            infos = []
        last = here
        infos.append(info)
    if last is not None:
        yield last, infos


async def _levels(
    bucket: Bucket, known: Sequence[KnownManifest]
) -> Mapping[UUID | None, PolicyLevels]:
    """Return what the clusters of these streams say above them, as a restore would find it."""
    found: dict[UUID | None, PolicyLevels] = {None: NO_LEVELS}
    for one in known:
        if one.cluster_id is not None and one.cluster_id not in found:
            _, manifest = await bucket.manifests.cluster(one.cluster_id)
            found[one.cluster_id] = NO_LEVELS if manifest is None else manifest.levels
    return found


async def _attribute_rows(
    bucket: Bucket, known: KnownManifest, levels: Mapping[UUID | None, PolicyLevels]
) -> AsyncGenerator[list[Row], None]:
    """Iterate over a stream's attributes in the order of their keys: core ones are first."""
    checkpoint = bucket.attributes_of(known)
    if checkpoint is None or checkpoint.through is None:
        return
    assert known.head is not None
    above = levels[known.cluster_id]
    core = {**checkpoint.core, **derived(known.stream, known.head.policy, above, checkpoint.root)}
    through = checkpoint.through

    def row(key: AttributeKey, value: int) -> Row:
        return {
            "stream": known.stream,
            "key": str(UUID(bytes=bytes(key))),
            "name": CORE_NAMES.get(key),
            "value": value,
            "as_of_ledger_id": through.ledger_id,
            "as_of_entry_id": through.entry_id,
        }

    yield [row(*one) for one in sorted(core.items())]
    key: AttributeKey | None = _FIRST_KEY
    while key is not None:
        found = await bucket.scan(checkpoint, key, _LAST_KEY)
        yield [row(*one) for one in found.items]
        key = found.next_key


def _time(ms: int) -> int | None:
    return ms * _US_A_MS if ms else None


_ROWS: Final[dict[Table, Callable[[KnownManifest, Sequence[ManifestLedger]], list[Row]]]] = {
    Table.STREAMS: _stream_rows,
    Table.LEDGERS: _ledger_rows,
}
