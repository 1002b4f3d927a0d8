"""Kafka's messages as events, whatever strangers put into them."""

from operator import methodcaller
from typing import Any, Final

from confluent_kafka import Message

from tierlog.adapters.kafka.common import log
from tierlog.ports.events import Event

_headers_of: Final = methodcaller("headers")
"""The library returns a list with a hole, and its error pending, where a name is not UTF-8. A call
from Python's own bytecode does not look for that once it was specialised, and the hole ends the
process; this one always does, and raises SystemError."""


def event_of(message: Message, *, receipt: object = None) -> Event:
    """Return a message without error as an event.

    One whose headers can't be read has none: whoever parses it finds that, and puts it aside.
    """
    return Event(
        topic=str(message.topic()),
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=_headers(message),
        receipt=receipt,
    )


def number(value: int | None) -> int:
    """Return a part of the place of a delivered message."""
    assert value is not None, "a delivered message has a place"
    return value


def _bytes(value: Any) -> bytes:  # noqa: ANN401 - str, bytes or None, says the library
    if isinstance(value, str):
        return value.encode()
    return b"" if value is None else bytes(value)


def _headers(message: Message) -> dict[str, bytes]:
    try:
        headers: Any = _headers_of(message)
    except (SystemError, UnicodeDecodeError) as error:
        # The library fails so on a name that is not UTF-8, which Kafka itself takes.
        log.warning("event.headers_unreadable", topic=message.topic(), cause=str(error))
        return {}
    return {name: _bytes(value) for name, value in headers or ()}
