"""The clock port over the event loop's time, which a simulation moves."""

import asyncio

# 2026-01-01T00:00:00Z, so that times in a failing run read as dates.
SIM_EPOCH_MS = 1_767_225_600_000


class SimClock:
    """One process's clocks. Its wall clock can be set wrong; its monotonic one can't.

    Without a running loop (in a synchronous test) time stands still, and ``advance`` moves it.
    """

    def __init__(self, *, wall_ms: int = SIM_EPOCH_MS) -> None:
        self._wall_offset_ms = wall_ms
        self._advanced_s = 0.0

    def wall_ms(self) -> int:
        return self._wall_offset_ms + round(self.monotonic_s() * 1000)

    def monotonic_s(self) -> float:
        try:
            return asyncio.get_running_loop().time() + self._advanced_s
        except RuntimeError:
            return self._advanced_s

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back when negative, as an administrator or NTP does."""
        self._wall_offset_ms += round(seconds * 1000)

    def advance(self, seconds: float) -> None:
        """Let time pass for this clock alone (timers of the loop don't notice)."""
        assert seconds >= 0, "monotonic time never goes back"
        self._advanced_s += seconds
