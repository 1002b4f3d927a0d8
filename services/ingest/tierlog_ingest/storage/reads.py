"""Reading runs of one ledger, whole and checked.

Owns: which runs a read brings, and how many a call of the disk. Does not own who may read what.

Invariants:
    * Runs come in order, without a gap between them, up to the bound.
    * Every run that comes off the disk was verified by its checksum, each time.
    * At least one run comes, or an error; a bad run further on ends the read before it.
    * One list of runs comes from one read of the disk.
"""

from collections.abc import AsyncIterator

import structlog

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, RetryableError, TierlogError
from tierlog_ingest.storage.ledger_file import Ledger, OpenFiles
from tierlog_ingest.storage.run_index import Place

log = structlog.get_logger()


async def read_runs(
    ledger: Ledger,
    open_files: OpenFiles,
    first_entry_id: int,
    *,
    bound: int,
    bytes_max: int,
    read_len: int,
) -> AsyncIterator[list[Run]]:
    """Iterate over the runs from the one that holds ``first_entry_id``, which must be there."""
    entry_id, brought = first_entry_id, 0
    while brought < bytes_max and entry_id <= bound:
        places = _plan(ledger, entry_id, bound=bound, len_max=min(read_len, bytes_max - brought))
        if not places:
            return
        fetched = await _fetch(ledger, open_files, places, may_stop=brought > 0)
        runs = [run for run in fetched if run is not None]
        if runs:
            brought += sum(len(run.encoded) for run in runs)
            entry_id = runs[-1].last_entry_id + 1
            yield runs
        if len(runs) < len(fetched):
            return


def _plan(ledger: Ledger, entry_id: int, *, bound: int, len_max: int) -> list[Place]:
    """Return runs without a gap that lie back to back in the file."""
    at = ledger.index.find(entry_id)
    places: list[Place] = []
    length = 0
    while at is not None and at < len(ledger.index):
        place = ledger.index[at]
        if place.first_entry_id > bound or (places and length + place.length > len_max):
            break
        if places:
            last = places[-1]
            together = last.offset + last.length == place.offset
            buffered = (last.offset in ledger.buffer) == (place.offset in ledger.buffer)
            if last.last_entry_id + 1 != place.first_entry_id or not (together and buffered):
                break
        places.append(place)
        length += place.length
        at += 1
    return places


async def _fetch(
    ledger: Ledger, open_files: OpenFiles, places: list[Place], *, may_stop: bool
) -> list[Run | None]:
    """Return the runs; None stands for the rest when one is bad and there is one before it."""
    if places[0].offset in ledger.buffer:
        return [ledger.buffer[place.offset] for place in places]
    start = places[0].offset
    length = places[-1].offset + places[-1].length - start
    runs: list[Run | None] = []
    try:
        async with open_files.use(ledger.ledger_id) as file:
            data = memoryview(await file.read(start, length))
        for place in places:
            piece = data[place.offset - start :][: place.length]
            runs.append(_decode(ledger, place, piece))
    except (TierlogError, FileNotFoundError) as error:
        log.error("run.damaged", ledger_id=ledger.ledger_id, offset=start, cause=str(error))  # noqa: TRY400
        if not runs and not may_stop:
            raise RetryableError(
                f"the node can't read entry {places[0].first_entry_id}"
                f" of ledger {ledger.ledger_id} ({error})",
                reason=Reason.UNKNOWN,
                remedy="Read another copy",
                details={"ledger_id": str(ledger.ledger_id), "offset": str(places[0].offset)},
            ) from error
        runs.append(None)
    return runs


def _decode(ledger: Ledger, place: Place, data: memoryview) -> Run:
    run = Run.decode(data)
    if (run.header.ledger_id, run.first_entry_id) != (ledger.ledger_id, place.first_entry_id):
        raise CorruptError(
            f"another run lies at byte {place.offset} of ledger {ledger.ledger_id}'s file",
            remedy="Read another copy",
        )
    return run
