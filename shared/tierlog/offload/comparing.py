"""Data of a copy compared with what was written as they pass: who sends them reads them once.

Owns the comparing. Does not own reading and sending, nor what becomes of data that differ
(``moving``), nor copies at rest (``verify``).

Invariant: what ``end`` returns of has passed whole, in order, and as it was written. Anything else
raises ``CorruptError``.
"""

import hashlib
from typing import NoReturn, Protocol

from tierlog.format.side import SideObject
from tierlog.format.single import SingleIndex, bad_padding_at
from tierlog.model.errors import CorruptError
from tierlog.model.offload import Tier2Copy
from tierlog.offload.single_verify import REMEDY
from tierlog.offload.verify import check_grains


class Comparing(Protocol):
    """Is given a data object piece by piece."""

    def take(self, body: bytes) -> None:
        """Compare the next piece, as far as it can be told of."""
        ...

    def end(self) -> None:
        """Compare what only the whole tells of."""
        ...


class ComparingGrains:
    """Of two objects: the side object has a checksum of each grain, wherever pieces end."""

    def __init__(self, key: str, copy: Tier2Copy, side: SideObject) -> None:
        self._key = key
        self._sha256 = copy.data_sha256
        self._side = side
        self._whole = hashlib.sha256()
        self._grain = 0
        self._rest = bytearray()

    def take(self, body: bytes) -> None:
        """See ``Comparing``."""
        view, size = memoryview(body), self._side.header.grain_len
        cut = min(len(view), -len(self._rest) % size)
        self._rest += view[:cut]
        if len(self._rest) == size:
            self._check(self._rest)
            self._rest = bytearray()
        stop = cut + (len(view) - cut) // size * size
        self._check(view[cut:stop])
        self._rest += view[stop:]
        if self._sha256:
            self._whole.update(view)

    def end(self) -> None:
        """See ``Comparing``."""
        self._check(self._rest)
        if self._grain != self._side.header.grain_count:
            _differs(self._key, f"has {self._grain} grains")
        if self._sha256 and self._whole.digest() != self._sha256:
            _differs(self._key, "has another digest than the ledger's context")

    def _check(self, body: bytearray | memoryview) -> None:
        check_grains(self._key, self._side, self._grain, body)
        self._grain += -(-len(body) // self._side.header.grain_len)


class ComparingSingle:
    """Of a single object: one digest of all blocks; the first piece is its index alone."""

    def __init__(self, key: str, copy: Tier2Copy, index: SingleIndex) -> None:
        assert copy.data_sha256
        self._key = key
        self._copy = copy
        self._index: SingleIndex | None = index
        self._whole = hashlib.sha256()

    def take(self, body: bytes) -> None:
        """See ``Comparing``."""
        index, self._index = self._index, None
        if index is None:
            self._whole.update(body)
            return
        used, sha256 = index.used_len, self._copy.index_sha256
        if sha256 and hashlib.sha256(body[:used]).digest() != sha256:
            _differs(self._key, "has an index of another digest than the ledger's context")
        if bad_padding_at(body[used:]) is not None:
            _differs(self._key, "has no padding behind its index")

    def end(self) -> None:
        """See ``Comparing``."""
        if self._whole.digest() != self._copy.data_sha256:
            _differs(self._key, "has other blocks than were written")


def _differs(key: str, what: str) -> NoReturn:
    details = {"object": key, "offset": "0"}
    raise CorruptError(f"object {key} {what}", remedy=REMEDY, details=details)
