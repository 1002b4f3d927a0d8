"""The record of the scheduler's progress in ZooKeeper (tierlog/v1/metadata.proto).

Invariants: as in ``tierlog.format.records``. A record from before copies had their UUID in it is
read without them: nothing is known then of when a copy was first seen complete.
"""

from collections.abc import Sequence
from uuid import UUID

from tierlog.format.checksum import Buffer
from tierlog.format.decoding import decoded
from tierlog.format.records import UUID_LEN
from tierlog.format.versions import Format, current
from tierlog.model.ids import LedgerId
from tierlog.model.offload import CopySeen, LedgerSample, SchedulerProgress
from tierlog.proto.v1 import metadata_pb2 as pb


def encode_progress(progress: SchedulerProgress) -> bytes:
    """Return the data of the scheduler's progress."""
    seen = progress.complete_seen
    return pb.SchedulerProgressRecord(
        version=current(Format.PROGRESS_RECORD),
        progress_ms=progress.progress_ms,
        ledger_id=list(seen),
        complete_seen_ms=[one.progress_ms for one in seen.values()],
        complete_uuids=b"".join(one.uuid.bytes for one in seen.values()),
        sample_ledger_id=[one.ledger_id for one in progress.samples],
        sample_progress_ms=[one.progress_ms for one in progress.samples],
        closed_ledger_id=list(progress.closed_seen_ms),
        closed_seen_ms=list(progress.closed_seen_ms.values()),
    ).SerializeToString(deterministic=True)


def decode_progress(data: Buffer) -> SchedulerProgress:
    """Read the scheduler's progress."""
    return decoded(pb.SchedulerProgressRecord(), data, Format.PROGRESS_RECORD, _progress_of)


def _progress_of(record: pb.SchedulerProgressRecord) -> SchedulerProgress:
    samples = zip(record.sample_ledger_id, record.sample_progress_ms, strict=True)
    closed = zip(record.closed_ledger_id, record.closed_seen_ms, strict=True)
    return SchedulerProgress(
        progress_ms=record.progress_ms,
        complete_seen=_copies_seen(
            record.ledger_id, record.complete_seen_ms, record.complete_uuids
        ),
        closed_seen_ms={LedgerId(one): seen_ms for one, seen_ms in closed},
        samples=tuple(LedgerSample(LedgerId(one), at_ms) for one, at_ms in samples),
    )


def _copies_seen(
    ids: Sequence[int], seen_ms: Sequence[int], uuids: bytes
) -> dict[LedgerId, CopySeen]:
    if len(ids) != len(seen_ms):
        raise ValueError(f"{len(ids)} ledgers, {len(seen_ms)} times")
    if not uuids:
        # Of which copies an older leader saw it is not known: their lags begin anew.
        return {}
    if len(uuids) != UUID_LEN * len(ids):
        raise ValueError(f"{len(ids)} ledgers, {len(uuids)} bytes of UUIDs")
    return {
        LedgerId(one): CopySeen(UUID(bytes=uuids[at * UUID_LEN : (at + 1) * UUID_LEN]), ms)
        for at, (one, ms) in enumerate(zip(ids, seen_ms, strict=True))
    }
