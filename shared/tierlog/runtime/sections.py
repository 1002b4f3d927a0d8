"""What sections of the settings are made of, and sections of which nobody else makes use.

Invariant: a section takes no name that it doesn't know, and doesn't change once it is read.
"""

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from tierlog.model.errors import RefusedError
from tierlog.ports.throttle import rate_of_namespace

MIB = 1024 * 1024
KAFKA_SESSION_S = 6.0
"""A worker that is not heard of for so long is put out of its group."""

PositiveBytes = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


def _rates(texts: tuple[str, ...]) -> tuple[str, ...]:
    names = []
    for text in texts:
        try:
            names.append(rate_of_namespace(text)[0])
        except RefusedError as refused:
            raise ValueError(f"{refused.message}: {refused.remedy}") from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"namespace {twice} has two rates")
    return texts


# No table: names of environment variables, which the chart makes of tables, lose a name's case.
NamespaceRates = Annotated[tuple[str, ...], Field(max_length=2000), AfterValidator(_rates)]
"""Each NAMESPACE=BYTES_PER_S; * is each that isn't named."""


class Section(BaseModel):
    """A part of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AttributeSettings(Section):
    """Attributes of the streams that this process owns, and the checkpoints of them.

    Of a stream's attributes so many are kept in memory at most; no more may wait for a checkpoint.
    A checkpoint is made at the end of each ledger, and in between once so many wait, so many bytes
    or updates came since the last one, or so much time passed. A node that drains waits so long
    for its last one; without it the next owner reads the entries behind the one before.
    """

    cached_max: int = Field(default=100_000, gt=0)
    cached_all_max: int = Field(default=1_000_000, gt=0)
    """Of all streams together so many at most that can be fetched again; about 250 bytes each."""
    unflushed_all_max: int = Field(default=2_000_000, gt=0)
    """Of all streams together so many wait for a checkpoint, about 250 bytes each. From half of it
    on those with most make one, and from three quarters on they take no new keys until then."""
    page_cache_bytes_max: PositiveBytes = 64 * MIB
    """Pages of the indexes in memory, of all streams together."""
    checkpoint_bytes: PositiveBytes = 256 * MIB
    checkpoint_updates: int = Field(default=50_000, gt=0)
    checkpoint_interval_s: float = Field(default=300.0, gt=0)
    checkpoint_timeout_s: float = Field(default=5.0, gt=0)
    chunk_bytes: PositiveBytes = 32 * MIB
    chunk_objects_max: int = Field(default=512, gt=0, le=2000)
    """With so many bytes, or objects, a chunk of the index is closed: an object of its own lists
    what it holds, so that the metadata stay small. A chunk that no checkpoint needs goes."""
    compaction_quiet_factor: float = Field(default=1.5, ge=1)
    compaction_busy_factor: float = Field(default=2.25, ge=1)
    compaction_share: float = Field(default=0.08, ge=0, le=1)
    """A checkpoint moves old pages of the index to its end: none while less than the quiet factor
    of what is needed is kept, one up to the busy factor, and above that so many for each page that
    it writes anyway."""


class ReplicationSettings(Section):
    """Auto-recovery: an auditor finds ledgers that lack copies, workers make them whole."""

    enabled: bool = True
    interval_s: float = Field(default=2.0, gt=0)
    """How often the queue and the nodes are looked at."""
    lost_node_delay_s: Seconds = 30.0
    """So long a node may be away before its copies are made anew elsewhere."""
    grace_s: Seconds = 30.0
    """So much longer a ledger that stands open on a lost node is left to its owner."""
    scan_interval_s: Seconds = 30.0
    """While a node is gone or being emptied, all ledgers are looked through this often."""
    check_interval_s: float = 604_800.0
    """How often all copies of all ledgers are compared with what they should be; 0: never."""
    copies_in_flight_max: int = Field(default=2, gt=0)
    """Ledgers that one process works on at once."""
    bytes_per_s: PositiveBytes = 50 * MIB
    """What the copies of one process may take of disks and network."""
    backoff_s_first: Seconds = 2.0
    backoff_s_max: Seconds = 300.0
    """A ledger that could not be made whole is tried again after these, and all between."""


class PriceSettings(Section):
    """The price list of the object store, for ``tierlog cost``.

    The defaults are those of S3 Standard in us-east-1. Months have 30 days, a GB is 10^9 bytes.
    """

    currency: str = "USD"
    write_per_1000: float = Field(default=0.005, ge=0)
    read_per_1000: float = Field(default=0.0004, ge=0)
    received_per_gb: float = Field(default=0.0, ge=0)
    stored_per_gb_month: float = Field(default=0.023, ge=0)


class UpSettings(Section):
    """Servers that ``tierlog up`` uses instead of starting its own, and what goes first here.

    S3 is a URL, with keys and bucket of the section s3; ZooKeeper and Kafka are host:port lists;
    Redis is redis://host:port/0. With `background_niceness` (19: as much as can be) reader,
    offloader, scheduler and the S3 that is started here have the CPU after ingest: appends hardly
    feel them, and where appends leave nothing, offloads and reads wait.
    """

    external_s3: str | None = None
    external_zookeeper: str | None = None
    external_kafka: str | None = None
    external_redis: str | None = Field(default=None, repr=False)
    background_niceness: int = Field(default=0, ge=0, le=19)


class LogSettings(Section):
    """Logs go to standard error."""

    format: Annotated[str, Field(pattern="^(json|console)$")] = "json"
    level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = "info"


class MetricsSettings(Section):
    """What ``/metrics`` shows beside totals.

    With per_stream an ingest node names the streams that have most under way, and the scheduler
    those that are furthest behind, so many at most: each costs whoever keeps the metrics a few
    series.
    """

    per_stream: bool = False
    streams_max: int = Field(default=500, gt=0, le=10_000)

    @property
    def streams_shown(self) -> int:
        """How many streams have metrics of their own."""
        return self.streams_max if self.per_stream else 0


class TracingSettings(Section):
    """Traces, sent to a collector with OTLP over HTTP; needs the extra ``tierlog[tracing]``.

    A ledger's life is one trace, from its first sampled append to the end of its copies. Of the
    ledgers a share is traced, and of the appends to those one in so many; 0: none.
    """

    enabled: bool = False
    endpoint_url: str = Field(
        default="http://127.0.0.1:4318/v1/traces", pattern="^https?://[^/\\s]+\\S*$"
    )
    headers: SecretStr | None = None
    """As NAME=VALUE,NAME=VALUE: what the collector wants to be shown."""
    ledgers_share: float = Field(default=1.0, ge=0, le=1)
    append_every: int = Field(default=1000, ge=0)
    queued_spans_max: int = Field(default=2048, gt=0)
    """More than so many that wait to be sent are dropped."""
    export_timeout_s: float = Field(default=10.0, gt=0)


class WireSettings(Section):
    """Limits of the wire, on both sides."""

    frame_bytes_max: PositiveBytes = 8 * MIB
    header_bytes_max: PositiveBytes = 64 * 1024
    credit_bytes: PositiveBytes = 16 * MIB
    hello_timeout_s: Seconds = 5.0
    token: SecretStr | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.header_bytes_max >= self.frame_bytes_max:
            raise ValueError("header_bytes_max must be below frame_bytes_max")
        return self
