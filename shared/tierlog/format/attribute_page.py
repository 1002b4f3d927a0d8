"""Pages of the attribute index: nodes of a B+Tree on media that only grow (seeds/004).

    offset  size  field
         0     4  magic        "TLAP"
         4     1  version      1
         5     1  level        0: a leaf; else one more than its children's
         6     2  entry_count  n, from 1 on
         8     4  crc32c       over the page's offset in 8 bytes, and all other bytes of the page
        12     8  tree_len     of a root: the bytes of all pages of its tree, its own among them;
                               of others 0
        20     …  entries      n of them, keys strictly ascending

An entry of a leaf:

         0    16  key
        16     8  value

An entry of an index page; there is one for each child:

         0    16  key          the child's first key
        16     8  offset       where the child begins
        24     2  length       of the child
        26     8  min_offset   the lowest offset of any page of the sub-tree below this entry

Integers are big-endian; value is signed, and so are offsets, which are never negative. A page has
at most 32,768 bytes: 1,364 attributes, or 963 children. (That is 2^15, not 2^15 - 1 as where a
length is a signed short: lengths here are unsigned, and the page size of a disk divides it.)

Owns the bytes. Does not own which pages a tree has (``tierlog.attributes``).

Invariants:
    * ``Page`` is made of verified bytes alone: what can't be trusted never gets into a tree.
    * A page that lies at another offset is as wrong as one with a flipped bit.
    * Entries are used as they lie in the page: nothing is decoded, and nothing encoded.
"""

from struct import Struct
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.versions import Format, check_version, current
from tierlog.model.attributes import KEY_LEN
from tierlog.model.errors import CorruptError

PAGE_MAGIC: Final = b"TLAP"
PAGE_BYTES_MAX: Final = 32 * 1024
PAGE_HEADER_LEN: Final = 20
LEVEL_OFFSET: Final = 5
CRC_OFFSET: Final = 8
TREE_LEN_OFFSET: Final = 12
VALUE_LEN: Final = 8
LEAF_ENTRY_LEN: Final = KEY_LEN + VALUE_LEN
INDEX_ENTRY_LEN: Final = KEY_LEN + 8 + 2 + 8

# "S16" pads with zeros and compares bytes as unsigned: right for keys that all have 16 bytes. As
# Python's bytes they have to be taken from the page, for numpy drops zeros at their ends.
LEAF: Final = np.dtype([("key", "S16"), ("value", ">i8")])
INDEX: Final = np.dtype(
    [("key", "S16"), ("offset", ">i8"), ("length", ">u2"), ("min_offset", ">i8")]
)

Entries = NDArray[np.void]
Keys = NDArray[np.bytes_]

_HEADER: Final = Struct(">4sBBHIq")
_OFFSET: Final = Struct(">q")
_CRC: Final = Struct(">I")

assert _HEADER.size == PAGE_HEADER_LEN
assert LEAF.itemsize == LEAF_ENTRY_LEN == 24
assert INDEX.itemsize == INDEX_ENTRY_LEN == 34


def entry_len(level: int) -> int:
    """Return the bytes of an entry of a page of that level."""
    return INDEX_ENTRY_LEN if level else LEAF_ENTRY_LEN


def capacity(level: int, page_bytes: int = PAGE_BYTES_MAX) -> int:
    """Return how many entries a page of that level and of at most so many bytes has."""
    return (page_bytes - PAGE_HEADER_LEN) // entry_len(level)


class Page:
    """A page that was verified. ``raw`` is its bytes, which nobody changes any more."""

    __slots__ = ("_entries", "_keys", "count", "level", "offset", "raw", "tree_len")

    def __init__(self, raw: Buffer, offset: int) -> None:
        """Verify the page that was read at ``offset``: ``CorruptError``, or ``RefusedError``."""
        if len(raw) < PAGE_HEADER_LEN:
            _damaged(offset, f"has but {len(raw)} bytes")
        magic, version, level, count, crc, tree_len = _HEADER.unpack_from(raw)
        if magic != PAGE_MAGIC or len(raw) != PAGE_HEADER_LEN + count * entry_len(level):
            _damaged(offset, "is none")
        if crc != _crc_of(raw, offset):
            _damaged(offset, "has another checksum")
        check_version(Format.ATTRIBUTES_PAGE, version)
        self.raw: Final = raw
        self.offset: Final = offset
        self.level: Final[int] = level
        self.count: Final[int] = count
        self.tree_len: Final[int] = tree_len
        self._entries: Entries | None = None
        self._keys: Keys | None = None

    def __repr__(self) -> str:
        return f"<Page at {self.offset}, level {self.level}, {self.count} entries>"

    @property
    def entries(self) -> Entries:
        """The entries, as they lie in the page."""
        if self._entries is None:
            kind = INDEX if self.level else LEAF
            self._entries = np.frombuffer(self.raw, kind, self.count, PAGE_HEADER_LEN)
        return self._entries

    @property
    def keys(self) -> Keys:
        """The entries' keys, as they lie in the page."""
        if self._keys is None:
            self._keys = self.entries["key"]
        return self._keys

    def key(self, number: int) -> bytes:
        """Return the key of an entry; less than a key's bytes where there is no entry."""
        at = PAGE_HEADER_LEN + number * entry_len(self.level)
        return bytes(self.raw[at : at + KEY_LEN])

    def value(self, number: int) -> int:
        """Return the value of an entry of a leaf."""
        at = PAGE_HEADER_LEN + number * LEAF_ENTRY_LEN + KEY_LEN
        return int.from_bytes(self.raw[at : at + VALUE_LEN], "big", signed=True)


def check_pages(raw: Buffer, offset: int) -> None:
    """Verify one flush, whose pages lie back to back from ``offset`` on: as ``Page`` does.

    The last page is the root, without which it was cut.
    """
    at, view, is_root = 0, memoryview(raw), False
    while at < len(view):
        length = PAGE_HEADER_LEN
        if len(view) - at >= length:
            _, _, level, count, _, _ = _HEADER.unpack_from(view, at)
            length += count * entry_len(level)
        is_root = Page(view[at : at + length], offset + at).tree_len > 0
        at += length
    if not is_root:
        _damaged(offset + at, "is not there")


def new_page(level: int, body: Buffer) -> bytearray:
    """Return a page of those entries, but for what ``seal`` knows."""
    count = len(body) // entry_len(level)
    header = _HEADER.pack(PAGE_MAGIC, current(Format.ATTRIBUTES_PAGE), level, count, 0, 0)
    page = bytearray(header)
    page += body
    return page


def seal(page: bytearray, offset: int, tree_len: int = 0) -> None:
    """Make a page whole, which is about to be written at ``offset``."""
    _OFFSET.pack_into(page, TREE_LEN_OFFSET, tree_len)
    _CRC.pack_into(page, CRC_OFFSET, _crc_of(page, offset))


def leaf_entries(keys: bytes, values: NDArray[np.integer[Any]]) -> Entries:
    """Return entries of a leaf: keys back to back, and their values."""
    entries = np.empty(len(values), LEAF)
    entries["key"] = np.frombuffer(keys, "S16")
    entries["value"] = values
    return entries


def _crc_of(page: Buffer, offset: int) -> int:
    before = crc32c(page[:CRC_OFFSET], crc32c(_OFFSET.pack(offset)))
    return crc32c(memoryview(page)[CRC_OFFSET + 4 :], before)


def _damaged(offset: int, what: str) -> NoReturn:
    raise CorruptError(
        f"page of the attribute index at offset {offset} {what}",
        remedy="Rebuild the attributes from an older checkpoint and the entries after it",
        details={"offset": str(offset)},
    )
