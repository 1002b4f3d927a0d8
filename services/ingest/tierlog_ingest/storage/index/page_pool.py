"""Index pages in memory: a fixed number of frames, which of them hold what, and which go first.

Owns the frames and their life. Pure: what is read from and written to files is the ledger cache's.

    free -> (taken) -> CLEAN <-> DIRTY -> WRITING -> CLEAN, or DIRTY if it was changed meanwhile
    CLEAN -> (taken) when a frame is needed; the longest unused first

Invariants:
    * Memory is allocated once; a frame holds a page as it is in the file, but for the checksum.
    * A page is in at most one frame. What is DIRTY or WRITING stays in its frame.
    * frames = free + taken + clean + dirty + writing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import Buffer
from tierlog_ingest.storage.index.index_format import (
    FIRST_SLOT_WORD,
    PAGE_LEN,
    PAGE_WORDS,
    WORD,
    clear_page,
    seal_page,
)


class _Life(IntEnum):
    FREE = 0
    CLEAN = 1
    DIRTY = 2
    WRITING = 3


class PageKey(NamedTuple):
    """What a frame holds."""

    ledger_id: int
    page_no: int


_NOTHING: Final = PageKey(-1, -1)


class PagePool:
    """The frames. A frame is named by its number."""

    def __init__(self, frame_count: int) -> None:
        assert frame_count > 0
        self.frame_count = frame_count
        # Not touched before use: an idle node does not pay for it.
        self.words: NDArray[np.uint64] = np.empty((frame_count, PAGE_WORDS), WORD)
        self._bytes = self.words.view(np.uint8).reshape(-1).data
        self._life = bytearray(frame_count)
        self._keys: list[PageKey] = [_NOTHING] * frame_count
        self._frames: dict[int, dict[int, int]] = {}
        self._free = list(range(frame_count - 1, -1, -1))
        self._clean: OrderedDict[int, None] = OrderedDict()
        self._dirty: dict[int, set[int]] = {}
        self._writing_count = 0
        self._taken_count = 0

    def __repr__(self) -> str:
        return (
            f"<PagePool {self.frame_count}: free={len(self._free)}, clean={len(self._clean)},"
            f" dirty={self.dirty_count}, writing={self._writing_count}>"
        )

    @property
    def dirty_count(self) -> int:
        """Pages that are not in their file yet."""
        return sum(map(len, self._dirty.values()))

    @property
    def used_count(self) -> int:
        """Frames that hold something."""
        return self.frame_count - len(self._free)

    @property
    def has_room(self) -> bool:
        """Whether a frame can be taken at once."""
        return bool(self._free or self._clean)

    def find(self, ledger_id: int, page_no: int) -> int | None:
        """Return the frame of a page, which counts as used now."""
        pages = self._frames.get(ledger_id)
        if pages is None:
            return None
        frame = pages.get(page_no)
        if frame is not None and self._life[frame] == _Life.CLEAN:
            self._clean.move_to_end(frame)
        return frame

    def take(self) -> int | None:
        """Return a frame to be filled; ``add`` or ``give_back`` is to follow."""
        if self._free:
            frame = self._free.pop()
        elif self._clean:
            frame = next(iter(self._clean))
            self._forget(frame)
        else:
            return None
        self._taken_count += 1
        return frame

    def give_back(self, frame: int) -> None:
        """Undo ``take``."""
        self._taken_count -= 1
        self._free.append(frame)

    def add(self, frame: int, ledger_id: int, page_no: int, data: Buffer | None) -> None:
        """Let a taken frame hold a page, clean: ``data``, or nothing yet."""
        assert self._life[frame] == _Life.FREE
        pages = self._frames.setdefault(ledger_id, {})
        assert page_no not in pages
        self._taken_count -= 1
        self._life[frame] = _Life.CLEAN
        self._keys[frame] = PageKey(ledger_id, page_no)
        self._clean[frame] = None
        pages[page_no] = frame
        if data is None:
            self.clear(frame)
        else:
            self._bytes[frame * PAGE_LEN : (frame + 1) * PAGE_LEN] = data

    def clear(self, frame: int) -> None:
        """Let a page be without entries."""
        clear_page(self.words[frame], *self._keys[frame])

    def slots(self, frame: int, start: int, stop: int) -> NDArray[np.uint64]:
        """Return a copy of some slots."""
        found = self.words[frame, FIRST_SLOT_WORD + start : FIRST_SLOT_WORD + stop]
        return found.astype(np.uint64)

    # Dirty pages

    def mark_dirty(self, frame: int) -> None:
        """Take note that a page was changed."""
        life = self._life[frame]
        if life == _Life.DIRTY:
            return
        assert life != _Life.FREE
        if life == _Life.CLEAN:
            del self._clean[frame]
        else:
            self._writing_count -= 1
        self._life[frame] = _Life.DIRTY
        ledger_id, page_no = self._keys[frame]
        self._dirty.setdefault(ledger_id, set()).add(page_no)

    def is_dirty(self, ledger_id: int) -> bool:
        """Tell whether a ledger has dirty pages."""
        return ledger_id in self._dirty

    def dirty_ledgers(self) -> Iterator[int]:
        """Return ledgers with dirty pages; those that were dirty first come first."""
        return iter(self._dirty)

    def dirty_pages(self, ledger_id: int) -> list[int]:
        """Return the numbers of a ledger's dirty pages, ascending."""
        return sorted(self._dirty.get(ledger_id, ()))

    def begin_write(self, ledger_id: int, page_nos: Sequence[int]) -> memoryview:
        """Return copies of dirty pages, sealed, back to back; changes from now on are new ones."""
        pages, dirty = self._frames[ledger_id], self._dirty[ledger_id]
        frames = [pages[page_no] for page_no in page_nos]
        for frame in frames:
            assert self._life[frame] == _Life.DIRTY
            self._life[frame] = _Life.WRITING
        self._writing_count += len(frames)
        dirty.difference_update(page_nos)
        if not dirty:
            del self._dirty[ledger_id]
        copies = self.words[frames].view(np.uint8).reshape(-1).data
        for start in range(0, len(copies), PAGE_LEN):
            seal_page(copies[start : start + PAGE_LEN])
        return copies

    def end_write(self, ledger_id: int, page_nos: Iterable[int], *, written: bool) -> None:
        """Take note whether what ``begin_write`` returned is in the file."""
        pages = self._frames.get(ledger_id, {})
        for page_no in page_nos:
            frame = pages.get(page_no)
            if frame is None or self._life[frame] != _Life.WRITING:
                continue
            if written:
                self._writing_count -= 1
                self._life[frame] = _Life.CLEAN
                self._clean[frame] = None
            else:
                self.mark_dirty(frame)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget all pages of a ledger, dirty ones too. None of them is being written."""
        for frame in list(self._frames.get(ledger_id, {}).values()):
            self._forget(frame)
            self._free.append(frame)
        self._dirty.pop(ledger_id, None)

    def _forget(self, frame: int) -> None:
        assert self._life[frame] in {_Life.CLEAN, _Life.DIRTY}
        ledger_id, page_no = self._keys[frame]
        pages = self._frames[ledger_id]
        del pages[page_no]
        if not pages:
            del self._frames[ledger_id]
        self._clean.pop(frame, None)
        self._life[frame] = _Life.FREE
        self._keys[frame] = _NOTHING

    def check(self) -> None:
        """Assert the invariants; for tests."""
        count = len(self._free) + self._taken_count + len(self._clean)
        assert count + self.dirty_count + self._writing_count == self.frame_count, repr(self)
        held = {
            (one, page): at for one, found in self._frames.items() for page, at in found.items()
        }
        assert len(set(held.values())) == len(held)
        assert all(self._keys[frame] == key for key, frame in held.items())
        by_life = {life: {at for at, one in enumerate(self._life) if one == life} for life in _Life}
        assert by_life[_Life.CLEAN] == set(self._clean)
        dirty = {(one, page) for one, pages in self._dirty.items() for page in pages}
        assert by_life[_Life.DIRTY] == {held[key] for key in dirty}
        assert all(self._dirty.values())
