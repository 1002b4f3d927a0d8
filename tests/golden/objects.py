"""How a ledger becomes objects, in the fewest lines: what an offloader does, without its I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from tierlog.format.block import BlockBuilder, block_len_for_remaining
from tierlog.format.frame import pack_entries
from tierlog.format.index import IndexEntry, ObjectIndex
from tierlog.format.run import Run, cut_runs
from tierlog.model.ids import EntryId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment


class Objects(NamedTuple):
    """The blocks of a data object, and its index."""

    blocks: list[bytes]
    object_index: ObjectIndex


def runs_of(entries: Sequence[bytes], *, run_bytes_max: int = 65536) -> list[Run]:
    """Cut entries into the runs of ledger 7."""
    frames, offsets = pack_entries(entries)
    return cut_runs(
        frames,
        offsets,
        ledger_id=7,
        first_entry_id=0,
        last_add_confirmed=-1,
        owner_epoch=1,
        run_bytes_max=run_bytes_max,
        stripe_entries=10**9,
    )


def closed_ledger(*, last_entry_id: int, length: int) -> LedgerMetadata:
    """Return the metadata of a closed ledger on one node."""
    return LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=(NodeId("node-1"),)),),
        state=LedgerState.CLOSED,
        last_entry_id=EntryId(last_entry_id),
        length=length,
    )


def offload(entries: Sequence[bytes], block_size: int, *, run_bytes_max: int = 65536) -> Objects:
    """Fill blocks with runs as the offloader does."""
    runs = iter(runs_of(entries, run_bytes_max=run_bytes_max))
    run, number, written = next(runs), 0, 0
    length, count = sum(map(len, entries)), len(entries)
    blocks: list[bytes] = []
    mappings, offset = [], 0
    while number < count:
        block_len = block_len_for_remaining(
            block_size, payload_left=length - written, entries_left=count - number
        )
        builder = BlockBuilder(block_len, number)
        mappings.append(
            IndexEntry(first_entry_id=EntryId(number), part_number=len(blocks) + 1, offset=offset)
        )
        while number < count and not builder.full:
            number = builder.take(run, number)
            if number > run.last_entry_id and number < count:
                run = next(runs)
        written += builder.payload_len
        offset += block_len
        blocks.append(b"".join(builder.finish()))
    index = ObjectIndex(
        data_len=offset,
        metadata=closed_ledger(last_entry_id=count - 1, length=length),
        entries=tuple(mappings),
    )
    return Objects(blocks, index)
