"""Writes down what clients asked of attributes and were told (docs/reference/histories.md).

Owns the lines of updates and gets. Does not own what is asked when (``attribute_life``).

Invariants: as in ``recorder``; an update whose check failed was answered, and tells what was found.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tierlog.format.entry import AttributeUpdate, Verb
from tierlog.model.errors import Reason, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.histories.recorder import History
    from tierlog.client.attributes import StreamAttributes

OPERATION_S_MAX: Final = 12.0
"""Whoever waits longer knows nothing."""


class RecordedAttributes:
    """The part of ``StreamAttributes`` that a history tells of, for one numbered client."""

    def __init__(self, attributes: StreamAttributes, history: History, *, number: int) -> None:
        self._attributes = attributes
        self._history = history
        self.number = number

    async def update(self, updates: Sequence[AttributeUpdate]) -> Mapping[UUID, int | None] | None:
        """Make all updates or none; return what was in the way, None: they are made."""
        asked = [line_of(one) for one in updates]
        with self._history.operation("update", self.number, updates=asked) as told:
            try:
                async with asyncio.timeout(OPERATION_S_MAX):
                    await self._attributes.update(updates)
            except RefusedError as error:
                found = found_by(error)
                if found is None:
                    raise
                told["found"] = register_of(*found)
                return dict([found])
        return None

    async def get(self, keys: Sequence[UUID]) -> Mapping[UUID, int | None]:
        """Read attributes, all as of one moment."""
        asked = [register_of(key, None) for key in keys]
        with self._history.operation("get", self.number, registers=asked) as told:
            async with asyncio.timeout(OPERATION_S_MAX):
                found = await self._attributes.get(keys)
            told["registers"] = [register_of(key, found.get(key)) for key in keys]
        return {key: found.get(key) for key in keys}


def line_of(update: AttributeUpdate) -> dict[str, Any]:
    """Return how a history has an update."""
    line = {"key": str(update.key), "verb": verb_name(update.verb), "value": update.value}
    if update.verb is Verb.REPLACE_IF_EQUALS:
        line["expected"] = update.expected
    return line


def verb_name(verb: Verb) -> str:
    """Return how a history has a verb."""
    return verb.name.lower().replace("_", "-")


def register_of(key: UUID, value: int | None) -> dict[str, Any]:
    """Return how a history has an attribute."""
    return {"key": str(key), "value": value}


def found_by(error: RefusedError) -> tuple[UUID, int | None] | None:
    """Read which attribute was in the way; None: the error is of another kind."""
    if error.reason is not Reason.CONDITIONAL_APPEND_FAILED:
        return None
    value = error.details.get("value")
    return UUID(error.details["key"]), None if value is None else int(value)
