"""The columns of the data source's tables, by name and type.

Owns names and types. Does not own what fills them.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Table(StrEnum):
    """What there is to read."""

    EVENTS = "events"
    STREAMS = "streams"
    LEDGERS = "ledgers"
    ATTEMPTS = "attempts"
    ATTRIBUTES = "attributes"


PAYLOAD: Final = "payload"

TYPES: Final[Mapping[Table, Mapping[str, str]]] = {
    Table.EVENTS: {
        "stream": "string",
        "ledger_id": "bigint",
        "entry_id": "bigint",
        "event_index": "int",
        "publish_time": "timestamp",
        "writer_id": "string",
        "event_number": "bigint",
        "event_time": "timestamp",
        "key": "binary",
        "properties": "map<string,string>",
        PAYLOAD: "binary",
    },
    Table.STREAMS: {
        "stream": "string",
        "incarnation": "string",
        "created": "timestamp",
        "lifecycle": "string",
        "raw": "boolean",
        "partitions": "int",
        "trimmed_through": "bigint",
        "ledgers": "int",
        "ledgers_copied": "int",
        "entries": "bigint",
        "bytes": "bigint",
        "generation": "bigint",
        "written": "timestamp",
    },
    Table.LEDGERS: {
        "stream": "string",
        "ledger_id": "bigint",
        "entries": "bigint",
        "bytes": "bigint",
        "opened": "timestamp",
        "closed": "timestamp",
        "attempt": "string",
        "completed": "timestamp",
        "data_object": "string",
        "data_bytes": "bigint",
        "blocks": "int",
        "verified": "boolean",
    },
    Table.ATTEMPTS: {
        "attempt": "string",
        "ledger_id": "bigint",
        "stream": "string",
        "is_copy": "boolean",
        "objects": "array<string>",
        "bytes": "bigint",
        "modified": "timestamp",
    },
    Table.ATTRIBUTES: {
        "stream": "string",
        "key": "string",
        "name": "string",
        "value": "bigint",
        "as_of_ledger_id": "bigint",
        "as_of_entry_id": "bigint",
    },
}
"""Types as Spark's DDL has them. ``verified``: a side object has checksums of all its bytes.

``key`` of an attribute is a writer's id, or another UUID; ``name`` is that of a core attribute.
"""
