"""What the admin REST API says and takes: pydantic models over the values of the library.

Owns names and units of JSON fields. Seed names and units of thresholds (minutes, MB of 2^20
bytes) are taken beside Tierlog's own (milliseconds, bytes), never both for one threshold.
"""

from dataclasses import replace
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.ids import INT64_MAX
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.offload import GONE_FROM_TIER1, OffloadContext
from tierlog.model.policy import MIB, MINUTE_MS, NEVER, Policy
from tierlog.model.stream import ListedLedger
from tierlog_scheduler.explain import doubt_text

# Seed name: (own name, factor).
SEED_NAMES: Final = {
    "offloadTimeInMinutes": ("offload_time_ms", MINUTE_MS),
    "offloadSizeInMB": ("offload_size_bytes", MIB),
    "retentionTimeInMinutes": ("retention_time_ms", MINUTE_MS),
    "retentionSizeInMB": ("retention_size_bytes", MIB),
}


class PolicyDocument(BaseModel):
    """Thresholds; what is null is left to the level above."""

    model_config = ConfigDict(extra="forbid")

    offload_time_ms: int | None = None
    offload_size_bytes: int | None = None
    retention_time_ms: int | None = None
    retention_size_bytes: int | None = None
    deletion_lag_ms: int | None = None
    ledger_bytes_max: int | None = None
    ledger_entries_max: int | None = None
    ledger_age_ms_max: int | None = None
    block_size: int | None = None
    offloaded_read_priority: str | None = None
    data_sha256: bool | None = None
    read_back: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_seed_names(cls, given: Any) -> Any:  # noqa: ANN401 - as it came
        if not isinstance(given, dict):
            return given
        own = dict(given)
        for name, value in own.items():
            # Else taken for 1 and 0.
            if isinstance(value, bool) and name != "data_sha256":
                raise ValueError(f"{name} does not take true or false")
        for seed_name, (name, factor) in SEED_NAMES.items():
            if seed_name not in own:
                continue
            value = own.pop(seed_name)
            if own.get(name) is not None:
                raise ValueError(f"{seed_name} and {name} are the same threshold: give one")
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{seed_name} is not a number")
            # As in Pulsar, -1 is never; it has no unit.
            if value is not None and value != NEVER:
                if not abs(value * factor) <= INT64_MAX:
                    raise ValueError(f"{seed_name} is not a number that 64 bits hold")
                value = round(value * factor)
            own[name] = value
        return own

    def policy(self) -> Policy:
        """Return the thresholds as a value, or raise POLICY_INVALID."""
        return Policy(**self.model_dump())

    def onto(self, before: Policy) -> Policy:
        """Return ``before`` with those that were given, null too; or raise POLICY_INVALID."""
        return replace(before, **{name: getattr(self, name) for name in self.model_fields_set})

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return what is said of ``policy``."""
        return cls(**{name: getattr(policy, name) for name in cls.model_fields})


class PolicyAnswer(BaseModel):
    """A stream's own thresholds, what holds with the levels above it, and which says so.

    ``levels``: stream, namespace …, cluster, default; settings: those of the process that writes
    or verifies a copy say it; null: no level says anything.
    """

    own: PolicyDocument
    effective: PolicyDocument
    levels: dict[str, str | None]


class LevelAnswer(BaseModel):
    """What a level above streams says, and what holds for a stream that says nothing itself."""

    namespace: str | None
    own: PolicyDocument
    effective: PolicyDocument


class LevelsAnswer(BaseModel):
    """All levels above streams."""

    cluster: PolicyDocument
    namespaces: dict[str, PolicyDocument]


class ThresholdDocument(BaseModel):
    """A threshold that holds, and the level that says so."""

    name: str
    value: bool | int | str | None
    level: str | None


class StepDocument(BaseModel):
    """What happens next to a ledger. ``in_ms`` 0: it is due; null: not by time alone, or never.

    ``stream``: whose it is, the one that was asked about or one of its partitions.
    """

    stream: str
    ledger_id: int
    what: str
    in_ms: int | None
    at_ms: int | None
    why: str


class ExplainAnswer(BaseModel):
    """What comes of a stream's thresholds.

    ``unexpected_error``: what stopped the leader's last pass over this stream, and nobody foresaw.
    Of a stream with partitions ``thresholds`` are its own, and a partition may have others; the age
    is the largest of theirs; ``paused``, if any of them is; ``deletions_stopped`` and
    ``unexpected_error`` name the first one of which there is something to tell.
    """

    stream: str
    namespace: str
    paused: bool
    deletions_stopped: str | None
    unexpected_error: str | None
    oldest_byte_age_ms: int
    thresholds: list[ThresholdDocument]
    ledgers: list[StepDocument]


class DeletionAnswer(BaseModel):
    """A stream that is being deleted, and of how many ledgers something is left.

    With all partitions that are there. ``paused``: it or one of them is, of which nothing goes
    before it is resumed.
    """

    stream: str
    incarnation: str
    ledgers_left: int
    paused: bool


class AttemptDocument(BaseModel):
    """An abandoned attempt that is still to be cleaned."""

    uuid: str
    data_key: str
    abandoned_ms: int
    swept_ms: int


class OffloadDocument(BaseModel):
    """Where a ledger is on its way to tier 2.

    ``doubt``: what was found wrong with its complete copy, and what helps; until it does, a local
    copy stays.
    """

    stream: str
    ledger_id: int
    state: str
    complete: bool
    bookkeeper_deleted: bool
    uuid: str | None
    attempts: int
    attempt_started_ms: int
    timestamp_ms: int
    worker: str
    last_error: str
    last_error_ms: int
    doubt: str | None = None
    doubted_ms: int | None = None
    length: int | None = None
    bucket: str | None = None
    data_key: str | None = None
    index_key: str | None = None
    side_key: str | None = None
    data_len: int | None = None
    block_count: int | None = None
    abandoned: list[AttemptDocument] = Field(default_factory=list)

    @classmethod
    def of(cls, context: OffloadContext, *, length: int | None = None) -> Self:
        """Return what is said of a ledger's context."""
        location, copy = context.location, context.copy
        return cls(
            stream=context.stream,
            ledger_id=context.ledger_id,
            state=context.state.name,
            complete=context.complete,
            bookkeeper_deleted=context.bookkeeper_deleted,
            uuid=str(context.uuid) if context.uuid is not None else None,
            attempts=context.attempt_count,
            attempt_started_ms=context.attempt_started_ms,
            timestamp_ms=context.timestamp_ms,
            worker=context.last_worker,
            last_error=context.last_error,
            last_error_ms=context.last_error_ms,
            doubt=doubt_text(context.doubt) if context.doubt is not None else None,
            doubted_ms=context.doubt.found_ms if context.doubt is not None else None,
            length=length,
            bucket=location.bucket if location is not None else None,
            data_key=location.data_key if location is not None else None,
            index_key=location.index_key if location is not None else None,
            side_key=location.side_key if location is not None else None,
            data_len=copy.data_len if copy is not None else None,
            block_count=copy.block_count if copy is not None else None,
            abandoned=[
                AttemptDocument(
                    uuid=str(one.uuid),
                    data_key=one.location.data_key,
                    abandoned_ms=one.abandoned_ms,
                    swept_ms=one.swept_ms,
                )
                for one in context.abandoned
            ],
        )


class LedgerDocument(BaseModel):
    """A ledger of a stream, and which tiers hold it."""

    ledger_id: int
    state: str
    entries: int
    length: int
    opened_ms: int
    closed_ms: int
    block_size: int
    offload_state: str | None
    complete: bool
    tier1: bool
    tier2: bool
    attempts: int
    uuid: str | None
    last_error: str

    @classmethod
    def of(cls, listed: ListedLedger, context: OffloadContext | None) -> Self:
        """Return what is said of a listed ledger."""
        complete = context is not None and context.complete
        return cls(
            ledger_id=listed.ledger_id,
            state="CLOSED" if listed.closed else "OPEN",
            entries=listed.entry_count,
            length=listed.length,
            opened_ms=listed.opened_ms,
            closed_ms=listed.closed_ms,
            block_size=listed.block_size,
            offload_state=context.state.name if context is not None else None,
            complete=complete,
            tier1=context is None
            or not (context.bookkeeper_deleted or context.state in GONE_FROM_TIER1),
            tier2=complete,
            attempts=context.attempt_count if context is not None else 0,
            uuid=str(context.uuid) if context is not None and context.uuid is not None else None,
            last_error=context.last_error if context is not None else "",
        )


class StreamSummary(BaseModel):
    """A stream in one line."""

    stream: str
    ledgers: int
    entries: int
    bytes: int
    tier1_bytes: int
    tier2_bytes: int
    owner: str | None
    owner_epoch: int
    raw: bool
    partitions: int

    @classmethod
    def of(cls, snapshot: StreamSnapshot, ledgers: list[LedgerDocument]) -> Self:
        """Return the sums over a stream's ledgers; an open one counts when it is closed."""
        stream = snapshot.stream
        return cls(
            stream=stream.name,
            ledgers=len(ledgers),
            entries=sum(one.entries for one in ledgers),
            bytes=sum(one.length for one in ledgers),
            tier1_bytes=sum(one.length for one in ledgers if one.tier1),
            tier2_bytes=sum(one.length for one in ledgers if one.tier2),
            owner=stream.owner.node_id if stream.owner is not None else None,
            owner_epoch=stream.owner_epoch,
            raw=stream.raw,
            partitions=stream.partitions,
        )


class StreamsAnswer(BaseModel):
    """All streams."""

    streams: list[StreamSummary]


class StreamDocument(BaseModel):
    """A stream in full; ledgers are in the order of the list, oldest first.

    A stream with partitions has no ledgers; ``partition_streams`` are those that have.
    """

    stream: str
    incarnation: str
    lifecycle: str
    raw: bool
    created_ms: int
    owner: str | None
    owner_epoch: int
    offload_through: int | None
    policy: PolicyDocument
    ledgers: list[LedgerDocument]
    partitions: int = 0
    partition_streams: list[StreamSummary] = Field(default_factory=list)


class EnsembleDocument(BaseModel):
    """From which entry on which nodes hold a ledger."""

    first_entry_id: int
    nodes: list[str]


class LedgerMetadataDocument(BaseModel):
    """A ledger's own metadata, while tier 1 has it."""

    state: str
    last_entry_id: int
    length: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    ensembles: list[EnsembleDocument]

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Self:
        """Return what is said of a ledger's metadata."""
        return cls(
            state=metadata.state.name,
            last_entry_id=metadata.last_entry_id,
            length=metadata.length,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
            ensembles=[
                EnsembleDocument(first_entry_id=one.first_entry_id, nodes=list(one.ensemble))
                for one in metadata.segments
            ],
        )


class LedgerAnswer(BaseModel):
    """A ledger with its metadata (null: not in tier 1 any more) and its offload context.

    A bare ledger has neither a stream nor a context.
    """

    ledger_id: int
    stream: str | None
    metadata: LedgerMetadataDocument | None
    offload: OffloadDocument | None


class OffloadRequestDocument(BaseModel):
    """Everything sealed before this ``LEDGER:ENTRY``; null: everything sealed.

    A position that the stream does not have, or has no more, is refused: NO_SUCH_ENTRY or TRIMMED.
    """

    model_config = ConfigDict(extra="forbid")

    before: str | None = None


class OffloadAnswer(BaseModel):
    """What is now wanted, and what was asked for just now. ``position``: what comes behind it.

    Of a stream with partitions these are the ledgers of all of them, and there is no position.
    """

    stream: str
    position: str | None
    ledgers: list[int]
    requested: list[int]


class OffloadsAnswer(BaseModel):
    """Ledgers on their way to tier 2, or there."""

    offloads: list[OffloadDocument]
