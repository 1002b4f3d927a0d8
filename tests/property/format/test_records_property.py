"""What goes into ZooKeeper comes out the same; what is not ours is refused, never guessed at."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format import records
from tierlog.format.progress import decode_progress, encode_progress
from tierlog.format.versions import GATE, Format
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.node import Cluster, Cookie, NodeInfo
from tierlog.model.offload import (
    AbandonedAttempt,
    AttemptOutcome,
    CopySeen,
    Doubt,
    LedgerSample,
    OffloadContext,
    OffloadState,
    PastAttempt,
    RepairAttempt,
    SchedulerProgress,
    Tier2Copy,
    Tier2Location,
)
from tierlog.model.policy import CLUSTER_DEFAULT, Policy
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

naturals = st.integers(0, 2**63 - 1)
numbers = st.sampled_from([0, 1, 127, 128, 2**31, 2**63 - 1]) | naturals
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
texts = st.text(max_size=12)
uuids = st.uuids()
int32s = st.integers(0, 2**31 - 1)


@st.composite
def policies(draw) -> Policy:
    optional = st.none() | st.integers(0, 10**12)
    offload_time = draw(optional)
    retention_time = draw(st.none() | st.integers((offload_time or 0) + 1, 2 * 10**12))
    return Policy(
        offload_time_ms=offload_time,
        retention_time_ms=retention_time,
        offload_size_bytes=draw(st.none() | st.integers(0, 10)),
        retention_size_bytes=draw(st.none() | st.integers(11, 10**15)),
        deletion_lag_ms=draw(st.none() | st.integers(-1, 10**12)),
        ledger_bytes_max=draw(st.none() | st.integers(1, 10**12)),
        ledger_entries_max=draw(st.none() | st.integers(1, 10**12)),
        ledger_age_ms_max=draw(st.none() | st.integers(1, 10**12)),
        block_size=draw(st.none() | st.integers(5 * 1024 * 1024, 2**31 - 1)),
        offloaded_read_priority=draw(st.sampled_from([None, "tier1", "tier2"])),
        data_sha256=draw(st.none() | st.booleans()),
        read_back=draw(st.sampled_from([None, "sample", "full"])),
    )


@st.composite
def listed(draw, ledger_id: int | None = None, *, closed: bool = True) -> ListedLedger:
    return ListedLedger(
        ledger_id=LedgerId(draw(naturals) if ledger_id is None else ledger_id),
        opened_ms=draw(numbers),
        block_size=draw(numbers),
        owner_epoch=draw(numbers),
        closed=closed,
        last_entry_id=EntryId(draw(st.just(-1) | numbers)),
        length=draw(numbers),
        closed_ms=draw(numbers),
        attached_id=LedgerId(draw(numbers)),
    )


@st.composite
def streams(draw) -> Stream:
    ids = sorted(draw(st.sets(naturals, max_size=4)))
    ledgers = [draw(listed(ledger_id)) for ledger_id in ids[:-1]]
    ledgers += [draw(listed(ledger_id, closed=draw(st.booleans()))) for ledger_id in ids[-1:]]
    pages = st.builds(
        LedgerPageRef,
        page_number=numbers,
        first_ledger_id=numbers.map(LedgerId),
        last_ledger_id=numbers.map(LedgerId),
        ledger_count=int32s,
    )
    owners = st.builds(Owner, node_id=names.map(NodeId), claim=uuids)
    return Stream(
        name=StreamName(draw(names)),
        incarnation=draw(uuids),
        created_ms=draw(numbers),
        raw=draw(st.booleans()),
        lifecycle=draw(st.sampled_from(StreamLifecycle)),
        owner_epoch=draw(numbers),
        owner=draw(st.none() | owners),
        policy=draw(policies()),
        ledgers=tuple(ledgers),
        pages=tuple(draw(st.lists(pages, max_size=3))),
        deleting=tuple(map(LedgerId, draw(st.lists(naturals, max_size=3)))),
        partitions=0 if ledgers else draw(st.integers(0, 2**31 - 1)),
        offload_pause=draw(st.none() | st.builds(OffloadPause, since_ms=numbers, cause=texts)),
        offload_pauses=draw(naturals),
        policy_changed_ms=draw(naturals),
        trimmed_end=draw(st.none() | st.builds(Position, naturals, naturals)),
    )


locations = st.builds(
    Tier2Location,
    driver=texts,
    endpoint_name=texts,
    bucket=texts,
    data_key=texts,
    index_key=texts,
    side_key=texts,
)
copies = st.builds(
    Tier2Copy,
    format_version=st.integers(1, 2**31 - 1),
    data_len=numbers,
    index_len=numbers,
    index_sha256=st.binary(min_size=32, max_size=32),
    entry_count=numbers,
    block_count=int32s,
    side_len=numbers,
    side_sha256=st.just(b"") | st.binary(min_size=32, max_size=32),
    side_header_sha256=st.just(b"") | st.binary(min_size=32, max_size=32),
    data_sha256=st.just(b"") | st.binary(min_size=32, max_size=32),
)
contexts = st.builds(
    OffloadContext,
    stream=names.map(StreamName),
    incarnation=uuids,
    ledger_id=numbers.map(LedgerId),
    state=st.sampled_from(OffloadState),
    uuid=st.none() | uuids,
    complete=st.booleans(),
    bookkeeper_deleted=st.booleans(),
    timestamp_ms=numbers,
    location=st.none() | locations,
    copy=st.none() | copies,
    abandoned=st.lists(
        st.builds(
            AbandonedAttempt, uuid=uuids, location=locations, abandoned_ms=numbers, swept_ms=numbers
        ),
        max_size=3,
    ).map(tuple),
    attempt_count=int32s,
    attempt_started_ms=numbers,
    last_error=texts,
    last_error_ms=numbers,
    last_worker=texts,
    repair=st.none()
    | st.builds(RepairAttempt, uuid=uuids, location=locations, worker=texts, started_ms=numbers),
    history=st.lists(
        st.builds(
            PastAttempt,
            uuid=uuids,
            worker=texts,
            started_ms=numbers,
            ended_ms=numbers,
            outcome=st.sampled_from(AttemptOutcome),
            error=texts,
        ),
        max_size=3,
    ).map(tuple),
    doubt=st.none() | st.builds(Doubt, mark=uuids, found_ms=numbers, cause=texts),
)
clusters = st.builds(Cluster, cluster_id=uuids, created_ms=numbers, ledger_id_base=numbers)
cookies = st.builds(Cookie, cluster_id=uuids, node_id=names.map(NodeId), instance_id=uuids)
nodes = st.builds(
    NodeInfo,
    node_id=names.map(NodeId),
    wire_address=texts,
    grpc_address=texts,
    http_address=texts,
    zone=texts,
    read_only=st.booleans(),
    free_bytes=numbers,
)

complaints = st.builds(
    Complaint,
    node_id=names.map(NodeId),
    reason=st.text(max_size=20),
    entries=st.none() | st.tuples(numbers, numbers),
)
queued = st.builds(
    UnderReplicated,
    ledger_id=numbers,
    since_ms=numbers,
    complaints=st.lists(complaints, max_size=4).map(tuple),
    tries=st.integers(0, 2**31 - 1),
    under_work=st.booleans(),
    last_error=st.text(max_size=20),
    last_error_ms=numbers,
    last_worker=st.text(max_size=20),
)
drainings = st.builds(
    Draining,
    node_id=names.map(NodeId),
    since_ms=numbers,
    retired_ms=numbers,
    done_ms=numbers,
    said_empty=st.booleans(),
)

progresses = st.builds(
    SchedulerProgress,
    progress_ms=numbers,
    complete_seen=st.dictionaries(numbers, st.builds(CopySeen, uuids, numbers), max_size=4),
    closed_seen_ms=st.dictionaries(numbers, numbers, max_size=4),
    samples=st.lists(st.builds(LedgerSample, numbers, numbers), max_size=4).map(tuple),
)

CODECS: dict[
    Format, tuple[st.SearchStrategy[Any], Callable[..., bytes], Callable[..., Any], Any]
] = {
    Format.STREAM_RECORD: (
        streams(),
        records.encode_stream,
        records.decode_stream,
        pb.StreamRecord,
    ),
    Format.LEDGER_PAGE: (
        st.lists(listed(), max_size=4).map(tuple),
        records.encode_page,
        records.decode_page,
        pb.LedgerPage,
    ),
    Format.CONTEXT_RECORD: (
        contexts,
        records.encode_context,
        records.decode_context,
        pb.OffloadContextRecord,
    ),
    Format.PROGRESS_RECORD: (
        progresses,
        encode_progress,
        decode_progress,
        pb.SchedulerProgressRecord,
    ),
    Format.CLUSTER_RECORD: (
        clusters,
        records.encode_cluster,
        records.decode_cluster,
        pb.ClusterRecord,
    ),
    Format.COOKIE: (cookies, records.encode_cookie, records.decode_cookie, pb.Cookie),
    Format.NODE_RECORD: (nodes, records.encode_node, records.decode_node, pb.NodeRecord),
    Format.UNDERREPLICATED_RECORD: (
        queued,
        records.encode_underreplicated,
        records.decode_underreplicated,
        pb.UnderReplicatedRecord,
    ),
    Format.DRAINING_RECORD: (
        drainings,
        records.encode_draining,
        records.decode_draining,
        pb.DrainingRecord,
    ),
    Format.AUDIT_RECORD: (numbers, records.encode_audit, records.decode_audit, pb.AuditRecord),
}
each_record = pytest.mark.parametrize("kind", list(CODECS), ids=lambda kind: kind.name.lower())


@pytest.mark.covers("A29", "A30", "A31", "A32")
@each_record
@given(data=st.data())
def test_a_record_is_read_back_as_it_was_written(kind: Format, data) -> None:
    values, encode, decode, _ = CODECS[kind]
    value = data.draw(values)
    assert decode(encode(value)) == value
    assert encode(decode(encode(value))) == encode(value)


@each_record
@given(data=st.data())
def test_another_version_is_refused(kind: Format, data) -> None:
    values, encode, decode, message = CODECS[kind]
    record = message.FromString(encode(data.draw(values)))
    assert record.version in GATE[kind].readable
    record.version = data.draw(st.sampled_from([0, 2, 2**32 - 1]))
    with pytest.raises(RefusedError, match="has format version"):
        decode(record.SerializeToString())


@each_record
@given(data=st.data())
def test_damage_is_refused_or_makes_a_value(kind: Format, data) -> None:
    """ZooKeeper checks its own bytes; here no damage may end in an error of another kind."""
    values, encode, decode, _ = CODECS[kind]
    raw = bytearray(encode(data.draw(values)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(raw)
    except TierlogError as error:
        if not isinstance(error, CorruptError | RefusedError):
            raise


@each_record
def test_no_bytes_are_no_record(kind: Format) -> None:
    with pytest.raises(RefusedError, match="version 0"):
        CODECS[kind][2](b"")
    with pytest.raises(CorruptError, match="can't be read"):
        CODECS[kind][2](b"\xff")


@given(policies())
def test_policies_travel_with_what_is_unset_unset(policy: Policy) -> None:
    assert records.policy_from_record(records.policy_to_record(policy)) == policy
    assert records.policy_from_record(pb.PolicyRecord()) == Policy()


@pytest.mark.parametrize(
    ("raw", "policy"),
    [
        # 7: ledger_entries_max, as one wrote that knew no more.
        (b"\x38\x05", Policy(ledger_entries_max=5)),
        # 11: data_sha256; 12: read_back.
        (b"\x58\x00", Policy(data_sha256=False)),
        (b"\x58\x01\x62\x04full", Policy(data_sha256=True, read_back="full")),
    ],
)
def test_policies_of_older_and_newer_processes_are_read(raw: bytes, policy: Policy) -> None:
    assert records.policy_to_record(policy).SerializeToString() == raw
    assert records.policy_from_record(pb.PolicyRecord.FromString(raw)) == policy
    # 99: what one says that is newer.
    newer = pb.PolicyRecord.FromString(raw + b"\x98\x06\x01")
    assert records.policy_from_record(newer) == policy


def test_a_policy_from_outside_is_checked() -> None:
    record = records.policy_to_record(CLUSTER_DEFAULT)
    record.offload_time_ms = record.retention_time_ms = 5
    with pytest.raises(RefusedError, match="not below retention_time_ms"):
        records.policy_from_record(record)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../etc"),
        ("incarnation", b"short"),
        ("owner_claim", b"short"),
        ("lifecycle", 0),
        ("lifecycle", 9),
        ("partitions", -1),
    ],
)
def test_a_stream_that_makes_no_sense_is_corrupt(field: str, value: object) -> None:
    record = pb.StreamRecord(
        version=1, name="orders", incarnation=bytes(16), lifecycle=pb.STREAM_LIFECYCLE_ACTIVE
    )
    assert records.decode_stream(record.SerializeToString()).name == "orders"
    setattr(record, field, value)
    with pytest.raises(CorruptError):
        records.decode_stream(record.SerializeToString())


def test_a_list_of_ledgers_out_of_order_is_corrupt() -> None:
    ledgers = [pb.ListedLedger(ledger_id=number, closed=True) for number in (2, 1)]
    record = pb.StreamRecord(
        version=1,
        name="orders",
        incarnation=bytes(16),
        lifecycle=pb.STREAM_LIFECYCLE_ACTIVE,
        ledgers=ledgers,
    )
    with pytest.raises(CorruptError, match="ledger ids of a stream grow"):
        records.decode_stream(record.SerializeToString())
