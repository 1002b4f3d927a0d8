"""Schemas of payloads: what the column ``value`` has, and which events are not of it.

Owns JSON, whose parsing Spark does (``from_json``). Does not own protobuf (``protobufs``).

Invariant: an event that is not of the schema has ``value`` null, and is counted.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import orjson
import pyarrow as pa

from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

VALUE: Final = "value"
# What Spark puts a text into that is not of the schema.
_CORRUPT: Final = "_tierlog_corrupt"
# What tells where an object ends: braces, and texts, since there may be braces in them.
_TOKENS: Final = re.compile(
    rb"""[{}]|"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'""", re.DOTALL
)
_JSON_SPACE: Final = b" \t\r\n"

Batch = Any  # pyarrow ships no types
Array = Any


class ValueSchema(Protocol):
    """One schema; pickled to tasks."""

    @property
    def what(self) -> str:
        """What a payload is to be, for people."""
        ...

    @property
    def needs_rows(self) -> bool:
        """Whether Spark itself makes something of the payloads: see ``prepared``."""
        ...

    def check(self) -> None:
        """Raise ``RefusedError`` for a schema that can't be used."""
        ...

    def prepared(self, frame: "DataFrame") -> "DataFrame":
        """Return events with what Spark makes of their payloads."""
        ...

    def values(self, batch: Batch) -> tuple[Array, Any]:
        """Return the column of values of a prepared batch, and for each row whether it is bad."""
        ...


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON objects, with fields as Spark's DDL has them: ``id BIGINT, tags ARRAY<STRING>``.

    Fields that are missing are null; fields that the schema does not have are left out. Times
    without a zone are UTC, whatever zone the session has. Spark looks at nothing behind the object,
    and takes bytes that are no UTF-8 for others: that is seen here.
    """

    ddl: str

    @property
    def what(self) -> str:
        return f"a JSON object of {self.ddl}"

    @property
    def needs_rows(self) -> bool:
        return True

    def check(self) -> None:
        self._struct()

    def _struct(self) -> "StructType":
        from pyspark.errors import ParseException  # noqa: PLC0415 - the rest needs no Spark
        from pyspark.sql.types import StructType  # noqa: PLC0415

        try:
            schema = StructType.fromDDL(self.ddl)
        except ParseException as error:
            raise RefusedError(
                f"{self.ddl!r} is no schema: {error.getCondition()}",
                remedy="Write fields with their types, as: id BIGINT, tags ARRAY<STRING>",
            ) from error
        if not isinstance(schema, StructType) or not schema.fields:
            raise RefusedError("the schema has no field", remedy="Write one, as: id BIGINT")
        return schema

    def prepared(self, frame: "DataFrame") -> "DataFrame":
        from pyspark.sql import functions as fn  # noqa: PLC0415
        from pyspark.sql.types import StringType  # noqa: PLC0415

        wanted = self._struct().add(_CORRUPT, StringType())
        how = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "timeZone": "UTC"}
        text = fn.col("payload").cast("string")
        return frame.withColumn(VALUE, fn.from_json(text, wanted, how))

    def values(self, batch: Batch) -> tuple[Array, Any]:
        column = batch.column(VALUE)
        corrupt = column.field(_CORRUPT)
        bad = np.asarray(column.is_null()) | np.asarray(corrupt.is_valid())
        payloads = batch.column("payload").to_pylist()
        bad |= [not known and _is_more(one) for known, one in zip(bad, payloads, strict=True)]
        kept = [field for field in column.type if field.name != _CORRUPT]
        arrays = [column.field(field.name) for field in kept]
        return pa.StructArray.from_arrays(arrays, fields=kept, mask=pa.array(bad)), bad


def _is_more(payload: bytes) -> bool:
    """Tell whether a payload is more than the object that Spark made a value of, or no text.

    What is one document as a whole, as most are, is not. Spark takes some for good that are not
    strictly JSON (texts in single quotes, NaN): of those the object's end is looked for.
    """
    try:
        orjson.loads(payload)
    except orjson.JSONDecodeError:
        try:
            payload.decode()
        except UnicodeDecodeError:
            return True
        return bool(payload[_object_end(payload) :].strip(_JSON_SPACE))
    return False


def _object_end(payload: bytes) -> int:
    """Return where the first object ends."""
    depth = 0
    for found in _TOKENS.finditer(payload):
        if found[0] == b"{":
            depth += 1
        elif found[0] == b"}":
            depth -= 1
            if depth == 0:
                return found.end()
    return len(payload)
