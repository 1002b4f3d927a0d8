"""A partitioned stream: how its partitions are named, and which one a key belongs to. Pure.

Partition ``i`` of the stream ``orders`` is the stream ``orders-partition-<i>``, as in Pulsar, and
a stream like any other: an owner, ledgers and positions of its own. The stream ``orders`` itself
says only how many there are.

    partition = big-endian u64 of the first 8 bytes of SHA-256(key), modulo the count

Invariants:
    * A key's partition depends on its bytes and the count alone, in every language and for ever.
    * The count of a stream never changes: keys would move.
"""

import hashlib
from typing import Final

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName, stream_name

PARTITIONS_MAX: Final = 1024
_MARK: Final = "-partition-"
PARTITIONS: Final = "partitions"
"""The detail of a PARTITIONED error that says how many there are."""


def partition_names(name: StreamName, count: int) -> list[StreamName]:
    """Return the names of the partitions in order, or refuse a count or a name too long."""
    if not 1 <= count <= PARTITIONS_MAX:
        raise RefusedError(
            f"a stream of {count} partitions", remedy=f"Ask for 1 to {PARTITIONS_MAX}"
        )
    return [stream_name(f"{name}{_MARK}{index}") for index in range(count)]


def whole_of(name: str) -> StreamName | None:
    """Return the stream that a partition is of, by its name; None: it is none."""
    whole, mark, index = name.rpartition(_MARK)
    return StreamName(whole) if mark and whole and index.isdecimal() else None


def partition_of(key: bytes, count: int) -> int:
    """Return the partition of a key, from 0 on."""
    assert count > 0
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % count


def is_partitioned(name: StreamName, count: int) -> RefusedError:
    """Say that a stream has partitions, and that entries are in those."""
    return RefusedError(
        f"stream {name} has {count} partitions, and no entries of its own",
        reason=Reason.PARTITIONED,
        remedy=f"Use one of {name}-partition-0 to {name}-partition-{count - 1}",
        details={"stream": name, PARTITIONS: str(count)},
    )


def count_told(error: RefusedError) -> int | None:
    """Return how many partitions an error tells of; None: it tells of something else."""
    told = error.details.get(PARTITIONS, "")
    if error.reason is not Reason.PARTITIONED or not told.isdecimal() or int(told) == 0:
        return None
    return int(told)
