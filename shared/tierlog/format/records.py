"""The records below ``/tierlog`` in ZooKeeper, and their values (tierlog/v1/metadata.proto).

Owns the conversion both ways and the check of versions. Does not own where a record lies
(``tierlog.format.paths``), nor when it may change.

Invariants:
    * ``decode_x(encode_x(value)) == value``.
    * A version that is not in the gate is ``RefusedError``; bytes that make no value are
      ``CorruptError``; no other error is raised.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Final
from uuid import UUID

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.decoding import decoded
from tierlog.format.versions import Format, current
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, LedgerId, NodeId, node_id, stream_name
from tierlog.model.node import Cluster, Cookie, NodeInfo
from tierlog.model.offload import (
    AbandonedAttempt,
    AttemptOutcome,
    Doubt,
    OffloadContext,
    OffloadState,
    PastAttempt,
    RepairAttempt,
    Tier2Copy,
    Tier2Location,
)
from tierlog.model.policy import Policy, PolicyLevels, check_namespace
from tierlog.model.position import Position
from tierlog.model.replication import Complaint, Draining, UnderReplicated
from tierlog.model.stream import (
    LedgerPageRef,
    ListedLedger,
    OffloadPause,
    Owner,
    Stream,
    StreamLifecycle,
)
from tierlog.proto.v1 import metadata_pb2 as pb

UUID_LEN: Final = 16

_POLICY_FIELDS: Final = tuple(item.name for item in fields(Policy))
assert set(_POLICY_FIELDS) == set(pb.PolicyRecord.DESCRIPTOR.fields_by_name)
assert {state.value for state in OffloadState} == set(pb.OffloadState.values()) - {0}
assert {one.value for one in AttemptOutcome} == set(pb.AttemptOutcome.values()) - {0}
assert {one.value for one in StreamLifecycle} == set(pb.StreamLifecycle.values()) - {0}


def policy_to_record(policy: Policy) -> pb.PolicyRecord:
    """Return the message of a policy; what is unset stays unset."""
    record = pb.PolicyRecord()
    for name in _POLICY_FIELDS:
        value = getattr(policy, name)
        if value is not None:
            setattr(record, name, value)
    return record


def policy_from_record(record: pb.PolicyRecord) -> Policy:
    """Return the policy of a message, or raise ``RefusedError`` POLICY_INVALID."""
    present = (field.name for field, _ in record.ListFields())
    return Policy(**{name: getattr(record, name) for name in present if name in _POLICY_FIELDS})


def encode_levels(levels: PolicyLevels) -> bytes:
    """Return the data of what is said above streams."""
    return pb.PolicyLevelsRecord(
        version=current(Format.POLICIES_RECORD),
        cluster=policy_to_record(levels.cluster),
        namespaces={key: policy_to_record(one) for key, one in levels.namespaces.items()},
        changed_ms=levels.changed_ms,
        level_changed_ms=levels.level_changed_ms,
    ).SerializeToString(deterministic=True)


def decode_levels(data: Buffer) -> PolicyLevels:
    """Read what is said above streams."""
    return decoded(
        pb.PolicyLevelsRecord(),
        data,
        Format.POLICIES_RECORD,
        lambda record: PolicyLevels(
            cluster=policy_from_record(record.cluster),
            namespaces={
                check_namespace(key): policy_from_record(one)
                for key, one in record.namespaces.items()
            },
            changed_ms=record.changed_ms,
            level_changed_ms=dict(record.level_changed_ms),
        ),
    )


def encode_stream(stream: Stream) -> bytes:
    """Return the data of a stream's znode."""
    record = pb.StreamRecord(
        version=current(Format.STREAM_RECORD),
        name=stream.name,
        incarnation=stream.incarnation.bytes,
        lifecycle=pb.StreamLifecycle.ValueType(stream.lifecycle.value),
        raw=stream.raw,
        created_ms=stream.created_ms,
        owner_epoch=stream.owner_epoch,
        policy=policy_to_record(stream.policy),
        ledgers=[_ledger_to_record(ledger) for ledger in stream.ledgers],
        pages=[_page_ref_to_record(page) for page in stream.pages],
        deleting=stream.deleting,
        partitions=stream.partitions,
        offload_pauses=stream.offload_pauses,
        policy_changed_ms=stream.policy_changed_ms,
    )
    if stream.offload_through is not None:
        record.offload_through = stream.offload_through
    if stream.offload_pause is not None:
        record.offload_pause.since_ms = stream.offload_pause.since_ms
        record.offload_pause.cause = stream.offload_pause.cause
    if stream.trimmed_end is not None:
        end = stream.trimmed_end
        record.trimmed_end.CopyFrom(pb.TrimmedEnd(ledger_id=end.ledger_id, entry_id=end.entry_id))
    if stream.empty_ledger_id is not None:
        record.empty_ledger_id = stream.empty_ledger_id
    if stream.owner is not None:
        record.owner_claim = stream.owner.claim.bytes
        record.owner_node_id = stream.owner.node_id
    return record.SerializeToString(deterministic=True)


def decode_stream(data: Buffer) -> Stream:
    """Read a stream's znode."""
    return decoded(pb.StreamRecord(), data, Format.STREAM_RECORD, _stream_of)


def encode_page(ledgers: Sequence[ListedLedger]) -> bytes:
    """Return the data of a page of a stream's list."""
    return pb.LedgerPage(
        version=current(Format.LEDGER_PAGE),
        ledgers=[_ledger_to_record(ledger) for ledger in ledgers],
    ).SerializeToString(deterministic=True)


def decode_page(data: Buffer) -> tuple[ListedLedger, ...]:
    """Read a page of a stream's list."""
    return decoded(
        pb.LedgerPage(), data, Format.LEDGER_PAGE, lambda page: _ledgers_of(page.ledgers)
    )


def encode_context(context: OffloadContext) -> bytes:
    """Return the data of a ledger's context znode."""
    record = pb.OffloadContextRecord(
        version=current(Format.CONTEXT_RECORD),
        stream=context.stream,
        incarnation=context.incarnation.bytes,
        ledger_id=context.ledger_id,
        state=pb.OffloadState.ValueType(context.state.value),
        uuid=context.uuid.bytes if context.uuid is not None else b"",
        complete=context.complete,
        bookkeeper_deleted=context.bookkeeper_deleted,
        timestamp_ms=context.timestamp_ms,
        abandoned=[_abandoned_to_record(attempt) for attempt in context.abandoned],
        attempt_count=context.attempt_count,
        attempt_started_ms=context.attempt_started_ms,
        last_error=context.last_error,
        last_error_ms=context.last_error_ms,
        last_worker=context.last_worker,
        history=[_past_to_record(one) for one in context.history],
    )
    if context.repair is not None:
        record.repair.CopyFrom(_repair_to_record(context.repair))
    if context.doubt is not None:
        record.doubt.CopyFrom(_doubt_to_record(context.doubt))
    if context.location is not None:
        record.location.CopyFrom(_location_to_record(context.location))
    if context.copy is not None:
        assert context.copy.format_version > 0, "zero says that there is no copy"
        for item in fields(Tier2Copy):
            setattr(record, item.name, getattr(context.copy, item.name))
    return record.SerializeToString(deterministic=True)


def decode_context(data: Buffer) -> OffloadContext:
    """Read a ledger's context znode."""
    return decoded(pb.OffloadContextRecord(), data, Format.CONTEXT_RECORD, _context_of)


def encode_cluster(cluster: Cluster) -> bytes:
    """Return the data of the cluster's znode."""
    return pb.ClusterRecord(
        version=current(Format.CLUSTER_RECORD),
        cluster_id=cluster.cluster_id.bytes,
        ledger_id_base=cluster.ledger_id_base,
        created_ms=cluster.created_ms,
    ).SerializeToString(deterministic=True)


def decode_cluster(data: Buffer) -> Cluster:
    """Read the cluster's znode."""
    return decoded(
        pb.ClusterRecord(),
        data,
        Format.CLUSTER_RECORD,
        lambda record: Cluster(
            cluster_id=_uuid(record.cluster_id),
            ledger_id_base=record.ledger_id_base,
            created_ms=record.created_ms,
        ),
    )


def encode_cookie(cookie: Cookie) -> bytes:
    """Return a node's cookie, for its directories and for ZooKeeper."""
    record = pb.Cookie(
        version=current(Format.COOKIE),
        cluster_id=cookie.cluster_id.bytes,
        node_id=cookie.node_id,
        instance_id=cookie.instance_id.bytes,
    )
    record.crc32c = _checksum_of(record)
    return record.SerializeToString(deterministic=True)


def decode_cookie(data: Buffer) -> Cookie:
    """Read a node's cookie."""
    return decoded(pb.Cookie(), data, Format.COOKIE, _cookie_of)


def _cookie_of(record: pb.Cookie) -> Cookie:
    if record.crc32c != _checksum_of(record):
        raise ValueError("its checksum is wrong")
    return Cookie(
        cluster_id=_uuid(record.cluster_id),
        node_id=node_id(record.node_id),
        instance_id=_uuid(record.instance_id),
    )


def _checksum_of(record: pb.Cookie) -> int:
    bare = pb.Cookie()
    bare.CopyFrom(record)
    bare.ClearField("crc32c")
    return crc32c(bare.SerializeToString(deterministic=True))


def encode_underreplicated(one: UnderReplicated) -> bytes:
    """Return the data of a ledger's place in the queue; its version is the znode's."""
    return pb.UnderReplicatedRecord(
        version=current(Format.UNDERREPLICATED_RECORD),
        ledger_id=one.ledger_id,
        complaints=[_complaint_to_record(complaint) for complaint in one.complaints],
        since_ms=one.since_ms,
        tries=one.tries,
        under_work=one.under_work,
        last_error=one.last_error,
        last_error_ms=one.last_error_ms,
        last_worker=one.last_worker,
    ).SerializeToString(deterministic=True)


def decode_underreplicated(data: Buffer, *, znode_version: int = 0) -> UnderReplicated:
    """Read a ledger's place in the queue."""
    return decoded(
        pb.UnderReplicatedRecord(),
        data,
        Format.UNDERREPLICATED_RECORD,
        lambda record: UnderReplicated(
            ledger_id=LedgerId(record.ledger_id),
            complaints=tuple(_complaint_of(one) for one in record.complaints),
            since_ms=record.since_ms,
            tries=record.tries,
            under_work=record.under_work,
            last_error=record.last_error,
            last_error_ms=record.last_error_ms,
            last_worker=record.last_worker,
            version=znode_version,
        ),
    )


def _complaint_to_record(complaint: Complaint) -> pb.CopyComplaint:
    record = pb.CopyComplaint(node_id=complaint.node_id, reason=complaint.reason)
    if complaint.entries is not None:
        record.first_entry_id, record.last_entry_id = complaint.entries
    return record


def _complaint_of(record: pb.CopyComplaint) -> Complaint:
    has_entries = record.HasField("first_entry_id")
    assert has_entries == record.HasField("last_entry_id")
    return Complaint(
        node_id=node_id(record.node_id),
        reason=record.reason,
        entries=(
            (EntryId(record.first_entry_id), EntryId(record.last_entry_id)) if has_entries else None
        ),
    )


def encode_draining(draining: Draining) -> bytes:
    """Return what stands of a node that is being emptied."""
    return pb.DrainingRecord(
        version=current(Format.DRAINING_RECORD),
        node_id=draining.node_id,
        since_ms=draining.since_ms,
        done_ms=draining.done_ms,
        retired_ms=draining.retired_ms,
        said_empty=draining.said_empty,
    ).SerializeToString(deterministic=True)


def decode_draining(data: Buffer) -> Draining:
    """Read what stands of a node that is being emptied."""
    return decoded(
        pb.DrainingRecord(),
        data,
        Format.DRAINING_RECORD,
        lambda record: Draining(
            node_id=node_id(record.node_id),
            since_ms=record.since_ms,
            done_ms=record.done_ms,
            retired_ms=record.retired_ms,
            said_empty=record.said_empty,
        ),
    )


def encode_audit(checked_ms: int) -> bytes:
    """Return when all copies were last looked at."""
    return pb.AuditRecord(
        version=current(Format.AUDIT_RECORD), checked_ms=checked_ms
    ).SerializeToString(deterministic=True)


def decode_audit(data: Buffer) -> int:
    """Read when all copies were last looked at."""
    return decoded(
        pb.AuditRecord(), data, Format.AUDIT_RECORD, lambda record: int(record.checked_ms)
    )


def encode_node(node: NodeInfo) -> bytes:
    """Return what a live node announces."""
    record = pb.NodeRecord(version=current(Format.NODE_RECORD))
    for item in fields(NodeInfo):
        setattr(record, item.name, getattr(node, item.name))
    return record.SerializeToString(deterministic=True)


def decode_node(data: Buffer) -> NodeInfo:
    """Read what a live node announces."""
    return decoded(
        pb.NodeRecord(),
        data,
        Format.NODE_RECORD,
        lambda record: NodeInfo(
            node_id=node_id(record.node_id),
            wire_address=record.wire_address,
            grpc_address=record.grpc_address,
            http_address=record.http_address,
            zone=record.zone,
            read_only=record.read_only,
            free_bytes=record.free_bytes,
            draining=record.draining,
        ),
    )


def _stream_of(record: pb.StreamRecord) -> Stream:
    owner = None
    if record.owner_claim:
        owner = Owner(node_id=NodeId(record.owner_node_id), claim=_uuid(record.owner_claim))
    return Stream(
        name=stream_name(record.name),
        incarnation=_uuid(record.incarnation),
        created_ms=record.created_ms,
        raw=record.raw,
        lifecycle=StreamLifecycle(record.lifecycle),
        owner_epoch=record.owner_epoch,
        owner=owner,
        policy=policy_from_record(record.policy),
        ledgers=_ledgers_of(record.ledgers),
        pages=tuple(_page_ref_of(page) for page in record.pages),
        deleting=tuple(LedgerId(number) for number in record.deleting),
        offload_through=(
            LedgerId(record.offload_through) if record.HasField("offload_through") else None
        ),
        partitions=record.partitions,
        offload_pause=(
            OffloadPause(since_ms=record.offload_pause.since_ms, cause=record.offload_pause.cause)
            if record.HasField("offload_pause")
            else None
        ),
        trimmed_end=_trimmed_end_of(record) if record.HasField("trimmed_end") else None,
        empty_ledger_id=(
            LedgerId(record.empty_ledger_id) if record.HasField("empty_ledger_id") else None
        ),
        offload_pauses=record.offload_pauses,
        policy_changed_ms=record.policy_changed_ms,
    )


def _trimmed_end_of(record: pb.StreamRecord) -> Position:
    end = record.trimmed_end
    return Position(LedgerId(end.ledger_id), EntryId(end.entry_id))


def _ledger_to_record(ledger: ListedLedger) -> pb.ListedLedger:
    record = pb.ListedLedger()
    for item in fields(ListedLedger):
        setattr(record, item.name, getattr(ledger, item.name))
    return record


def _ledgers_of(records: Sequence[pb.ListedLedger]) -> tuple[ListedLedger, ...]:
    return tuple(
        ListedLedger(
            ledger_id=LedgerId(one.ledger_id),
            opened_ms=one.opened_ms,
            block_size=one.block_size,
            owner_epoch=one.owner_epoch,
            closed=one.closed,
            last_entry_id=EntryId(one.last_entry_id),
            length=one.length,
            closed_ms=one.closed_ms,
            attached_id=LedgerId(one.attached_id),
        )
        for one in records
    )


def _page_ref_to_record(page: LedgerPageRef) -> pb.LedgerPageRef:
    return pb.LedgerPageRef(
        page_number=page.page_number,
        first_ledger_id=page.first_ledger_id,
        last_ledger_id=page.last_ledger_id,
        ledger_count=page.ledger_count,
    )


def _page_ref_of(record: pb.LedgerPageRef) -> LedgerPageRef:
    return LedgerPageRef(
        page_number=record.page_number,
        first_ledger_id=LedgerId(record.first_ledger_id),
        last_ledger_id=LedgerId(record.last_ledger_id),
        ledger_count=record.ledger_count,
    )


def _location_to_record(location: Tier2Location) -> pb.Tier2Location:
    record = pb.Tier2Location()
    for item in fields(Tier2Location):
        setattr(record, item.name, getattr(location, item.name))
    return record


def _location_of(record: pb.Tier2Location) -> Tier2Location:
    return Tier2Location(
        driver=record.driver,
        endpoint_name=record.endpoint_name,
        bucket=record.bucket,
        data_key=record.data_key,
        index_key=record.index_key,
        side_key=record.side_key,
    )


def _abandoned_to_record(attempt: AbandonedAttempt) -> pb.AbandonedAttempt:
    return pb.AbandonedAttempt(
        uuid=attempt.uuid.bytes,
        location=_location_to_record(attempt.location),
        abandoned_ms=attempt.abandoned_ms,
        swept_ms=attempt.swept_ms,
    )


def _abandoned_of(record: pb.AbandonedAttempt) -> AbandonedAttempt:
    return AbandonedAttempt(
        uuid=_uuid(record.uuid),
        location=_location_of(record.location),
        abandoned_ms=record.abandoned_ms,
        swept_ms=record.swept_ms,
    )


def _repair_to_record(repair: RepairAttempt) -> pb.RepairRecord:
    return pb.RepairRecord(
        uuid=repair.uuid.bytes,
        location=_location_to_record(repair.location),
        worker=repair.worker,
        started_ms=repair.started_ms,
    )


def _repair_of(record: pb.RepairRecord) -> RepairAttempt:
    return RepairAttempt(
        uuid=_uuid(record.uuid),
        location=_location_of(record.location),
        worker=record.worker,
        started_ms=record.started_ms,
    )


def _doubt_to_record(doubt: Doubt) -> pb.DoubtRecord:
    return pb.DoubtRecord(mark=doubt.mark.bytes, found_ms=doubt.found_ms, cause=doubt.cause)


def _doubt_of(record: pb.DoubtRecord) -> Doubt:
    return Doubt(mark=_uuid(record.mark), found_ms=record.found_ms, cause=record.cause)


def _context_of(record: pb.OffloadContextRecord) -> OffloadContext:
    return OffloadContext(
        stream=stream_name(record.stream),
        incarnation=_uuid(record.incarnation),
        ledger_id=LedgerId(record.ledger_id),
        state=OffloadState(record.state),
        uuid=_uuid_or_none(record.uuid),
        complete=record.complete,
        bookkeeper_deleted=record.bookkeeper_deleted,
        timestamp_ms=record.timestamp_ms,
        location=_location_of(record.location) if record.HasField("location") else None,
        copy=_copy_of(record) if record.format_version else None,
        abandoned=tuple(_abandoned_of(one) for one in record.abandoned),
        attempt_count=record.attempt_count,
        attempt_started_ms=record.attempt_started_ms,
        last_error=record.last_error,
        last_error_ms=record.last_error_ms,
        last_worker=record.last_worker,
        repair=_repair_of(record.repair) if record.HasField("repair") else None,
        history=tuple(_past_of(one) for one in record.history),
        doubt=_doubt_of(record.doubt) if record.HasField("doubt") else None,
    )


def _past_to_record(one: PastAttempt) -> pb.AttemptHistoryRecord:
    return pb.AttemptHistoryRecord(
        uuid=one.uuid.bytes,
        worker=one.worker,
        started_ms=one.started_ms,
        ended_ms=one.ended_ms,
        outcome=pb.AttemptOutcome.ValueType(one.outcome.value),
        error=one.error,
    )


def _past_of(record: pb.AttemptHistoryRecord) -> PastAttempt:
    return PastAttempt(
        uuid=_uuid(record.uuid),
        worker=record.worker,
        started_ms=record.started_ms,
        ended_ms=record.ended_ms,
        outcome=AttemptOutcome(record.outcome),
        error=record.error,
    )


def _copy_of(record: pb.OffloadContextRecord) -> Tier2Copy:
    return Tier2Copy(
        format_version=record.format_version,
        data_len=record.data_len,
        index_len=record.index_len,
        index_sha256=record.index_sha256,
        entry_count=record.entry_count,
        block_count=record.block_count,
        side_len=record.side_len,
        side_sha256=record.side_sha256,
        side_header_sha256=record.side_header_sha256,
        data_sha256=record.data_sha256,
    )


def _uuid(raw: bytes) -> UUID:
    if len(raw) != UUID_LEN:
        raise CorruptError(f"UUID of {len(raw)} bytes", remedy="Restore the metadata")
    return UUID(bytes=raw)


def _uuid_or_none(raw: bytes) -> UUID | None:
    return _uuid(raw) if raw else None
