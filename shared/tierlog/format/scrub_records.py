"""The records of scrubs in ZooKeeper (tierlog/v1/metadata.proto).

Invariants: as in ``tierlog.format.records``, and a report is never longer than ``REPORT_LEN_MAX``:
findings that don't fit are counted and left off, the last ones first.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from tierlog.format.checksum import Buffer
from tierlog.format.decoding import decoded
from tierlog.format.versions import Format, current
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.scrub import (
    DeepPlace,
    Finding,
    FindingKind,
    ScrubReport,
    ScrubState,
    ScrubTimes,
    ScrubWish,
)
from tierlog.proto.v1 import metadata_pb2 as pb

REPORT_LEN_MAX: Final = 128 * 1024
TEXT_LEN_MAX: Final = 2000
UNREAD_MAX: Final = 20

_SAME: Final = (
    "number",
    "started_ms",
    "ended_ms",
    "told_ms",
    "objects",
    "uploads",
    "streams",
    "ledgers",
    "copies_checked",
    "bytes_read",
    "elsewhere",
    "orphan_objects",
    "orphan_bytes",
)
_TEXTS: Final = ("key", "cause", "remedy", "repaired", "kept")


def encode_report(report: ScrubReport) -> bytes:
    """Return the data of a scrub's report, with as many findings as there is room for."""
    record = pb.ScrubReportRecord(
        version=current(Format.SCRUB_RECORD),
        scrub_id=report.scrub_id.bytes,
        repair=report.wish.repair,
        deep=report.wish.deep,
        state=report.state.value,
        error=report.error[:TEXT_LEN_MAX],
        unread=[one[:TEXT_LEN_MAX] for one in report.unread[:UNREAD_MAX]],
        unread_left_off=report.unread_count - len(report.unread[:UNREAD_MAX]),
        deletions_stopped=report.deletions_stopped[:TEXT_LEN_MAX],
        counts=_by_name(report.counts),
        repaired=_by_name(report.repaired),
        **{name: getattr(report, name) for name in _SAME},
    )
    if report.deep_next is not None:
        record.deep_next.CopyFrom(_place_to_record(report.deep_next))
    left = REPORT_LEN_MAX - record.ByteSize()
    for finding in report.findings:
        one = _finding_to_record(finding)
        # Its length and its field's number come on top.
        left -= one.ByteSize() + 8
        if left < 0:
            break
        record.findings.append(one)
    record.findings_left_off = (
        report.findings_left_off + len(report.findings) - len(record.findings)
    )
    return record.SerializeToString(deterministic=True)


def decode_report(data: Buffer) -> ScrubReport:
    """Read a scrub's report."""
    return decoded(pb.ScrubReportRecord(), data, Format.SCRUB_RECORD, _report_of)


def encode_times(times: ScrubTimes) -> bytes:
    """Return when scrubs last began."""
    record = pb.ScrubScheduleRecord(
        version=current(Format.SCRUB_RECORD),
        begun_ms=times.begun_ms,
        deep_begun_ms=times.deep_begun_ms,
    )
    if times.deep_next is not None:
        record.deep_next.CopyFrom(_place_to_record(times.deep_next))
    return record.SerializeToString(deterministic=True)


def decode_times(data: Buffer) -> ScrubTimes:
    """Read when scrubs last began."""
    return decoded(
        pb.ScrubScheduleRecord(),
        data,
        Format.SCRUB_RECORD,
        lambda record: ScrubTimes(
            begun_ms=record.begun_ms,
            deep_begun_ms=record.deep_begun_ms,
            deep_next=_place_of(record.deep_next) if record.HasField("deep_next") else None,
        ),
    )


def _report_of(record: pb.ScrubReportRecord) -> ScrubReport:
    return ScrubReport(
        scrub_id=UUID(bytes=record.scrub_id),
        wish=ScrubWish(repair=record.repair, deep=record.deep),
        number=record.number,
        started_ms=record.started_ms,
        findings_max=len(record.findings),
        ended_ms=record.ended_ms,
        told_ms=record.told_ms,
        state=ScrubState(record.state),
        error=record.error,
        objects=record.objects,
        uploads=record.uploads,
        streams=record.streams,
        ledgers=record.ledgers,
        copies_checked=record.copies_checked,
        bytes_read=record.bytes_read,
        elsewhere=record.elsewhere,
        orphan_objects=record.orphan_objects,
        orphan_bytes=record.orphan_bytes,
        unread=list(record.unread),
        unread_left_off=record.unread_left_off,
        deletions_stopped=record.deletions_stopped,
        deep_next=_place_of(record.deep_next) if record.HasField("deep_next") else None,
        counts=_by_kind(record.counts),
        repaired=_by_kind(record.repaired),
        findings=[_finding_of(one) for one in record.findings],
        findings_left_off=record.findings_left_off,
    )


def _finding_to_record(finding: Finding) -> pb.ScrubFinding:
    record = pb.ScrubFinding(
        kind=finding.kind.value,
        stream=finding.stream,
        uuid=finding.uuid.bytes if finding.uuid is not None else b"",
        lost_first_entry_id=[first for first, _ in finding.lost],
        lost_last_entry_id=[last for _, last in finding.lost],
        lost_count=finding.lost_count,
        **{name: getattr(finding, name)[:TEXT_LEN_MAX] for name in _TEXTS},
    )
    if finding.ledger_id is not None:
        record.ledger_id = finding.ledger_id
    return record


def _finding_of(record: pb.ScrubFinding) -> Finding:
    return Finding(
        kind=FindingKind(record.kind),
        stream=record.stream,
        ledger_id=LedgerId(record.ledger_id) if record.HasField("ledger_id") else None,
        uuid=UUID(bytes=record.uuid) if record.uuid else None,
        key=record.key,
        cause=record.cause,
        remedy=record.remedy,
        repaired=record.repaired,
        kept=record.kept,
        lost=tuple(
            (EntryId(first), EntryId(last))
            for first, last in zip(
                record.lost_first_entry_id, record.lost_last_entry_id, strict=True
            )
        ),
        lost_count=record.lost_count,
    )


def _by_name(counts: Mapping[FindingKind, int]) -> dict[str, int]:
    return {kind.value: count for kind, count in counts.items()}


def _by_kind(counts: Mapping[str, int]) -> Counter[FindingKind]:
    return Counter({FindingKind(name): count for name, count in counts.items()})


def _place_to_record(place: DeepPlace) -> pb.ScrubPlace:
    return pb.ScrubPlace(stream=place.stream, ledger_id=place.ledger_id)


def _place_of(record: pb.ScrubPlace) -> DeepPlace:
    return DeepPlace(record.stream, record.ledger_id)
