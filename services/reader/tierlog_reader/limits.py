"""What bounds a read of a client, and who a client is: the same over HTTP and gRPC."""

from typing import Final

from fastapi import Request
from pydantic import BaseModel

from tierlog_reader.chunk import Budget

ENTRIES_MAX: Final = 1_000_000
WAIT_MS_MAX: Final = 600_000
FOLLOWED_MS_MIN: Final = 1_000
"""A call that follows reads again at once: so long it waits each time, however short reads may."""


class ReadLimits(BaseModel, frozen=True):
    """The most that one read gets, and how long its answer may take to be taken."""

    response_bytes_max: int
    wait_ms_max: int
    send_s_max: float = 30.0

    def budget(
        self, *, entries_max: int, bytes_max: int, wait_ms: int, following: bool = False
    ) -> Budget:
        """Return what was asked, within these limits; ``following``: it is one read of many."""
        wait_ms_max = max(self.wait_ms_max, FOLLOWED_MS_MIN) if following else self.wait_ms_max
        return Budget(
            entries_max=entries_max,
            bytes_max=min(bytes_max, self.response_bytes_max),
            wait_s=min(wait_ms, wait_ms_max) / 1000,
        )


def client_of(request: Request, stream: str) -> tuple[str, str]:
    """Return in whose name a request takes memory: a machine's, for one stream."""
    return request.client.host if request.client is not None else "", stream
