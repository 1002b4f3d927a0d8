"""A cache that processes share (Redis). Holds only what can be recomputed; never fails a call."""

from typing import Protocol


class SharedCache(Protocol):
    """Misses when in doubt: an unreachable or poisoned cache is an empty one."""

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None on a miss or on any trouble."""
        ...

    async def put(self, key: str, value: bytes, *, ttl_s: int) -> None:
        """Keep the value for a while, if possible."""
        ...

    async def drop(self, key: str) -> None:
        """Let nobody have the value any more, if possible: it is of no use."""
        ...

    async def close(self) -> None:
        """Give the connection back."""
        ...
