"""Every tunable value, in one tree of models; environment variables and TOML fill it.

``TIERLOG_S3__BUCKET=logs`` sets ``s3.bucket``. Precedence: arguments, environment, the profile, the
file that ``TIERLOG_CONFIG`` names, defaults. Components (clocks, stores) are never in here.

Invariants: every queue, cache, retry and message has its limit here; secrets never print.
"""

import base64
import binascii
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from tierlog.format.authentication import SECRET_LEN_MIN
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LEDGER_ID_MAX
from tierlog.model.quorums import ACKNOWLEDGING, COPIES, STRIPE_BYTES
from tierlog.runtime.naming import PREFIX, check_names, unknown_setting, variable_of
from tierlog.runtime.profiles import profile_values
from tierlog.runtime.sections import (
    KAFKA_SESSION_S,
    MIB,
    AttributeSettings,
    LogSettings,
    MetricsSettings,
    NamespaceRates,
    PositiveBytes,
    PriceSettings,
    ReplicationSettings,
    Seconds,
    TracingSettings,
    UpSettings,
    WireSettings,
)
from tierlog.runtime.sections import Section as _Section
from tierlog.runtime.security import OuterTlsSettings, SaslSettings, SecuritySettings, apart

GIB = 1024 * MIB


def key_bytes(secret: SecretStr) -> bytes:
    """Return a ledger key's bytes. Raises ``ValueError``, which does not show them."""
    try:
        raw = base64.b64decode(secret.get_secret_value(), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a ledger key is base64, and this is not") from None
    if len(raw) < SECRET_LEN_MIN:
        raise ValueError(f"a ledger key has {SECRET_LEN_MIN} bytes at least, this has {len(raw)}")
    return raw


def _checked_key(secret: SecretStr) -> SecretStr:
    key_bytes(secret)
    return secret


# Lower case, since the names of environment variables are read so.
KeyId = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_.-]{0,63}$")]
LedgerSecret = Annotated[SecretStr, AfterValidator(_checked_key)]


class ClusterSettings(_Section):
    """What holds for a whole cluster.

    The ledger id base is added to every new ledger id, so that a cluster restored from a backup
    never repeats one. It is raised when a process starts with a larger one, and never lowered.
    """

    ledger_id_base: int = Field(default=0, ge=0, le=LEDGER_ID_MAX)


class S3Settings(_Section):
    """Tier 2. Without keys the SDK's own chain of credentials is used."""

    endpoint_url: str | None = Field(default=None, pattern="^(https?://[^/\\s]+\\S*)?$")
    endpoint_name: str = "default"
    region: str = "us-east-1"
    bucket: str = "tierlog"
    key_prefix: str = ""
    driver: str = "aws-s3"
    """By name, what writes new copies: aws-s3 (S3 means the same), aws-s3-single-object, a driver
    that was passed to the service, or none, which refuses. Copies are read and deleted by the
    driver that wrote them."""
    layout: Literal["two-objects", "single-object"] = "two-objects"
    """How aws-s3 lays a ledger out: Pulsar's data and index objects, or the one object of PIP-17's
    first text."""
    export_events: bool = False
    """Writes an export copy beside each copy: every event by itself, as a line of JSON."""
    access_key: str | None = None
    secret_key: SecretStr | None = None
    connections_max: int = Field(default=32, gt=0)
    connect_timeout_s: Seconds = 5.0
    read_timeout_s: Seconds = 60.0
    attempts_max: int = Field(default=5, gt=0)
    retry_s_max: Seconds = 60.0
    retry_wait_s_first: Seconds = 0.2
    retry_wait_s_max: Seconds = 10.0
    """A request is sent again after a random wait up to the first, then up to twice that, and so
    on up to the last; at most so often, and not later than so long after its first try."""
    request_s_max: float = Field(default=60.0, gt=0)
    bytes_per_s_min: PositiveBytes = 512 * 1024
    """One try may take so long, and as much longer as its bytes take at this pace. Then it is
    given up: nothing that the store does later is waited for. Waiting for ``bytes_per_s_max``
    doesn't count."""
    bytes_per_s_max: float = Field(default=0.0, ge=0)
    """What a process sends into the store, at most; 0: as much as it can. Ledgers are read for that
    at most twice as fast then, or at 16 MB/s, so that appends don't wait behind that either."""
    namespace_bytes_per_s_max: NamespaceRates = ()
    """And what of it is for streams of one namespace, each as NAMESPACE=BYTES_PER_S. ``*`` is each
    that isn't named, and all streams without a namespace together; 0: no limit of its own."""
    requests_per_s_max: float = Field(default=0.0, ge=0)
    """Requests that a process sends, tries that are repeated included; 0: as many as it likes."""
    data_sha256: bool = False
    """Keeps a SHA-256 of data objects, for three times the CPU, where no policy says otherwise."""
    read_back: Literal["none", "sample", "full"] = "sample"
    """How much of a copy in S3 is read and compared before the local one is deleted: none of it,
    eight grains of 64 KiB, or all; where no policy says otherwise."""

    def longest_request_s(self, length: int) -> float:
        """Return the longest that one request with so many bytes is on its way."""
        return self.request_s_max + length / self.bytes_per_s_min

    @model_validator(mode="after")
    def _waits_grow(self) -> Self:
        if self.retry_wait_s_first > self.retry_wait_s_max:
            raise ValueError("retry_wait_s_first must not be above retry_wait_s_max")
        return self


class KafkaSettings(_Section):
    """The queue. Topics are ``<prefix>.offload.requested.v1`` and the like."""

    bootstrap_servers: str = "127.0.0.1:9092"
    topic_prefix: str = "tierlog"
    partitions: int = Field(default=12, gt=0)
    replication_factor: int = Field(default=1, gt=0)
    offloader_group: str = "tierlog-offloader"
    publish_timeout_s: float = Field(default=30.0, gt=0)
    poll_interval_max_s: Seconds = 300.0
    """A worker that asks for nothing for so long leaves its group. Kafka's client takes no less
    than the worker's session there, which is 6 s."""
    deliveries_max: int = Field(default=5, gt=0)
    queued_messages_max: int = Field(default=10_000, gt=0)
    retention_s: float = Field(default=7 * 86400.0, gt=0)
    """How long requests and results are kept. What is lost of them is asked for again."""
    dead_letter_retention_s: float = Field(default=30 * 86400.0, gt=0)
    """How long people have to look at a request that kept failing."""
    dead_letters_max: int = Field(default=10_000, gt=0)
    """So many of the newest dead letters of each partition are looked through, and no more."""
    tls: OuterTlsSettings = OuterTlsSettings()
    sasl: SaslSettings = SaslSettings()

    @model_validator(mode="after")
    def _polls_within_sessions(self) -> Self:
        if self.poll_interval_max_s < KAFKA_SESSION_S:
            raise ValueError(
                f"poll_interval_max_s is below a worker's session, {KAFKA_SESSION_S} s"
            )
        return self


class ZooKeeperSettings(_Section):
    """The metadata store.

    With a username, or a certificate, nodes that are made are for that identity alone: it is the
    same for all services.
    """

    hosts: str = "127.0.0.1:2181"
    session_timeout_s: Seconds = 6.0
    connect_timeout_s: Seconds = 10.0
    tls: OuterTlsSettings = OuterTlsSettings()
    username: str = ""
    password: SecretStr | None = None
    password_file: Path | None = None


class RedisSettings(_Section):
    """The shared cache; None: readers do without.

    With a secret, which all readers share, values carry a code that nobody else can make.
    """

    url: str | None = Field(default=None, repr=False)
    tls: OuterTlsSettings = OuterTlsSettings()
    username: str = ""
    password: SecretStr | None = None
    password_file: Path | None = None
    secret: SecretStr | None = None
    secret_file: Path | None = None
    key_prefix: str = "tierlog:"
    timeout_s: Seconds = 0.25
    value_bytes_max: PositiveBytes = 1 * MIB
    index_ttl_s: int = Field(default=3600, gt=0)
    _apart = model_validator(mode="before")(apart)


class HttpListenSettings(_Section):
    """Where a service listens; port 0 takes any free one. ``advertise_host`` is what others use."""

    host: str = "127.0.0.1"
    advertise_host: str | None = None
    http_port: int = Field(default=0, ge=0, le=65535)


class ReaderListenSettings(HttpListenSettings):
    """The same of the reader."""

    grpc_port: int = Field(default=0, ge=0, le=65535)


class ListenSettings(HttpListenSettings):
    """The same of ingest."""

    grpc_port: int = Field(default=0, ge=0, le=65535)
    wire_port: int = Field(default=0, ge=0, le=65535)


class StorageSettings(_Section):
    """The storage node's files."""

    journal_segment_bytes: PositiveBytes = 64 * MIB
    journal_queue_bytes_max: PositiveBytes = 64 * MIB
    group_bytes_max: PositiveBytes = 4 * MIB
    group_wait_ms: float = Field(default=0.0, ge=0)
    idle_marker_s: Seconds = 0.05
    """So long after the last group its marker is written, which tells damage from a torn tail."""
    checkpoint_interval_s: Seconds = 60.0
    checkpoint_journal_bytes: PositiveBytes = 512 * MIB
    checkpoint_journal_records: int = Field(default=150_000, gt=0)
    """A mark is due behind so many bytes or records: both bound how long a start replays."""
    space_check_s: Seconds = 5.0
    """How often free space is judged, besides at each journal segment, spare and flush."""
    read_bytes: PositiveBytes = 1 * MIB
    write_buffer_bytes_max: PositiveBytes = 64 * MIB
    """Runs in memory that no entry log has yet; half of it starts a flush, all of it stops adds."""
    journal_spares_max: int = Field(default=8, ge=0)
    """Zero-filled segments that are kept ready; more are removed."""
    entry_log_bytes_max: int = Field(default=GIB, gt=0, lt=2**32)
    direct_writes: bool = True
    """Journal and entry logs are written round the system's page cache, where that is possible."""
    ledger_cache_bytes_max: PositiveBytes = 64 * MIB
    """Index pages in memory."""
    read_ahead_bytes_max: int = Field(default=16 * MIB, ge=0)
    minor_compaction_threshold: float = Field(default=0.2, le=1)
    minor_compaction_interval_s: float = 3600.0
    major_compaction_threshold: float = Field(default=0.8, le=1)
    major_compaction_interval_s: float = 86400.0
    """A threshold or interval of 0 or less switches that compaction off."""
    compaction_bytes_per_s: PositiveBytes = 10 * MIB
    slow_sync_s: Seconds = 0.2
    """A sync of the disk that takes longer is counted and logged as slow."""
    warn_free_share: float = Field(default=0.1, ge=0, lt=1)
    """Below so much free space of its disk, a node warns."""
    open_files_max: int = Field(default=256, gt=0)
    free_bytes_min: int = Field(default=256 * MIB, ge=0)
    free_bytes_resume: int = Field(default=512 * MIB, ge=0)
    gc_interval_s: Seconds = 30.0
    gc_share_max: float = Field(default=0.5, gt=0, le=1)
    gc_quarantine_s: Seconds = 10.0

    @model_validator(mode="after")
    def _resumes_later(self) -> Self:
        if self.free_bytes_resume < self.free_bytes_min:
            raise ValueError("free_bytes_resume must not be below free_bytes_min")
        return self


class OwnerSettings(_Section):
    """Ledgers that this process appends to.

    A ledger lies on as many nodes as its ensemble size says; each entry goes to its write quorum
    of them, and its ack quorum must have it before the producer is told. One node alone needs
    1/1/1. A stripe is what goes to the same nodes before the next ones: about ``stripe_bytes``,
    by the entries of the stream's ledger before, or so many ``stripe_entries``. A run, the unit
    of replication, never crosses a stripe, and a reader asks for one or two at a time. Of no
    account where each node gets every entry.
    Who asks for a stream to be sealed has an answer within ``seal_timeout_s``: longer than an
    append takes at most, and shorter than clients wait, so that they learn what is in the way.
    A node that owes an answer for ``slow_node_s``, and ``slow_node_factor`` times as long as the
    slowest healthy one beside it, is replaced like one that failed.
    The ledger key id names the key that signs the runs of new ones; none: a checksum alone.
    """

    ensemble_size: int = Field(default=COPIES, gt=0)
    write_quorum: int = Field(default=COPIES, gt=0)
    ack_quorum: int = Field(default=ACKNOWLEDGING, gt=0)
    stripe_entries: int | None = Field(default=None, gt=0)
    stripe_bytes: PositiveBytes = STRIPE_BYTES
    run_bytes_max: PositiveBytes = 64 * 1024
    in_flight_bytes_max: PositiveBytes = 32 * MIB
    append_timeout_s: Seconds = 10.0
    seal_timeout_s: float = Field(default=25.0, gt=0)
    slow_node_s: float = Field(default=2.0, gt=0)
    slow_node_factor: float = Field(default=10.0, ge=1)
    streams_max: int = Field(default=10_000, gt=0)
    ledger_key_id: str | None = None
    attributes: AttributeSettings = AttributeSettings()

    @model_validator(mode="after")
    def _quorums_fit(self) -> Self:
        if not self.ack_quorum <= self.write_quorum <= self.ensemble_size:
            raise ValueError("they need ack_quorum <= write_quorum <= ensemble_size")
        return self


class IngestSettings(_Section):
    """The ingest service."""

    node_id: str = "node-1"
    zone: str = ""
    data_dir: Path = Path("data")
    ledger_directories: tuple[Path, ...] = ()
    """Where entry logs and indexes lie, in a fixed order; none: in ``data_dir``, as the journal."""
    listen: ListenSettings = ListenSettings()
    storage: StorageSettings = StorageSettings()
    owner: OwnerSettings = OwnerSettings()
    replication: ReplicationSettings = ReplicationSettings()


class OffloaderSettings(_Section):
    """The offloader service."""

    worker_name: str = ""
    listen: HttpListenSettings = HttpListenSettings()
    ledgers_in_flight_max: int = Field(default=1, gt=0)
    parts_in_flight_max: int = Field(default=4, gt=0)
    """Parts of all ledgers that are on their way to the store at once."""
    memory_bytes_max: PositiveBytes = 188 * 10**6
    """What uploads of all ledgers at once may take: blocks that are being filled or sent, and 40 MB
    (of less than 80 MB half) for what is received ahead of them and built beside them. As it is,
    two blocks of 64 MiB; more of them make a store that is far away quicker."""
    patience_s_max: Seconds = 300.0
    """So long a request of an upload is tried again, beyond the object store's own tries."""
    drain_s_max: Seconds = 30.0
    """After SIGTERM, so long may what was begun take; then it is given up, as by a crash."""
    give_up_s_max: Seconds = 5.0
    """And so long may giving up take: locks are released, leftovers are left to the next one."""
    request_s_max: float = Field(default=4 * 3600.0, gt=0)
    """A copy that takes longer, and longer than its bytes at ``s3.bytes_per_s_min``, has failed."""
    part_delay_s: Seconds = 0.0
    """Waits that long after each part: for people who watch, and for tests that interrupt."""


class SchedulerSettings(_Section):
    """The scheduler service."""

    listen: HttpListenSettings = HttpListenSettings()
    interval_s: float = Field(default=10.0, gt=0)
    request_again_s: Seconds = 30.0
    sweep_again_s: float = Field(default=300.0, gt=0)
    """What an attempt left is deleted once more so long after the first time; or as long after it
    as a request of one of the ledger's blocks may take (``s3.request_s_max``), if that is more."""
    sweep_attributes_s: Seconds = 900.0
    """How often objects of an attribute index are looked for that no checkpoint needs."""
    attributes_safety_s: float = Field(default=3600.0, gt=0)
    """Such an object stays so long after a leader first saw it: who lists attributes goes on."""
    staging_s: float = Field(default=86_400.0, gt=0)
    """What was staged for a stream and not attached in that time is deleted. Keep it above what a
    job that writes may take."""
    checkpoint_s: Seconds = 60.0
    reread_s: float = Field(default=6 * 3600.0, gt=0)
    streams_in_flight_max: int = Field(default=16, gt=0)
    scrub_interval_s: Seconds = 86_400.0
    """How often the bucket is compared with the metadata; 0: only when somebody asks."""
    scrub_deep_interval_s: Seconds = 604_800.0
    """How often all data in it are read back too; 0: only when somebody asks."""
    scrub_repairs: bool = True
    """Whether a scrub by schedule also repairs what it finds."""
    scrub_safety_age_s: float = Field(default=86_400.0, gt=0)
    """What is younger is never called an orphan. Keep it above what an attempt may take, and far
    above what the clocks of this process and of the store may differ."""
    scrub_requests_per_s: float = Field(default=100.0, gt=0)
    scrub_bytes_per_s: PositiveBytes = 50 * MIB
    scrub_deep_s_max: float = Field(default=6 * 3600.0, gt=0)
    """A deep scrub reads no longer than that, and the next one goes on there."""
    scrub_findings_max: int = Field(default=1000, gt=0)
    scrub_reports_max: int = Field(default=20, gt=0, le=100)
    """Reports that are kept in the metadata, the newest ones; each has at most 128 KiB."""


class ReaderSettings(_Section):
    """The reader service."""

    listen: ReaderListenSettings = ReaderListenSettings()
    range_bytes: PositiveBytes = 1 * MIB
    range_growth_max: int = Field(default=16, gt=0)
    """Ahead of who reads on and on requests grow to so many ranges; the cache holds 16 of them."""
    ranges_in_flight_max: int = Field(default=8, gt=0)
    cache_bytes_max: int = Field(default=256 * MIB, ge=2 * MIB)
    """Memory for ranges of objects and for the tails of streams that are followed, with all that
    says where they are; whole buffers of 2 MiB of it are used. Fetching ahead fills three quarters,
    what readers wait for nine tenths."""
    memory_bytes_max: int = Field(default=400 * MIB, ge=16 * MIB)
    """All that the process holds for its clients: the cache, ranges on their way, indexes, and with
    the rest answers until clients have taken them. Clients that want more at once wait in turns,
    each within its share; who does not take its answers holds up nobody else."""
    index_bytes_max: PositiveBytes = 16 * MIB
    """Memory for indexes of copies that are open."""
    room_wait_ms_max: int = Field(default=10_000, gt=0)
    """A read that gets no room for its answer in this time is told to come again."""
    send_wait_ms_max: int = Field(default=30_000, gt=0)
    """A client that takes nothing of its answer for so long is left."""
    handles_max: int = Field(default=1024, gt=0)
    """Copies of ledgers that are open at once, and objects of which ranges are kept."""
    response_bytes_max: int = Field(default=8 * MIB, ge=64 * 1024)
    wait_ms_max: int = Field(default=30_000, ge=0)
    metadata_age_ms_max: int = Field(default=500, ge=0)
    tier2_bytes_per_s_max: float = Field(default=0.0, ge=0)
    """What a process takes out of tier 2 for reads, at most; 0: as much as it can. Reads wait for
    it, those that clients wait for before what is fetched ahead, and none is refused."""
    tier2_namespace_bytes_per_s_max: NamespaceRates = ()
    """And what of it is for streams of one namespace, as ``s3.namespace_bytes_per_s_max``."""
    object_reads: Literal["aioboto3", "obstore"] = "aioboto3"
    """What reads ranges of objects; obstore is the extra tierlog[obstore]."""


class ClientSettings(_Section):
    """Where a client finds the services: ``host:port`` each.

    Of ingest nodes several, with commas between them: any of them will do, and where one is away
    the next one is asked. An owner that owes an answer for ``doubt_s`` is asked for at another.
    A batch goes when it has ``batch_bytes`` of events, or after ``linger_s`` (0: not before a
    flush); without an answer there are at most ``in_flight_bytes_max`` of them. ``compression``
    is of what writers append; reading takes none of it, but the library (tierlog[compression]).
    """

    ingest_address: str = ""
    reader_http_address: str = ""
    scheduler_http_address: str = ""
    timeout_s: Seconds = 30.0
    doubt_s: float = Field(default=1.0, gt=0)
    linger_s: float = Field(default=0.01, ge=0)
    batch_bytes: PositiveBytes = 256 * 1024
    in_flight_bytes_max: PositiveBytes = 8 * MIB
    compression: Literal["none", "zstd", "lz4"] = "none"


class Settings(BaseSettings):
    """All of it. Each process reads the sections it needs.

    Keys of ledgers (ADR-0015) are base64 of 32 random bytes or more; ids are in lower case. Ingest
    nodes, offloaders and readers need those of all ledgers that they touch.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    profile: Literal["embedded", "development", "production"] | None = None
    """A named set of values, behind the environment and before the file."""
    state_dir: Path = Path(".tierlog")
    keys: dict[KeyId, LedgerSecret] = {}
    cluster: ClusterSettings = ClusterSettings()
    security: SecuritySettings = SecuritySettings()
    s3: S3Settings = S3Settings()
    prices: PriceSettings = PriceSettings()
    kafka: KafkaSettings = KafkaSettings()
    zookeeper: ZooKeeperSettings = ZooKeeperSettings()
    redis: RedisSettings = RedisSettings()
    wire: WireSettings = WireSettings()
    ingest: IngestSettings = IngestSettings()
    offloader: OffloaderSettings = OffloaderSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    reader: ReaderSettings = ReaderSettings()
    client: ClientSettings = ClientSettings()
    up: UpSettings = UpSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()

    _flags: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def flags(self) -> Mapping[str, Any]:
        """The tree of what arguments of the process said, for who reads the settings again."""
        return self._flags

    @field_validator("ingest")
    @classmethod
    def _key_is_there(cls, ingest: IngestSettings, info: ValidationInfo) -> IngestSettings:
        key_id = ingest.owner.ledger_key_id
        if key_id is not None and "keys" in info.data and key_id not in info.data["keys"]:
            raise ValueError(f"owner.ledger_key_id is {key_id}, and keys has no such key")
        return ingest

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments before environment before the profile before the file."""
        del dotenv_settings, file_secret_settings
        file = TomlConfigSettingsSource(settings_cls)
        profile = _ProfileSource(settings_cls, file)
        return (init_settings, env_settings, profile, file)


class _ProfileSource(PydanticBaseSettingsSource):
    """The values of the profile that arguments, the environment or else the file name."""

    def __init__(self, settings_cls: type[BaseSettings], file: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._file = file

    def get_field_value(self, field: object, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        named = self.current_state.get("profile") or self._file().get("profile")
        return dict(profile_values(named))


def load_settings(
    config_file: Path | None = None, *, flags: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings; ``config_file`` is TOML. Raises ``RefusedError`` with the setting's name.

    ``flags`` is a tree of values that come before all others. A file that is named and isn't there
    is refused: it would be ignored in silence.
    """
    if config_file is not None and not config_file.is_file():
        raise RefusedError(
            f"the settings file {config_file} does not exist", remedy="Correct TIERLOG_CONFIG"
        )

    class WithFile(Settings):
        model_config = SettingsConfigDict(toml_file=config_file)

    try:
        check_names(Settings, tables=file_tables(config_file), file=config_file, environ=os.environ)
        settings = WithFile(**(flags or {}))
    except ValidationError as error:
        raise _refusal(error) from error
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(
            f"the settings file {config_file} is not TOML: {error}", remedy="Correct the file"
        ) from error
    except SettingsError as error:
        raise RefusedError(
            f"settings can't be read: {error}",
            remedy="Set single values, as TIERLOG_S3__BUCKET=logs, or a section as JSON",
        ) from error
    settings._flags = flags or {}  # noqa: SLF001 - our own class
    return settings


def _refusal(error: ValidationError) -> RefusedError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return unknown_setting(Settings, path)
    return RefusedError(
        f"setting {'.'.join(path)}: {first['msg']}",
        remedy=f"Correct {variable_of(path)}, the argument or the settings file",
    )


def file_tables(config_file: Path | None) -> dict[str, Any]:
    """Return what the settings file has; nothing where there is none."""
    return tomllib.loads(config_file.read_text(encoding="utf-8")) if config_file else {}
