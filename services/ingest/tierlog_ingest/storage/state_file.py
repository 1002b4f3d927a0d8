"""What a node keeps beside journal, logs and indexes: the mark and what holds at it. One file.

    offset  size  field
         0     4  magic             "TLND"
         4     4  version           3
         8     8  generation        counts up with each writing
        16     8  mark_segment      the journal is replayed from this position on
        24     8  mark_offset
        32     8  limbo_ceiling     ledgers up to this id may lack entries; -1: none
        40     4  directory         which of the node's directories this is: 0, 1, …
        44     4  directory_count
        48     4  fence_count
        52     4  freed_count
        56     4  doubtful_count
        60     4  unfinished_count
        64     4  log_count
        68     4  map_count
        72     8  next_id           every ledger id below it was given, as far as the node saw
        80     8  tally             the node's tally in the metadata store had this version; -1
        88     8  trusted_to        ledgers held up to this id prove nothing against the store; -1
        96     8  behind_at         the store's next id when it was found behind; -1: it never was
       104     …  fences            fence_count x ledger_id 8, ascending
         …     …  freed             freed_count x (first 8, last 8), ascending, apart
         …     …  doubtful          doubtful_count x ledger_id 8: they may lack entries
         …     …  unfinished        unfinished_count x ledger_id 8: the index must be built anew
         …     …  logs              log_count x (directory 4, flags 4, log_id 8, length 8)
         …     …  maps              map_count x (log_id 8, ledger_id 8, bytes 8), of unsealed logs
         …     4  crc32c            over all before

Integers are big-endian; ids, lengths and positions signed, the checksum and counts unsigned.
``logs`` are those of all directories: one directory that lost its file loses no other's logs. A
log's flags: 1 sealed, 2 unsettled (compaction was under way: its map tells nothing of live runs).
Version 2, which is read and never written, has nothing between 72 and 104: no id was seen.

Owns: the file in each directory, replaced atomically, and which of several holds. Does not own
when it is written (``marking``).

Invariants:
    * All directories' files are written before anything that an older one needs is removed. So
      each of them holds by itself, and the oldest is taken: its mark is the lowest.
    * The generation never goes back, nor does the mark.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import crc32c
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.ports.files import Files
from tierlog_ingest.storage.entrylog.entry_log import LogLength
from tierlog_ingest.storage.entrylog.ledger_map import LedgerMap
from tierlog_ingest.storage.journal.format import JournalPosition
from tierlog_ingest.storage.seen_ids import NOTHING_SEEN, SeenIds

STATE_PATH: Final = "state"
_TEMPORARY_PATH: Final = "state.new"
_MAGIC: Final = b"TLND"
_HEADER: Final = Struct(">4sIqqqqIIIIIIII")
_SEEN: Final = Struct(">qqqq")
_WITHOUT_SEEN: Final = 2
_ID: Final = Struct(">q")
_PAIR: Final = Struct(">qq")
_LOG: Final = Struct(">IIqq")
_MAP: Final = np.dtype([("log_id", ">i8"), ("ledger_id", ">i8"), ("bytes", ">i8")])
_CRC: Final = Struct(">I")
assert (_HEADER.size, _SEEN.size) == (72, 32)
assert _LOG.size == _MAP.itemsize == 24

NO_LIMBO: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The file as a value, whichever directory it lies in."""

    generation: int
    mark: JournalPosition
    limbo_ceiling: int = NO_LIMBO
    fences: tuple[int, ...] = ()
    freed: tuple[tuple[int, int], ...] = ()
    doubtful: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    logs: tuple[tuple[LogLength, ...], ...]
    """Of each directory that has logs, in the order of the directories."""
    maps: Mapping[int, Mapping[int, int]]
    """Of each unsealed log: bytes by ledger."""
    unsettled_logs: frozenset[int] = frozenset()
    seen_ids: SeenIds = NOTHING_SEEN


def encode_state(state: NodeState, *, directory: int, directory_count: int) -> bytes:
    """Return the bytes of one directory's file."""
    logs = [
        (at, one.sealed | (one.log_id in state.unsettled_logs) << 1, one.log_id, one.length)
        for at, logs in enumerate(state.logs)
        for one in logs
    ]
    maps = [_map_rows(log_id, ledgers) for log_id, ledgers in state.maps.items()]
    header = _HEADER.pack(
        _MAGIC,
        current(Format.FENCE_FILE),
        state.generation,
        *state.mark,
        state.limbo_ceiling,
        directory,
        directory_count,
        *(len(state.fences), len(state.freed), len(state.doubtful), len(state.unfinished)),
        len(logs),
        sum(len(rows) for rows in maps),
    )
    seen = state.seen_ids
    pieces = [header, _SEEN.pack(seen.next_id, seen.tally, seen.trusted_to, seen.behind_at)]
    pieces.extend(_ID.pack(one) for one in state.fences)
    pieces.extend(_PAIR.pack(*one) for one in state.freed)
    pieces.extend(_ID.pack(one) for one in (*state.doubtful, *state.unfinished))
    pieces.extend(_LOG.pack(*one) for one in logs)
    pieces.extend(rows.tobytes() for rows in maps)
    data = b"".join(pieces)
    return data + _CRC.pack(crc32c(data))


def _map_rows(log_id: int, ledgers: Mapping[int, int]) -> NDArray[np.void]:
    ids, sizes = LedgerMap(ledgers).columns()
    rows = np.empty(len(ids), _MAP)
    rows["log_id"], rows["ledger_id"], rows["bytes"] = log_id, ids, sizes
    return rows


@dataclass(frozen=True, slots=True)
class FoundState:
    """A directory's file, and whose it says it is."""

    state: NodeState
    directory: int
    directory_count: int


def decode_state(data: bytes, *, log_directories: int) -> FoundState:
    """Invert ``encode_state``, or raise ``CorruptError``."""
    damaged = CorruptError(
        f"the node's file {STATE_PATH!r} is damaged",
        remedy="Format the node anew, and let the others repair what it held",
    )
    if len(data) < 12 or crc32c(data[:-4]) != _CRC.unpack(data[-4:])[0] or data[:4] != _MAGIC:
        raise damaged
    version = int.from_bytes(data[4:8], "big")
    check_version(Format.FENCE_FILE, version)
    head_len = _HEADER.size + (_SEEN.size if version != _WITHOUT_SEEN else 0)
    if len(data) < head_len + _CRC.size:
        raise damaged
    header = _HEADER.unpack_from(data)
    _, _, generation, segment_id, offset, limbo_ceiling, directory, directory_count = header[:8]
    layouts = (_ID, _PAIR, _ID, _ID, _LOG)
    lengths = [*(one.size for one in layouts), _MAP.itemsize]
    ends = [head_len]
    for count, length in zip(header[8:], lengths, strict=True):
        ends.append(ends[-1] + count * length)
    if ends[-1] + _CRC.size != len(data):
        raise damaged
    columns = [
        list(layout.iter_unpack(data[start:end]))
        for layout, start, end in zip(layouts, ends, ends[1:], strict=False)
    ]
    fences, freed, doubtful, unfinished, logs = columns
    if any(one[0] >= log_directories for one in logs):
        raise _other_directories(directory_count)
    state = NodeState(
        generation=generation,
        mark=JournalPosition(segment_id, offset),
        limbo_ceiling=limbo_ceiling,
        fences=tuple(one for (one,) in fences),
        freed=tuple((first, last) for first, last in freed),
        doubtful=tuple(one for (one,) in doubtful),
        unfinished=tuple(one for (one,) in unfinished),
        logs=tuple(
            tuple(LogLength(one[2], one[3], bool(one[1] & 1)) for one in logs if one[0] == at)
            for at in range(log_directories)
        ),
        maps=_maps(data[ends[-2] : ends[-1]], [one[2] for one in logs if not one[1] & 1]),
        unsettled_logs=frozenset(one[2] for one in logs if one[1] & 2),
        seen_ids=_seen_ids(data[_HEADER.size : head_len]),
    )
    return FoundState(state, directory, directory_count)


def _seen_ids(data: bytes) -> SeenIds:
    if not data:
        return NOTHING_SEEN
    next_id, tally, trusted_to, behind_at = _SEEN.unpack(data)
    return SeenIds(next_id=next_id, tally=tally, trusted_to=trusted_to, behind_at=behind_at)


def _maps(data: bytes, unsealed: Iterable[int]) -> dict[int, LedgerMap]:
    """Return the map of each unsealed log, which may be empty."""
    rows = np.frombuffer(data, _MAP)
    maps = {log_id: LedgerMap() for log_id in unsealed}
    for log_id, ledgers in maps.items():
        own = rows[rows["log_id"] == log_id]
        ledgers.add(own["ledger_id"].astype(np.int64), own["bytes"].astype(np.int64))
    return maps


async def read_states(
    directories: Sequence[Files], *, log_directories: int
) -> tuple[NodeState | None, list[str]]:
    """Read all directories' files: the oldest good one, and damages in words.

    None: no directory has one. ``CorruptError`` when none of those that are there is good.
    """
    found: list[FoundState | None] = []
    errors: list[CorruptError] = []
    damages = []
    for at, files in enumerate(directories):
        try:
            one = await _read_state(files, log_directories)
        except CorruptError as error:
            errors.append(error)
            damages.append(f"directory {at}: {error.message}")
            continue
        if one is None:
            damages.append(f"directory {at}: its file {STATE_PATH!r} is missing")
        elif (one.directory, one.directory_count) != (at, len(directories)):
            raise _other_directories(one.directory_count)
        found.append(one)
    good = [one.state for one in found if one is not None]
    if good:
        oldest = min(good, key=lambda one: (one.generation, one.mark))
        if None in found and not errors and all(one.generation == 1 for one in good):
            # The very first writing was cut short: nothing was answered before all were there.
            return replace(oldest, generation=0), []
        return oldest, damages
    if errors:
        raise errors[0]
    return None, []


async def write_states(directories: Sequence[Files], state: NodeState) -> None:
    """Replace every directory's file, durably."""
    count = len(directories)
    # Encoded before anything is awaited: maps grow.
    encoded = [encode_state(state, directory=at, directory_count=count) for at in range(count)]
    for files, data in zip(directories, encoded, strict=True):
        with contextlib.suppress(FileNotFoundError):
            await files.remove(_TEMPORARY_PATH)
        file = await files.open(_TEMPORARY_PATH, create=True)
        try:
            await file.write_and_sync(0, [data])
        finally:
            await file.close()
        await files.rename(_TEMPORARY_PATH, STATE_PATH)
        await files.sync_directory("")


async def _read_state(files: Files, log_directories: int) -> FoundState | None:
    try:
        file = await files.open(STATE_PATH)
    except FileNotFoundError:
        return None
    try:
        data = bytes(await file.read(0, await file.size()))
        return decode_state(data, log_directories=log_directories)
    finally:
        await file.close()


def _other_directories(count: int) -> RefusedError:
    return RefusedError(
        f"the node had {count} directories, or had them in another order",
        reason=Reason.PERMISSION_DENIED,
        remedy="Name all of them, in the order in which the node was formatted",
    )


def ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return them as the file wants them."""
    return tuple(sorted(numbers))
