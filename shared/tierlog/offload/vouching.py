"""What a data object must be, when it is to be read without its ledger's metadata in tier 1.

Owns finding what vouches for each byte, the ledger's metadata, and reading a data object through
where its side object is lost. Does not own what is done with it (``tierlog.offload.repair``).

What vouches for data, first the best:
    1. a side object of the copy, or of another attempt of the ledger with the same length: a
       checksum of every grain;
    2. the data object's SHA-256 in the context, where the settings want it;
    3. the store's own digest of the parts (the ETag of S3), which it made when it took them;
    4. the checksum that every entry carries in its append header, but not in a raw stream.
Where nothing does, nothing is made of the data: a copy with new checksums would call them good.

Who tells the ledger's metadata, first the best:
    1. the copy's own index object, with its digest in the context;
    2. tier 1, while the ledger is there;
    3. the index object of another attempt. It has no checksum, and names no ledger: it is believed
       only where it says what the stream's list and the context say, and then, unchecked, also of
       what these don't know: nodes, time of creation, other custom metadata;
    4. the stream's list and the context alone.

Invariant: what is returned was checked against its digest in the context, or by its own checksums
together with the ledger and the length that it names; or, of the metadata, says of whatever is
known elsewhere the same as is said there.
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from tierlog.format.checksum import crc32c
from tierlog.format.entry import decode_entry
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.grains import GRAIN_LEN, GrainColumns
from tierlog.format.index import INDEX_LEN_MAX, ObjectIndex
from tierlog.format.side import SIDE_LEN_MAX, SideObject, grain_len_for
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId, NodeId
from tierlog.model.ledger import (
    KEY_BLOCK_SIZE,
    KEY_INCARNATION,
    KEY_LOST,
    KEY_RAW,
    KEY_STREAM,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from tierlog.model.offload import (
    AbandonedAttempt,
    OffloadContext,
    RepairAttempt,
    Tier2Copy,
    Tier2Location,
)
from tierlog.model.stream import ListedLedger
from tierlog.offload.blocks import block_size_of
from tierlog.offload.salvage import Layout, Piece, Walk
from tierlog.ports.objects import ObjectStore
from tierlog.ports.throttle import TokenBucket

READ_BYTES: Final = 4 * 1024 * 1024
UNKNOWN_NODE: Final = NodeId("unknown")


def metadata_from_list(
    context: OffloadContext, listed: ListedLedger, *, raw: bool
) -> LedgerMetadata:
    """Return what is known of a ledger whose own metadata are nowhere.

    Which nodes it lay on is forgotten with them, and matters to nobody any more.
    """
    assert listed.closed
    return LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=(UNKNOWN_NODE,)),),
        state=LedgerState.CLOSED,
        length=listed.length,
        last_entry_id=listed.last_entry_id,
        ctime_ms=listed.opened_ms,
        custom={
            KEY_BLOCK_SIZE: str(listed.block_size).encode(),
            KEY_STREAM: context.stream.encode(),
            KEY_INCARNATION: str(context.incarnation).encode(),
            KEY_RAW: str(int(raw)).encode(),
        },
    )


class Evidence:
    """What the bucket still has that says what a ledger's data object must be."""

    def __init__(self, objects: ObjectStore, context: OffloadContext, pace: TokenBucket) -> None:
        assert context.copy is not None
        assert context.location is not None
        self._objects = objects
        self._ledger_id = context.ledger_id
        self._uuid = context.uuid
        self._copy: Tier2Copy = context.copy
        self._location: Tier2Location = context.location
        here = _place(self._location)
        others: list[AbandonedAttempt | RepairAttempt] = [*context.abandoned]
        if context.repair is not None:
            others.append(context.repair)
        self._others = [one for one in others if _place(one.location) == here]
        self._pace = pace

    def __repr__(self) -> str:
        return f"<Evidence of ledger {self._ledger_id}>"

    @property
    def data_keys(self) -> list[str]:
        """The data objects of all attempts, that of the damaged copy first."""
        return [self._location.data_key, *(one.location.data_key for one in self._others)]

    async def metadata(self) -> LedgerMetadata | None:
        """Return the ledger's metadata out of the copy's own index object, if that is whole."""
        raw = await self._get(self._location.index_key, self._copy.index_len)
        if raw is not None and hashlib.sha256(raw).digest() == self._copy.index_sha256:
            return ObjectIndex.decode(raw).metadata
        return None

    async def metadata_like(self, known: LedgerMetadata) -> LedgerMetadata | None:
        """Return them out of another attempt's index object that agrees with ``known``, if any."""
        for one in self._others:
            raw = await self._get(one.location.index_key, INDEX_LEN_MAX)
            try:
                index = None if raw is None else ObjectIndex.decode(raw)
            except (CorruptError, RefusedError):
                continue
            same = (self._copy.data_len, self._copy.entry_count)
            if index is None or (index.data_len, index.last_entry_id + 1) != same:
                continue
            if _agrees(index.metadata, known):
                return index.metadata
        return None

    async def layout(self, metadata: LedgerMetadata) -> Layout:
        """Return what the data object must be, or raise: nothing says so any more."""
        side = await self._side()
        if side is None:
            return await self._read_through(metadata)
        return Layout(
            data_len=side.header.data_len,
            block_size=block_size_of(self._ledger_id, metadata),
            entry_count=side.header.entry_count,
            grain_len=side.header.grain_len,
            columns=side.columns,
        )

    async def _side(self) -> SideObject | None:
        if self._copy.side_len:
            raw = await self._get(self._location.side_key, self._copy.side_len)
            if raw is not None and hashlib.sha256(raw).digest() == self._copy.side_sha256:
                return SideObject.decode(raw)
        for one in self._others:
            side = await self._side_of(one)
            if side is not None:
                return side
        return None

    async def _side_of(self, attempt: AbandonedAttempt | RepairAttempt) -> SideObject | None:
        raw = await self._get(attempt.location.side_key, SIDE_LEN_MAX)
        try:
            side = None if raw is None else SideObject.decode(raw)
        except (CorruptError, RefusedError):
            return None
        if side is None:
            return None
        header, copy = side.header, self._copy
        found = (header.uuid, header.ledger_id, header.data_len, header.entry_count)
        wanted = (attempt.uuid, self._ledger_id, copy.data_len, copy.entry_count)
        return side if found == wanted else None

    async def _get(self, key: str, bytes_max: int) -> bytes | None:
        try:
            found = await self._objects.get(key, bytes_max=bytes_max)
        except CorruptError:
            return None
        return None if found is None else found[1]

    async def _read_through(self, metadata: LedgerMetadata) -> Layout:
        """Read all of the data object, and return what it must be: as it is, if that is right."""
        copy, block_size = self._copy, block_size_of(self._ledger_id, metadata)
        through = Through(copy, block_size)
        info = await self._objects.head(self._location.data_key)
        if info is None or info.size != copy.data_len:
            raise self._unvouched("the data object is not there, or has another length")
        for start in range(0, copy.data_len, through.window):
            length = min(through.window, copy.data_len - start)
            await self._pace.take(length)
            body = await self._objects.get_range(self._location.data_key, start, length)
            if body is None or len(body) != length:
                raise self._unvouched(f"the data object has no bytes {start} to {start + length}")
            through.add(start, body)
        if not through.vouched(info.etag):
            raise self._unvouched("neither entries nor digests say whether its data are right")
        return through.layout()

    def _unvouched(self, why: str) -> CorruptError:
        return CorruptError(
            f"ledger {self._ledger_id} has no side object any more, and {why}",
            remedy="Bring the side object back from another copy of the bucket",
            details={"object": self._location.side_key, "offset": "0"},
        )


class Through:
    """A data object without a side object, read from its first byte to its last."""

    def __init__(self, copy: Tier2Copy, block_size: int) -> None:
        self._copy = copy
        size = grain_len_for(copy.data_len, least=GRAIN_LEN)
        count = -(-copy.data_len // size)
        self._crcs = array("I")
        self._columns = GrainColumns(
            np.full(count, -1, np.int64),
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint32),
            np.full(count, INT64_MAX, np.int64),
            np.zeros(count, np.int64),
        )
        self._layout = Layout(
            data_len=copy.data_len,
            block_size=block_size,
            entry_count=copy.entry_count,
            grain_len=size,
            columns=self._columns,
        )
        self._walk = Walk(self._layout)
        self._sha256 = hashlib.sha256()
        self._parts: list[bytes] = []
        self._part = hashlib.md5(usedforsecurity=False)
        self._entries_are_right = True
        self.window = max(size, READ_BYTES // size * size)

    def add(self, start: int, body: bytes) -> None:
        """Take the next bytes, which begin at a grain's start."""
        view, size = memoryview(body), self._layout.grain_len
        self._sha256.update(view)
        self._add_to_parts(start, view)
        for at in range(0, len(body), size):
            grain = bytes(view[at : at + size])
            self._crcs.append(crc32c(grain))
            self._walk.add((start + at) // size, grain)
        for piece in self._walk.pieces():
            self._note(piece)

    def _add_to_parts(self, start: int, view: memoryview) -> None:
        size, end = self._layout.block_size, self._copy.data_len
        while len(view):
            left = min((start // size + 1) * size, end) - start
            self._part.update(view[:left])
            if len(view) >= left:
                self._parts.append(self._part.digest())
                self._part = hashlib.md5(usedforsecurity=False)
            start, view = start + left, view[left:]

    def _note(self, piece: Piece) -> None:
        ids, offsets, _, low, high = self._columns
        grain = piece.place // self._layout.grain_len
        if ids[grain] < 0:
            ids[grain] = piece.first_entry_id
            offsets[grain] = piece.place - grain * self._layout.grain_len
        times = self._times_of(piece) if self._entries_are_right else ()
        if times:
            low[grain], high[grain] = min(low[grain], *times), max(high[grain], *times)

    def _times_of(self, piece: Piece) -> Sequence[int]:
        """Return when the entries were published; note when one of them is not as it was made."""
        bounds = [*piece.offsets.tolist(), len(piece.frames)]
        try:
            return [
                decode_entry(piece.frames[begin + FRAME_HEADER_LEN : end]).header.publish_time_ms
                for begin, end in pairwise(bounds)
            ]
        except (CorruptError, RefusedError):
            self._entries_are_right = False
            return ()

    def vouched(self, etag: str) -> bool:
        """Tell whether all entries are there, and something says that they are right."""
        if self._walk.entry_id != self._copy.entry_count:
            return False
        if self._copy.data_sha256:
            return self._sha256.digest() == self._copy.data_sha256
        joined = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        by_store = etag.strip('"') == f"{joined}-{len(self._parts)}"
        return by_store or self._entries_are_right

    def layout(self) -> Layout:
        """Return what the data object is."""
        ids, offsets, crcs, low, high = self._columns
        crcs[:] = self._crcs
        size = self._layout.grain_len
        follower, place = self._copy.entry_count, self._copy.data_len
        for grain in reversed(range(len(ids))):
            if ids[grain] < 0:
                ids[grain], offsets[grain] = follower, place - grain * size
            follower, place = int(ids[grain]), grain * size + int(offsets[grain])
        low[high == 0] = 0
        return self._layout


def _agrees(found: LedgerMetadata, known: LedgerMetadata) -> bool:
    """Tell whether ``found`` says what is known from the list of a ledger's stream."""
    custom = {KEY_RAW: b"0", **found.custom}
    return (
        (found.state, found.length, found.last_entry_id)
        == (known.state, known.length, known.last_entry_id)
        # Whoever copied it read all of it; good entries would be passed over.
        and KEY_LOST not in found.custom
        # Byte for byte: a number that is written in another way was written by nobody here.
        and all(custom.get(name) == value for name, value in known.custom.items())
    )


def _place(location: Tier2Location) -> tuple[str, str, str]:
    return location.driver, location.bucket, location.endpoint_name
