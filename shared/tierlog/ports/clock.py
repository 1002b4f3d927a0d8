"""Time. Waiting is asyncio's, whose loop a simulation replaces."""

from typing import Protocol


class Clock(Protocol):
    """Two clocks: what people call the time, and what only ever moves forward."""

    def wall_ms(self) -> int:
        """Return milliseconds since 1970; may jump either way."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since some moment; never goes back."""
        ...
