"""Payloads that are protobuf messages, by a file of descriptors.

    double float bool string bytes     as they are
    int32 sint32 sfixed32              int
    int64 sint64 sfixed64              bigint
    uint32 fixed32                     bigint
    uint64 fixed64                     decimal(20, 0)
    enum                               its value's name; its number where it has none
    google.protobuf.Timestamp          timestamp
    message                            struct; one without fields is left out
    repeated, map                      array, map

Spark's own ``from_protobuf`` needs a jar that PySpark does not bring.
A field that knows whether it was set is null when it was not; all others have their default.
A message with a value that its column can't hold is bad, as one that can't be parsed: a timestamp
beyond 64 bits of microseconds, a string of proto2 that is no UTF-8.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TIMESTAMP: Final = "google.protobuf.Timestamp"
_US_A_S: Final = 1_000_000
_NS_A_US: Final = 1000
_UNHOLDABLE: Final = (OverflowError, pa.ArrowInvalid)

Kind = Any  # pyarrow ships no types
Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:  # noqa: ANN401 - as protobuf has it
    return value


_SCALARS: Final[Mapping[int, tuple[Kind, Convert]]] = {
    FieldDescriptor.TYPE_DOUBLE: (pa.float64(), _same),
    FieldDescriptor.TYPE_FLOAT: (pa.float32(), _same),
    FieldDescriptor.TYPE_INT32: (pa.int32(), _same),
    FieldDescriptor.TYPE_SINT32: (pa.int32(), _same),
    FieldDescriptor.TYPE_SFIXED32: (pa.int32(), _same),
    FieldDescriptor.TYPE_INT64: (pa.int64(), _same),
    FieldDescriptor.TYPE_SINT64: (pa.int64(), _same),
    FieldDescriptor.TYPE_SFIXED64: (pa.int64(), _same),
    FieldDescriptor.TYPE_UINT32: (pa.int64(), _same),
    FieldDescriptor.TYPE_FIXED32: (pa.int64(), _same),
    FieldDescriptor.TYPE_UINT64: (pa.decimal128(20, 0), Decimal),
    FieldDescriptor.TYPE_FIXED64: (pa.decimal128(20, 0), Decimal),
    FieldDescriptor.TYPE_BOOL: (pa.bool_(), _same),
    FieldDescriptor.TYPE_STRING: (pa.string(), _same),
    FieldDescriptor.TYPE_BYTES: (pa.binary(), _same),
}


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    """Messages of one type; ``descriptors`` as of protoc --descriptor_set_out --include_imports."""

    descriptors: bytes = field(repr=False)
    message: str

    @property
    def what(self) -> str:
        return f"a protobuf message {self.message}"

    @property
    def needs_rows(self) -> bool:
        """Not: tasks take messages apart."""
        return False

    def check(self) -> None:
        """Raise ``RefusedError`` for a schema that can't be used."""
        _loaded(self)

    def prepared(self, frame: "DataFrame") -> "DataFrame":
        """Return events as they are: tasks take messages apart."""
        return frame

    def values(self, batch: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return the messages as structs, and for each row whether it is bad."""
        parse, kind, convert = _loaded(self)
        payloads = batch.column("payload").to_pylist()
        bad = np.zeros(len(payloads), np.bool_)
        rows: list[Any] = []
        for row, payload in enumerate(payloads):
            try:
                rows.append(convert(parse(payload)))
            except DecodeError:
                rows.append(None)
                bad[row] = True
        return _array(rows, kind, bad), bad


def _array(rows: list[Any], kind: Kind, bad: NDArray[np.bool_]) -> Any:  # noqa: ANN401
    """Return rows as a column; those that it can't hold become null, and are bad."""
    try:
        return pa.array(rows, kind)
    except _UNHOLDABLE:
        # It does not say which one, and seldom is there one.
        for row, value in enumerate(rows):
            try:
                pa.array([value], kind)
            except _UNHOLDABLE:
                rows[row], bad[row] = None, True
        return pa.array(rows, kind)


@functools.cache
def _loaded(schema: ProtobufSchema) -> tuple[Convert, Kind, Convert]:
    """Return what parses a message, its type, and what makes a row of one."""
    pool = DescriptorPool()
    try:
        for file in FileDescriptorSet.FromString(schema.descriptors).file:
            pool.Add(file)
        descriptor = pool.FindMessageTypeByName(schema.message)
    except (DecodeError, TypeError) as error:
        raise RefusedError(
            f"the file of descriptors can't be used: {error}",
            remedy="Make it with: protoc --include_imports --descriptor_set_out=FILE …",
        ) from error
    except KeyError as error:
        raise RefusedError(
            f"the file of descriptors has no message {schema.message}",
            remedy="Write its full name, as: shop.v1.Order",
        ) from error
    kind, convert = _struct(descriptor, ())
    if kind is None:
        raise RefusedError(
            f"message {schema.message} has no field", remedy="Name a message that has fields"
        )
    return GetMessageClass(descriptor).FromString, kind, convert


def _struct(descriptor: Descriptor, above: tuple[str, ...]) -> tuple[Kind, Convert]:
    """Return the type of a message and what makes a row of one; None: it has no field."""
    name = descriptor.full_name
    if name in above:
        raise RefusedError(
            f"message {name} holds itself: {' in '.join((name, *reversed(above)))}",
            remedy="A table has no column of that kind; export without a schema",
        )
    fields: list[Any] = []
    getters: list[tuple[str, Convert]] = []
    for one in descriptor.fields:
        kind, get = _field(one, (*above, name))
        if kind is not None:
            fields.append(pa.field(one.name, kind))
            getters.append((one.name, get))
    if not fields:
        return None, _same
    return pa.struct(fields), lambda message: {key: get(message) for key, get in getters}


def _field(one: FieldDescriptor, above: tuple[str, ...]) -> tuple[Kind, Convert]:
    """Return the type of a field and what takes it out of its message."""
    name, entry = one.name, one.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, of_key = _single(entry.fields_by_name["key"], above)
        value, of_value = _single(entry.fields_by_name["value"], above)
        if value is None:
            return None, _same
        return pa.map_(key, value), lambda message: [
            (of_key(at), of_value(found)) for at, found in getattr(message, name).items()
        ]
    kind, convert = _single(one, above)
    if kind is None:
        return None, _same
    if one.is_repeated:
        return pa.list_(kind), lambda message: [convert(item) for item in getattr(message, name)]
    if one.has_presence:
        return (
            kind,
            lambda message: convert(getattr(message, name)) if message.HasField(name) else None,
        )
    return kind, lambda message: convert(getattr(message, name))


def _single(one: FieldDescriptor, above: tuple[str, ...]) -> tuple[Kind, Convert]:
    """Return the type of one value of a field and what makes it of protobuf's."""
    scalar = _SCALARS.get(one.type)
    if scalar is not None:
        return scalar
    if one.enum_type is not None:
        names = {value.number: value.name for value in one.enum_type.values}
        return pa.string(), lambda number: names.get(number, str(number))
    assert one.message_type is not None, "groups are messages, too"
    if one.message_type.full_name == _TIMESTAMP:
        return pa.timestamp("us", "UTC"), lambda at: at.seconds * _US_A_S + at.nanos // _NS_A_US
    return _struct(one.message_type, above)
