"""Which entries of a ledger a node holds: what its index and its write buffer say, as ranges.

Does not own whether the runs behind them can be read: who reads them finds out.

Invariant: an entry that is held all the while is in the answer, also when it moves from the buffer
to a log meanwhile: the buffer is looked at first, and a run leaves it only after the index has it.
"""

from collections.abc import Awaitable, Callable

import numpy as np

from tierlog.model.ids import EntryId
from tierlog.model.spans import Spans, union
from tierlog_ingest.storage.index.index_format import SLOTS_PER_PAGE
from tierlog_ingest.storage.store import Slots


async def held_spans(
    buffered: Spans, last_entry_id: EntryId, read_slots: Callable[[int, int], Awaitable[Slots]]
) -> Spans:
    """Return the ranges of entries that are ``buffered`` or have a slot, in order."""
    indexed: Spans = []
    entry_id = 0
    while entry_id <= last_entry_id:
        slots = await read_slots(entry_id, SLOTS_PER_PAGE)
        here = np.flatnonzero(slots)
        if here.size:
            breaks = np.flatnonzero(np.diff(here) > 1)
            firsts = here[np.concatenate(([0], breaks + 1))] + entry_id
            lasts = here[np.concatenate((breaks, [here.size - 1]))] + entry_id
            indexed += [
                (EntryId(first), EntryId(last))
                for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
            ]
        entry_id += len(slots)
    return union([*buffered, *indexed])
