"""Chance: identities and jitter."""

from typing import Protocol
from uuid import UUID


class Ids(Protocol):
    """A source of what must differ each time; seeded in a simulation."""

    def uuid(self) -> UUID:
        """Return a fresh random UUID."""
        ...

    def uniform(self, low: float, high: float) -> float:
        """Return a random number between ``low`` and ``high``."""
        ...
