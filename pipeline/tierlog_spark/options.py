"""What a user may say of a read, checked (pure but for the settings of the process).

Owns the options and what is wrong with them. Names don't care about case, as in Spark; what is
not said comes from the settings of the driver's process (``TIERLOG_…``).

Invariant: an option that is not known, or makes no sense, is ``RefusedError`` with its name.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

from pydantic import SecretStr, ValidationError

from tierlog.model.errors import RefusedError
from tierlog.model.ids import INT64_MAX, StreamName, stream_name
from tierlog.model.position import Edge, Position, parse_position
from tierlog.runtime.security import SecuritySettings
from tierlog.runtime.settings import ClientSettings, S3Settings, Settings
from tierlog_spark.columns import PAYLOAD, TYPES, Table

_E = TypeVar("_E", bound=StrEnum)

MIB: Final = 1024 * 1024
PARTITION_BYTES: Final = 128 * MIB
FETCH_BYTES: Final = 16 * MIB
FETCH_BYTES_MAX: Final = 256 * MIB

_UNITS: Final = {"": 1, "k": 1024, "m": MIB, "g": 1024 * MIB}
_SIZE: Final = re.compile(r"(\d{1,15})([kmg]?)b?", re.ASCII | re.IGNORECASE)

OPTIONS: Final[Mapping[str, str]] = {
    "stream": "one stream's name; of a partitioned stream all partitions are read",
    "streams": "names of several, with commas between them",
    "keys": "keys of data objects, with commas between them, instead of streams",
    "table": "events (default), streams, ledgers, attempts or attributes",
    "readMode": "direct (default), service or auto",
    "bucket": "the bucket; else s3.bucket of the settings",
    "prefix": "what its keys begin with; else s3.key_prefix of the settings",
    "endpointUrl": "of the object store",
    "region": "of the object store",
    "accessKey": "of the object store; without it the SDK's own chain, on driver and executors",
    "secretKey": "of the object store",
    "readerAddress": "host:port of the reader's HTTP, for service and auto",
    "start": "earliest, or the first position, LEDGER:ENTRY",
    "end": "latest, or the position to stop at, not included",
    "startTime": "the first publish time: ISO 8601 with a zone, or ms since 1970",
    "endTime": "the publish time to stop at, not included",
    "columns": "which ones, with commas between them",
    "payload": "false: all columns but the payload",
    "partitionBytes": "how much one task reads, about (128m)",
    "fetchBytes": "how much one request brings, about (16m)",
    "pushDownFilters": "false: Spark applies all filters itself",
    "maxEntriesPerTrigger": "how many entries a batch of a streaming read takes",
    "maxBytesPerTrigger": "how many bytes of entries it takes, about",
    "failOnDataLoss": "false: a streaming read goes on behind what was trimmed unread, and a "
    "direct one without a partition that has no manifest",
}
_NAMES: Final = {name.lower(): name for name in OPTIONS}
_OF_EVENTS: Final = (
    "start",
    "end",
    "startTime",
    "endTime",
    "maxEntriesPerTrigger",
    "maxBytesPerTrigger",
    "failOnDataLoss",
)
"""What chooses among events: a table is read whole, and once."""


class ReadMode(StrEnum):
    """Who is asked for the bytes."""

    DIRECT = "direct"
    SERVICE = "service"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """One read. Times are ms; ``end`` and ``end_ms`` are not included."""

    s3: S3Settings
    client: ClientSettings
    security: SecuritySettings
    table: Table
    mode: ReadMode
    streams: tuple[StreamName, ...]
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    start: Position | None
    end: Position | None
    start_ms: int | None
    end_ms: int | None
    partition_bytes: int
    fetch_bytes: int
    push_filters: bool
    trigger_entries: int | None
    trigger_bytes: int | None
    fail_on_data_loss: bool


def parse_options(given: Mapping[str, str], settings: Settings) -> ReadOptions:
    """Return what was said, or raise ``RefusedError``."""
    said = {name.lower(): str(value).strip() for name, value in given.items()}
    for name in said:
        if name not in _NAMES:
            _refuse_unknown(name)
    table = _one_of(Table, said, "table", Table.EVENTS)
    for name in _OF_EVENTS:
        if table is not Table.EVENTS and name.lower() in said:
            _refuse(name, f"it chooses among events, and {table} is read whole")
    options = ReadOptions(
        s3=_s3(said, settings.s3),
        client=_client(said, settings.client),
        security=settings.security,
        table=table,
        mode=_one_of(ReadMode, said, "readMode", ReadMode.DIRECT),
        streams=_streams(said),
        keys=_list(said, "keys"),
        columns=_columns(said, table),
        start=_position(said, "start", Edge.EARLIEST),
        end=_position(said, "end", Edge.LATEST),
        start_ms=_time_ms(said, "startTime"),
        end_ms=_time_ms(said, "endTime"),
        partition_bytes=_size(said, "partitionBytes", PARTITION_BYTES, INT64_MAX),
        fetch_bytes=_size(said, "fetchBytes", FETCH_BYTES, FETCH_BYTES_MAX),
        push_filters=_flag(said, "pushDownFilters", default=True),
        trigger_entries=_limit(said, "maxEntriesPerTrigger"),
        trigger_bytes=_limit(said, "maxBytesPerTrigger"),
        fail_on_data_loss=_flag(said, "failOnDataLoss", default=True),
    )
    _check_together(options)
    return options


def _check_together(options: ReadOptions) -> None:
    bounded = options.start is not None or options.end is not None
    if options.table is not Table.EVENTS:
        if options.mode is not ReadMode.DIRECT or options.keys:
            _refuse("table", f"{options.table} is read from the bucket's manifests alone")
        return
    if bool(options.streams) == bool(options.keys):
        _refuse("stream", "give stream, streams or keys, and only one of them")
    if options.keys and options.mode is not ReadMode.DIRECT:
        _refuse("keys", "objects by their keys are read with readMode=direct")
    if bounded and len(options.streams) != 1:
        _refuse("start", "a position is one of a single stream: give start and end with stream")
    if options.start and options.end and options.start > options.end:
        _refuse("start", f"{options.start} is behind the end, {options.end}")
    low, high = options.start_ms, options.end_ms
    if low is not None and high is not None and low > high:
        _refuse("startTime", "it is behind endTime")
    if options.keys and (low is not None or high is not None):
        _refuse("startTime", "objects by their keys are read as entries, which have no time")


def _s3(said: Mapping[str, str], s3: S3Settings) -> S3Settings:
    named = {
        "bucket": "bucket",
        "prefix": "key_prefix",
        "endpointurl": "endpoint_url",
        "region": "region",
        "accesskey": "access_key",
    }
    values: dict[str, object] = {field: said[name] for name, field in named.items() if name in said}
    for field in ("endpoint_url", "access_key"):
        if values.get(field) == "":
            values[field] = None
    if not is_endpoint(said.get("endpointurl", "")):
        _refuse("endpointUrl", f"{said['endpointurl']!r} is no address: write http://host:port")
    if "secretkey" in said:
        values["secret_key"] = SecretStr(said["secretkey"]) if said["secretkey"] else None
    pair = said.get("accesskey"), said.get("secretkey")
    # Empty ones say that there are none; one alone is an oversight.
    if (pair[0] is None) != (pair[1] is None) or bool(pair[0]) != bool(pair[1]):
        _refuse("accessKey", "accessKey and secretKey belong together")
    return s3.model_copy(update=values)


def is_endpoint(url: str) -> bool:
    """Tell whether an object store may be there, as the settings have it; empty: the SDK knows."""
    try:
        S3Settings(endpoint_url=url)
    except ValidationError:
        return False
    return True


def place_options(s3: S3Settings) -> dict[str, str]:
    """Return the options that name a bucket and how it is reached.

    What these settings have not is said too, as empty: the settings of the process that parses it
    may be of another store.
    """
    key, secret = s3.access_key, s3.secret_key
    keys = ("", "") if key is None or secret is None else (key, secret.get_secret_value())
    return {
        "bucket": s3.bucket,
        "prefix": s3.key_prefix,
        "region": s3.region,
        "endpointUrl": s3.endpoint_url or "",
        "accessKey": keys[0],
        "secretKey": keys[1],
    }


def _client(said: Mapping[str, str], client: ClientSettings) -> ClientSettings:
    if "readeraddress" not in said:
        return client
    return client.model_copy(update={"reader_http_address": said["readeraddress"]})


def _streams(said: Mapping[str, str]) -> tuple[StreamName, ...]:
    if "stream" in said and "streams" in said:
        _refuse("stream", "give stream or streams, not both")
    names = [said["stream"]] if "stream" in said else _list(said, "streams")
    return tuple(dict.fromkeys(stream_name(name) for name in names))


def _columns(said: Mapping[str, str], table: Table) -> tuple[str, ...]:
    known = tuple(TYPES[table])
    chosen = _list(said, "columns") if "columns" in said else known
    for name in chosen:
        if name not in known:
            _refuse("columns", f"there is no column {name!r}; there are {', '.join(known)}")
    if "columns" in said and "payload" in said:
        _refuse("payload", "columns says already which ones")
    if not _flag(said, "payload", default=True):
        chosen = tuple(name for name in chosen if name != PAYLOAD)
    return tuple(dict.fromkeys(chosen))


def _position(said: Mapping[str, str], name: str, edge: Edge) -> Position | None:
    if name.lower() not in said:
        return None
    found = parse_position(said[name.lower()])
    if isinstance(found, Position):
        return found
    if found is not edge:
        _refuse(name, f"it may be {edge} or LEDGER:ENTRY, and is {found}")
    return None


def _time_ms(said: Mapping[str, str], name: str) -> int | None:
    text = said.get(name.lower())
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        _refuse(name, f"{text!r} is no time: write 2026-11-01T00:00:00Z, or ms since 1970")
    if moment.tzinfo is None:
        _refuse(name, f"{text!r} has no zone: write 2026-11-01T00:00:00Z")
    # Up, since times of events are whole ms: none at or after it is before that.
    return -(-round(moment.timestamp() * 1_000_000) // 1000)


def _size(said: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = said.get(name.lower())
    if text is None:
        return default
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= size <= most:
        _refuse(name, f"{text!r} is no size from 1 to {most}: write 64m, or bytes")
    return size


def _limit(said: Mapping[str, str], name: str) -> int | None:
    return _size(said, name, 0, INT64_MAX) or None


def _flag(said: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = said.get(name.lower())
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        _refuse(name, f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _list(said: Mapping[str, str], name: str) -> tuple[str, ...]:
    if name.lower() not in said:
        return ()
    found = tuple(part.strip() for part in said[name.lower()].split(",") if part.strip())
    if not found:
        _refuse(name, "it names nothing")
    return found


def _one_of(kind: type[_E], said: Mapping[str, str], name: str, default: _E) -> _E:
    text = said.get(name.lower())
    if text is None:
        return default
    try:
        return kind(text.lower())
    except ValueError:
        _refuse(name, f"{text!r} is none of {', '.join(kind)}")


def _refuse(name: str, what: str) -> NoReturn:
    raise RefusedError(f"option {name}: {what}", remedy="See the how-to read-with-spark")


def _refuse_unknown(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, _NAMES, n=1)
    hint = f"Did you mean {_NAMES[near[0]]}?" if near else f"There are {', '.join(OPTIONS)}"
    raise RefusedError(f"there is no option {name!r} of format tierlog", remedy=hint)
