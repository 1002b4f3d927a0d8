"""What requests to an object store, and bytes in it, cost. Pure: no store, no clock.

Owns which requests stores charge as writes, which as reads, which not at all, as the price lists of
S3 and its like have it; and what a workload will ask for. Prices themselves are settings.

Invariant: what is said of a ledger's offload, of its copy's verifications, of its removal and of a
deep scrub is what is sent when nothing fails; tests hold it to what was counted.

What is left out: manifests, attributes, what scrubs read of both, and tries that are repeated.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

GB: Final = 10**9
DAYS_A_MONTH: Final = 30
MONTH_S: Final = DAYS_A_MONTH * 86_400.0
# What is read back of a copy at once; a test compares these with what verification does.
GRAIN_BYTES: Final = 64 * 1024
GRAINS_SAMPLED: Final = 8
READ_BACK_BYTES: Final = 4 * 1024 * 1024
LISTED_AT_ONCE: Final = 1000
OBJECTS_A_LEDGER: Final = 3
# An attempt is swept twice; its keys are those of its objects and of an export copy.
SWEEPS: Final = 2


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
class Scrubs:
    """How often a bucket is compared with the metadata in a month."""

    count: float = 0.0
    deep: float = 0.0
    """So many more of them read what is kept back, too."""
    deep_bytes_max: float = math.inf
    """What each of these reads at most; the next one goes on there."""

    @classmethod
    def every(
        cls, *, interval_s: float, deep_interval_s: float, bytes_per_s: float, deep_s_max: float
    ) -> Self:
        """Return those of a schedule; an interval of 0: there are none."""
        return cls(
            count=MONTH_S / interval_s if interval_s else 0.0,
            deep=MONTH_S / deep_interval_s if deep_interval_s else 0.0,
            deep_bytes_max=bytes_per_s * deep_s_max,
        )


NO_SCRUBS: Final = Scrubs()


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
    read_back: str = "sample"
    """How much of a copy is read before the local one goes: none, sample or full."""
    scrubs: Scrubs = NO_SCRUBS

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
        **_of("verify", verify_requests(ledger_bytes, block_bytes)),
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


def verify_requests(
    ledger_bytes: int, block_bytes: int, *, read_back: str = "none"
) -> dict[str, int]:
    """Return how often a verification of a copy sends what, by operation."""
    blocks = -(-ledger_bytes // block_bytes)
    grains = {
        "none": 0,
        "sample": min(GRAINS_SAMPLED, -(-ledger_bytes // GRAIN_BYTES)),
        "full": -(-ledger_bytes // READ_BACK_BYTES),
    }
    # Side object and index, and the headers of the first and the last block.
    return {"head_object": 1, "get_object": 2 + min(blocks, 2) + grains[read_back]}


def read_back_bytes(ledger_bytes: int, read_back: str) -> int:
    """Return how much of a copy's data a verification receives."""
    sampled = min(GRAINS_SAMPLED * GRAIN_BYTES, ledger_bytes)
    return {"none": 0, "sample": sampled, "full": ledger_bytes}[read_back]


def _of(cause: str, requests: Mapping[str, int]) -> dict[tuple[str, str], int]:
    return {(cause, operation): count for operation, count in requests.items()}


def predict(workload: Workload) -> list[Predicted]:
    """Return what a month of it asks of the store, once the stream is as long as it gets."""
    month = workload.bytes_per_day * DAYS_A_MONTH
    ledgers = month / workload.ledger_bytes
    sizes, back = (workload.ledger_bytes, workload.block_bytes), workload.read_back
    each = Counter(offload_requests(*sizes))
    # Verified is a copy twice: when it is made, and before the local one goes, read back then.
    each.update(_of("verify", verify_requests(*sizes, read_back=back)))
    each["sweep", "list_multipart_uploads"] = SWEEPS
    each["sweep", "delete_object"] = SWEEPS * (OBJECTS_A_LEDGER + 1)
    received = {("verify", "get_object"): read_back_bytes(workload.ledger_bytes, back)}
    found = [
        Predicted(
            cause=what[0],
            operation=what[1],
            requests=count * ledgers,
            received=received.get(what, 0) * ledgers,
        )
        for what, count in each.items()
    ]
    found += _scrubbed(workload)
    read = month * workload.reads
    found.append(
        Predicted(
            cause="read",
            operation="get_object",
            requests=read / workload.range_bytes,
            received=read,
        )
    )
    return found


def _scrubbed(workload: Workload) -> list[Predicted]:
    """Return what a month's scrubs ask for, deep ones as far as they get."""
    scrubs, kept = workload.scrubs, stored_bytes(workload)
    pages = math.ceil(kept / workload.ledger_bytes * OBJECTS_A_LEDGER / LISTED_AT_ONCE)
    read = scrubs.deep * min(kept, scrubs.deep_bytes_max)
    each = verify_requests(workload.ledger_bytes, workload.block_bytes, read_back="full")
    return [
        Predicted(
            cause="scrub",
            operation="list_objects_v2",
            requests=(scrubs.count + scrubs.deep) * pages,
        ),
        *(
            Predicted(
                cause="scrub",
                operation=operation,
                requests=count * read / workload.ledger_bytes,
                received=read if operation == "get_object" else 0.0,
            )
            for operation, count in each.items()
        ),
    ]


def stored_bytes(workload: Workload) -> float:
    """Return what lies in the store once the stream is as long as it gets."""
    return workload.bytes_per_day * workload.kept_days
