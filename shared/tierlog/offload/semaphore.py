"""Room for so many at once: a semaphore of which each holder takes several, in the order of asking.

Owns who has room and who waits for it. Does not own what it is for.

Invariants:
    * ``taken <= room_max``. Who waits has none, so that nobody waits for whoever waits.
    * Who asks for much is not passed by those who ask for little.
    * Who is cancelled while it waits leaves no trace.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable


class WeightedSemaphore:
    """Room for so many at once, of which each takes as much as it asks for.

    ``on_taken`` is called when some was taken, before whoever has it goes on.
    """

    def __init__(self, room_max: int, on_taken: Callable[[], None] = lambda: None) -> None:
        assert room_max > 0
        self._room_max = room_max
        self._on_taken = on_taken
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.taken = 0

    def __repr__(self) -> str:
        taken = f"{self.taken} of {self._room_max} taken"
        return f"<WeightedSemaphore {taken}, {len(self._waiting)} waiting>"

    @contextlib.asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Give room for the length of the context, once it is there."""
        assert 0 < size <= self._room_max, "it would wait for ever"
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.cancel() or granted.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove((size, granted))
            else:
                self.taken -= size
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, granted = self._waiting[0]
            if not granted.cancelled() and self.taken + size > self._room_max:
                return
            self._waiting.popleft()
            if not granted.cancelled():
                self.taken += size
                self._on_taken()
                granted.set_result(None)
