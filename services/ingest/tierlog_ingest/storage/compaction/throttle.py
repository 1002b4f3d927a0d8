"""The token bucket of the library, in bytes: compaction and copies of others pay by it."""

from tierlog.ports import throttle
from tierlog.ports.clock import Clock


class TokenBucket(throttle.TokenBucket):
    """So many bytes a second, a burst at once."""

    def __init__(self, clock: Clock, *, bytes_per_s: float, burst_bytes: int = 0) -> None:
        super().__init__(clock, per_s=bytes_per_s, burst=burst_bytes)
