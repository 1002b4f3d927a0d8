"""The cache port in memory: one shared cache, any number of clients of it."""

from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.clock import Clock


class MemoryCache:
    """The cache that all clients share; ``values`` may be looked at, and spoilt, by a test."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.values: dict[str, tuple[bytes, float]] = {}

    def connect(self, faults: Faults | None = None) -> "MemoryCacheClient":
        """Return a client that suffers ``faults``."""
        return MemoryCacheClient(self, faults or no_faults())

    def get(self, key: str) -> bytes | None:
        value, end_s = self.values.get(key, (None, 0.0))
        return value if end_s > self._clock.monotonic_s() else None

    def put(self, key: str, value: bytes, ttl_s: int) -> None:
        self.values[key] = (value, self._clock.monotonic_s() + ttl_s)


class MemoryCacheClient:
    """One client: the port. Every trouble is a miss."""

    def __init__(self, cache: MemoryCache, faults: Faults) -> None:
        self._cache = cache
        self.faults = faults

    async def get(self, key: str) -> bytes | None:
        try:
            return await self.faults.call("cache.get", lambda: self._cache.get(key), changes=False)
        except RetryableError:
            return None

    async def put(self, key: str, value: bytes, *, ttl_s: int) -> None:
        try:
            await self.faults.call(
                "cache.put", lambda: self._cache.put(key, bytes(value), ttl_s), changes=True
            )
        except (RetryableError, IndeterminateError):
            return

    async def drop(self, key: str) -> None:
        try:
            await self.faults.call(
                "cache.drop", lambda: self._cache.values.pop(key, None), changes=True
            )
        except (RetryableError, IndeterminateError):
            return

    async def close(self) -> None:
        """Nothing is held."""


class NoCache:
    """A cache that never has anything, where none is set up."""

    async def get(self, key: str) -> bytes | None:
        del key
        return None

    async def put(self, key: str, value: bytes, *, ttl_s: int) -> None:
        """Forget it at once."""

    async def drop(self, key: str) -> None:
        """There is nothing to drop."""

    async def close(self) -> None:
        """Nothing is held."""
