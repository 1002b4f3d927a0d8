"""What a user may say of a write, checked (pure but for the settings of the process).

Owns the options and what is wrong with them. Names don't care about case, as in Spark; what is
not said comes from the settings of the driver's process (``TIERLOG_…``).

Invariant: an option that is not known, or makes no sense, is ``RefusedError`` with its name.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from uuid import UUID, uuid5

from tierlog.model.attributes import VALUE_MAX, is_core
from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName, stream_name
from tierlog.runtime.settings import Settings
from tierlog_spark.shipping import shipped

MIB: Final = 1024 * 1024
ENTRY_BYTES_MAX: Final = 4 * MIB

OPTIONS: Final[Mapping[str, str]] = {
    "stream": "the stream's name",
    "writerId": "of a batch write: a name of your own for whoever writes; else each is another",
    "batchId": "of a batch write with a writerId: its number, from 0, higher than the one before",
    "entryBytes": "how many bytes of events make an entry, about; else client.batch_bytes",
    "ledgerKeyId": "the key that signs what is written, where ledgers of the cluster are signed",
    "ingestAddress": "host:port of the gRPC of ingest nodes; else client.ingest_address",
    "zookeeperHosts": "host:port of ZooKeeper, with its root; else zookeeper.hosts",
}
# Spark hands over what is its own, too.
_OF_SPARK: Final = frozenset({"checkpointlocation", "path"})
_NAMES: Final = {name.lower(): name for name in OPTIONS}
# Names of writers that are no UUIDs are made to some in this namespace.
_NAMESPACE: Final = UUID("6f2f1a0e-8a5d-5d0c-9a53-6a1c2b7d4e10")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """One write. ``number``: of a batch write whose writer is named; from 1."""

    settings: Settings
    stream: StreamName
    writer_id: UUID | None
    number: int | None
    entry_bytes: int
    key_id: str | None


def parse_write_options(
    given: Mapping[str, str], settings: Settings, *, streaming: bool
) -> WriteOptions:
    """Return what was said, or raise ``RefusedError``."""
    said = {name.lower(): str(value).strip() for name, value in given.items()}
    for name in said:
        if name not in _NAMES and name not in _OF_SPARK:
            _refuse_unknown(name)
    if "stream" not in said:
        _refuse("stream", "say which stream to write into")
    # What save("x") and start("x") make of x: who says it means that the rows go there.
    if said.get("path", said["stream"]) != said["stream"]:
        _refuse("path", f"{said['path']!r} is not stream {said['stream']}, which the rows go to")
    options = WriteOptions(
        settings=_settings(said, settings),
        stream=stream_name(said["stream"]),
        writer_id=writer_of(said["writerid"]) if "writerid" in said else None,
        number=_number(said),
        entry_bytes=_entry_bytes(said, settings.client.batch_bytes),
        key_id=said.get("ledgerkeyid"),
    )
    if streaming and (options.writer_id is not None or options.number is not None):
        # Another checkpoint would begin at batch 0, and all of it be passed over.
        _refuse("writerId", "a streaming query is a writer itself, and numbers its batches")
    if (options.writer_id is None) != (options.number is None):
        _refuse("batchId", "writerId and batchId belong together: one write is one number")
    return options


def writer_of(text: str) -> UUID:
    """Return a writer's id: a UUID as it is, any other name as one that is always the same."""
    try:
        found = UUID(text)
    except ValueError:
        if not text:
            _refuse("writerId", "it is empty")
        return uuid5(_NAMESPACE, text)
    if is_core(found.bytes):
        _refuse("writerId", f"{found} is one of Tierlog's own attributes")
    return found


def number_of(batch_id: int) -> int:
    """Return the number that a stream has of a writer once a batch is there; 0 is none."""
    return batch_id + 1


def _settings(said: Mapping[str, str], settings: Settings) -> Settings:
    changes: dict[str, Any] = {}
    if "ingestaddress" in said:
        client = {"ingest_address": said["ingestaddress"]}
        changes["client"] = settings.client.model_copy(update=client)
    if "zookeeperhosts" in said:
        hosts = {"hosts": said["zookeeperhosts"]}
        changes["zookeeper"] = settings.zookeeper.model_copy(update=hosts)
    used = shipped(settings, "zookeeper", "security", "keys", "wire")
    return used.model_copy(update=changes)


def _number(said: Mapping[str, str]) -> int | None:
    text = said.get("batchid")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) >= VALUE_MAX:
        _refuse("batchId", f"{text!r} is no number from 0")
    return number_of(int(text))


def _entry_bytes(said: Mapping[str, str], default: int) -> int:
    text = said.get("entrybytes")
    if text is None:
        return min(default, ENTRY_BYTES_MAX)
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= ENTRY_BYTES_MAX:
        _refuse("entryBytes", f"{text!r} is no number of bytes from 1 to {ENTRY_BYTES_MAX}")
    return int(text)


def _refuse(name: str, what: str) -> NoReturn:
    raise RefusedError(f"option {name}: {what}", remedy="See the how-to write-with-spark")


def _refuse_unknown(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, _NAMES, n=1)
    hint = f"Did you mean {_NAMES[near[0]]}?" if near else f"There are {', '.join(OPTIONS)}"
    raise RefusedError(f"there is no option {name!r} for a write of format tierlog", remedy=hint)
