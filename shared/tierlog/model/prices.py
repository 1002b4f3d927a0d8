"""What requests to an object store, and bytes in it, cost. Pure: no store, no clock.

Owns which requests stores charge as writes, which as reads, which not at all, as the price lists of
S3 and its like have it; and what a workload will ask for. Prices themselves are settings.

Invariant: ``offload_requests`` and ``single_requests`` say what the offloader sends for a ledger
when nothing fails; a test holds them to what was counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

GB: Final = 10**9
DAYS_A_MONTH: Final = 30


class PriceClass(StrEnum):
    """How a store charges a request."""

    WRITE = "write"
    READ = "read"
    FREE = "free"


CLASSES: Final[Mapping[str, PriceClass]] = {
    "abort_multipart_upload": PriceClass.FREE,
    "complete_multipart_upload": PriceClass.WRITE,
    "create_bucket": PriceClass.WRITE,
    "create_multipart_upload": PriceClass.WRITE,
    "delete_object": PriceClass.FREE,
    "get_object": PriceClass.READ,
    "head_bucket": PriceClass.READ,
    "head_object": PriceClass.READ,
    # Listings are charged as writes.
    "list_multipart_uploads": PriceClass.WRITE,
    "list_objects_v2": PriceClass.WRITE,
    "put_object": PriceClass.WRITE,
    "upload_part": PriceClass.WRITE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A price list. Bytes are in GB of 10^9, months have 30 days."""

    write_per_1000: float
    read_per_1000: float
    received_per_gb: float
    stored_per_gb_month: float

    def of_requests(self, operation: str, requests: float, *, received: float = 0) -> float:
        """Return what so many requests cost, and the bytes that they brought."""
        each = {
            PriceClass.WRITE: self.write_per_1000 / 1000,
            PriceClass.READ: self.read_per_1000 / 1000,
            PriceClass.FREE: 0.0,
        }
        # What is not in the list costs the most that it can.
        kind = CLASSES.get(operation, PriceClass.WRITE)
        return requests * each[kind] + received / GB * self.received_per_gb


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a stream does, and how."""

    bytes_per_day: float
    ledger_bytes: int
    block_bytes: int
    range_bytes: int
    reads: float
    """How often each byte is read from tier 2."""
    kept_days: float

    def __post_init__(self) -> None:
        assert min(self.ledger_bytes, self.block_bytes, self.range_bytes) > 0, "sizes are positive"
        assert min(self.bytes_per_day, self.reads, self.kept_days) >= 0, "nothing is negative"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What one operation comes to in a month."""

    cause: str
    operation: str
    requests: float
    received: float = 0.0


def offload_requests(ledger_bytes: int, block_bytes: int) -> dict[tuple[str, str], int]:
    """Return how often the offloader sends what for one ledger, by cause and operation."""
    blocks = -(-ledger_bytes // block_bytes)
    return {
        ("offload", "create_multipart_upload"): 1,
        ("offload", "upload_part"): blocks,
        ("offload", "complete_multipart_upload"): 1,
        ("offload", "list_multipart_uploads"): 1,
        # Side object and index.
        ("offload", "put_object"): 2,
        ("verify", "head_object"): 1,
        # Both of them, and the headers of the first and the last block.
        ("verify", "get_object"): 2 + min(blocks, 2),
    }


def single_requests(block_count: int) -> dict[tuple[str, str], int]:
    """Return the same for a ledger whose copy is a single object: its index is a part of it."""
    return {
        ("offload", "create_multipart_upload"): 1,
        ("offload", "upload_part"): block_count + 1,
        ("offload", "complete_multipart_upload"): 1,
        ("offload", "list_multipart_uploads"): 1,
        # How many parts it has, and how long its index is.
        ("verify", "head_object"): 2,
        ("verify", "get_object"): 1 + min(block_count, 2),
    }


def predict(workload: Workload) -> list[Predicted]:
    """Return what a month of it asks of the store, once the stream is as long as it gets."""
    month = workload.bytes_per_day * DAYS_A_MONTH
    ledgers = month / workload.ledger_bytes
    each = offload_requests(workload.ledger_bytes, workload.block_bytes)
    found = [
        # Verified is a copy twice: when it is made, and before the local one goes.
        Predicted(
            cause=cause,
            operation=operation,
            requests=count * ledgers * (2 if cause == "verify" else 1),
        )
        for (cause, operation), count in each.items()
    ]
    read = month * workload.reads
    found.append(
        Predicted(
            cause="read",
            operation="get_object",
            requests=read / workload.range_bytes,
            received=read,
        )
    )
    found.append(Predicted(cause="sweep", operation="delete_object", requests=3 * ledgers))
    return found


def stored_bytes(workload: Workload) -> float:
    """Return what lies in the store once the stream is as long as it gets."""
    return workload.bytes_per_day * workload.kept_days
