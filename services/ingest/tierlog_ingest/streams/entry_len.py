"""How long an entry may be: it has to fit a block, and a frame of the wire to other nodes."""

from tierlog.format.block import entry_len_max
from tierlog.model.errors import Reason, RefusedError


def check_entry_len(entry_len: int, block_size: int) -> None:
    """Raise TOO_LARGE for an entry that would fit no block, so that it is never in a ledger."""
    limit = entry_len_max(block_size)
    if entry_len > limit:
        raise too_large(entry_len, limit, "create the stream with a larger block size")


def too_large(entry_len: int, limit: int, otherwise: str) -> RefusedError:
    """Say that an entry is too long, and what helps besides sending smaller ones."""
    return RefusedError(
        f"an entry of {entry_len} bytes is above the limit of {limit} bytes",
        reason=Reason.TOO_LARGE,
        remedy=f"Send smaller entries, or {otherwise}",
        details={"limit": str(limit), "entry_len": str(entry_len)},
    )
