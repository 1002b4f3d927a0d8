"""What the streaming cache says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """How full the cache is, in bytes."""

    stored: int
    """What was put in."""
    used: int
    """Whole blocks of entries."""
    touched: int
    """Whole buffers that have been used, metadata included: what the process may have resident."""
    bytes_max: int
    entries: int
