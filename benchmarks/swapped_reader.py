"""The reader process with another store in its cache's place: ``python -m swapped_reader``.

``BENCH_STORE``: ``plain`` or ``compiled``, the streaming cache as Python runs it or compiled, or
``rocksdict``, RocksDB as its predecessor used it (seeds/002): no write-ahead log, and an entry that
grows is read and written anew. The place of RocksDB's files is ``BENCH_STORE_DIR``.
"""

import importlib
import os
from typing import Any, Final, cast

from tierlog.format.checksum import Buffer
from tierlog_reader import main as reader
from tierlog_reader.cache import blocks
from tierlog_reader.cache.layout import NO_ADDRESS, Layout
from tierlog_reader.cache.state import CacheState
from tierlog_reader.cache.store import compiled_blocks

STORE: Final = "BENCH_STORE"
FOLDER: Final = "BENCH_STORE_DIR"


class RocksStore:
    """What the reader asks of a streaming cache, of RocksDB; memory is bounded by what is in it."""

    def __init__(self, limit_bytes: int) -> None:
        module = cast("Any", importlib.import_module("rocksdict"))
        folder = os.environ[FOLDER]
        module.Rdict.destroy(folder)
        self._rocks = module.Rdict(folder, module.Options(raw_mode=True))
        options = module.WriteOptions()
        options.disable_wal = True  # a cache needs no recovery
        self._rocks.set_write_options(options)
        self.layout, self.bytes_max = Layout(), limit_bytes
        self._lengths: dict[int, int] = {}
        self._next = 1
        self.used_bytes = 0

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return len(self._lengths)

    def insert(self, data: Buffer) -> int:
        """Put an entry in and return its address."""
        address, self._next = self._next, self._next + 1
        return self._put(address, bytes(data))

    def append(self, address: int, data: Buffer) -> int:
        """Put bytes at an entry's end; it is read and written as a whole."""
        return self._put(address, self._rocks[_key(address)] + bytes(data))

    def _put(self, address: int, data: bytes) -> int:
        grown = len(data) - self._lengths.get(address, 0)
        if self.used_bytes + grown > self.bytes_max:
            return NO_ADDRESS
        self._rocks[_key(address)] = data
        self._lengths[address] = len(data)
        self.used_bytes += grown
        return address

    def get(self, address: int) -> list[memoryview]:
        """Return an entry's bytes."""
        return [memoryview(self._rocks[_key(address)])]

    def delete(self, address: int) -> None:
        """Forget an entry."""
        del self._rocks[_key(address)]
        self.used_bytes -= self._lengths.pop(address)

    def state(self) -> CacheState:
        """Say how full the cache is."""
        used = self.used_bytes
        return CacheState(
            stored=used, used=used, touched=used, bytes_max=self.bytes_max, entries=self.entries
        )

    def give_back(self) -> int:
        """Give nothing back: RocksDB keeps its memory by itself."""
        return 0

    def close(self) -> None:
        """Close the database."""
        self._rocks.close()


def _key(address: int) -> bytes:
    return address.to_bytes(8, "big")


def store_of(name: str) -> Any:  # noqa: ANN401 - a class that the reader takes for its own
    """Return the class that makes the store."""
    if name == "rocksdict":
        return RocksStore
    if name == "plain":
        return blocks.StreamingCache
    found = compiled_blocks()
    assert found.module is not None, found.why_not
    return found.module.StreamingCache


if __name__ == "__main__":
    setattr(reader, "StreamingCache", store_of(os.environ[STORE]))  # noqa: B010 - not its export
    reader.main()
