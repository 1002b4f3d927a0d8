"""What bounds a read of a client, and who a client is: the same over HTTP and gRPC."""

from typing import Final

from fastapi import Request
from pydantic import BaseModel

from tierlog_reader.chunk import Budget

ENTRIES_MAX: Final = 1_000_000
WAIT_MS_MAX: Final = 600_000


class ReadLimits(BaseModel, frozen=True):
    """The most that one read gets, and how long its answer may take to be taken."""

    response_bytes_max: int
    wait_ms_max: int
    send_s_max: float = 30.0

    def budget(self, *, entries_max: int, bytes_max: int, wait_ms: int) -> Budget:
        """Return what was asked, within these limits."""
        return Budget(
            entries_max=entries_max,
            bytes_max=min(bytes_max, self.response_bytes_max),
            wait_s=min(wait_ms, self.wait_ms_max) / 1000,
        )


def client_of(request: Request, stream: str) -> tuple[str, str]:
    """Return in whose name a request takes memory: a machine's, for one stream."""
    return request.client.host if request.client is not None else "", stream
