"""A protobuf record of the metadata as a value: what every one of them is checked for.

Invariant: a version that is not in the gate is ``RefusedError``; bytes that make no value are
``CorruptError``; no other error is raised.
"""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from tierlog.format.checksum import Buffer
from tierlog.format.versions import Format, check_version
from tierlog.model.errors import CorruptError, RefusedError

_Record = TypeVar("_Record", bound=Message)
_Value = TypeVar("_Value")


def decoded(
    record: _Record, data: Buffer, kind: Format, value_of: Callable[[_Record], _Value]
) -> _Value:
    """Read ``data`` into an empty record, and return the value of that."""
    name = kind.name.lower().replace("_", " ")
    try:
        record.ParseFromString(bytes(data))
    except DecodeError as error:
        raise CorruptError(
            f"{name} of {len(data)} bytes can't be read", remedy="Restore the metadata"
        ) from error
    check_version(kind, record.version)  # type: ignore[attr-defined]
    try:
        return value_of(record)
    except (RefusedError, ValueError, AssertionError) as error:
        # The values' own checks: what can't be a value was not written by us.
        raise CorruptError(
            f"{name} makes no sense ({error})", remedy="Restore the metadata"
        ) from error
