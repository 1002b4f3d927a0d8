"""The attribute index on a medium in memory: read, append, truncate, and nothing more.

Owns what a medium promises, in its smallest form; tests and benchmarks stand on it.

Invariants:
    * What is appended begins where the last append ended.
    * Truncation takes whole chunks, and only such as lie below the offset.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tierlog.attributes.tree import PageRef, drive, lookup, scan
from tierlog.attributes.update import DEFAULT, Shape, Update, update
from tierlog.format.attribute_page import Page
from tierlog.model.attributes import AttributeKey, IndexRoot
from tierlog.model.errors import CorruptError

FIRST_KEY: Final = AttributeKey(bytes(16))
EMPTY: Final = IndexRoot()
LAST_KEY: Final = AttributeKey(b"\xff" * 16)


class MemoryMedium:
    """Bytes that only grow at their end, in chunks that are dropped at their beginning."""

    def __init__(self, *, chunk_bytes: int = 1 << 20) -> None:
        self.chunk_bytes: Final = chunk_bytes
        self.end = 0
        self._chunks: dict[int, bytearray] = {}

    @property
    def start(self) -> int:
        """The lowest offset that is there."""
        return min(self._chunks, default=self.end // self.chunk_bytes) * self.chunk_bytes

    @property
    def kept(self) -> int:
        """The bytes that are there."""
        return sum(map(len, self._chunks.values()))

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes; ``CorruptError`` where there are none any more, or not yet."""
        found = bytearray()
        while len(found) < length:
            number, at = divmod(offset + len(found), self.chunk_bytes)
            piece = self._chunks.get(number, b"")[at : at + length - len(found)]
            if not piece:
                raise CorruptError(
                    f"there are no bytes at offset {offset + len(found)} of the attribute index",
                    remedy="Begin anew with the newest root",
                )
            found += piece
        return bytes(found)

    def append(self, pages: Sequence[bytes | bytearray]) -> int:
        """Put pages behind all others; return where the first begins."""
        offset = self.end
        for page in pages:
            done = 0
            while done < len(page):
                number, at = divmod(self.end, self.chunk_bytes)
                piece = page[done : done + self.chunk_bytes - at]
                self._chunks.setdefault(number, bytearray(at)).extend(piece)
                done += len(piece)
                self.end += len(piece)
        return offset

    def truncate(self, offset: int) -> None:
        """Drop the chunks that end at ``offset`` or before."""
        for number in [one for one in self._chunks if (one + 1) * self.chunk_bytes <= offset]:
            del self._chunks[number]


class MemoryTree:
    """A tree on such a medium, with its newest root."""

    def __init__(
        self,
        shape: Shape = DEFAULT,
        medium: MemoryMedium | None = None,
        root: IndexRoot = EMPTY,
    ) -> None:
        """Take a root to begin with what is on the medium."""
        self.shape: Final = shape
        self.medium: Final = medium if medium is not None else MemoryMedium()
        self.root = root

    def read(self, ref: PageRef) -> Page:
        """Return a page, verified."""
        return Page(self.medium.read(ref.offset, ref.length), ref.offset)

    def update(self, changes: Mapping[AttributeKey, int], *, is_truncated: bool = True) -> Update:
        """Make a version with these changes, and drop what it does not need."""
        done = drive(update(self.root, changes, self.shape), self.read)
        if done.pages:
            assert self.medium.append(done.pages) == self.root.end
            self.root = done.root
        if is_truncated:
            self.medium.truncate(self.root.start)
        return done

    def get(
        self, keys: Iterable[AttributeKey], *, root: IndexRoot | None = None
    ) -> dict[AttributeKey, int]:
        """Return the values of those keys that are there, by default in the newest version."""
        return drive(lookup(root or self.root, keys), self.read)

    def items(
        self,
        first: AttributeKey = FIRST_KEY,
        last: AttributeKey = LAST_KEY,
        *,
        root: IndexRoot | None = None,
    ) -> Iterator[tuple[AttributeKey, int]]:
        """Iterate over keys and values of the version that is the newest at the beginning."""
        version, key = root or self.root, first
        while True:
            run = drive(scan(version, key, last), self.read)
            yield from run.items
            if run.next_key is None:
                return
            key = run.next_key
