"""The streaming cache itself: insert, append, get, delete in a pool of blocks (``layout``).

Owns which blocks are free, and the bytes. Does not own what an entry is for or when it goes
(``manager``), nor how it is found (``read_index``): whoever inserts keeps the address.

Invariants:
    * Pool and metadata together never pass ``bytes_max``, which is reserved at the start.
    * A call does all or nothing; what does not fit leaves the cache as it was.
    * In the queue are exactly the buffers with free blocks, each once; the first gives blocks,
      leaves when it is full, and one that gets room again goes to the end. Buffers that were
      never used stand behind the first as if they had been queued in their order.
    * Neighbouring free blocks of a buffer are one run, and runs are handed out whole where one
      is long enough: an entry is in few pieces, and most copies are one.
    * Insert takes no memory from Python's heap but its address.

Consistency: views show an entry's bytes for as long as it is not deleted; appends go behind what
they show. Who lends views to others pins the entry meanwhile (``read_index``).
Cancellation: nothing here waits. One loop calls, so there are no locks.

This file runs as it is, and compiled by Cython where that was done (``make compiled``); ``store``
chooses. ``blocks.pxd`` gives its numbers C's types, and has in C what ``uncompiled`` has in Python.
What is said ``if cython.compiled`` is decided by the compiler. No index counts from the end here,
for the compiler is told so.
"""

from collections import deque

from tierlog.format.checksum import Buffer
from tierlog_reader.cache.layout import Layout, empty_words, free_words, used_words
from tierlog_reader.cache.pool import Pool
from tierlog_reader.cache.state import CacheState

try:
    import cython
except ImportError:  # only who compiles needs it
    from tierlog_reader.cache import uncompiled as cython

if not cython.compiled:
    from tierlog_reader.cache.layout import (
        BACK_SHIFT,
        FIELD_MASK,
        LENGTH_MASK,
        LENGTH_SHIFT,
        LOOKS_MAX,
        NO_ADDRESS,
        ONE_BACK,
        ONE_IN_RUN,
        PREV_MASK,
        RUN_SHIFT,
        STEP,
        USED,
        WORD_LEN,
    )
    from tierlog_reader.cache.uncompiled import copy_in, copy_out, copy_words, raw_bytes, raw_words


class StreamingCache:
    """Entries of bytes that can grow, addressed by their last block."""

    def __init__(
        self, limit_bytes: int, layout: Layout | None = None, *, reserve: bool = True
    ) -> None:
        self.layout = layout = layout if layout is not None else Layout()
        self.buffers = layout.buffers_within(limit_bytes)
        assert self.buffers > 0, f"a limit of {limit_bytes} bytes holds no buffer"
        self.bytes_max = self.buffers * layout.buffer_len
        self._pool = Pool(self.bytes_max, reserve=reserve)
        self._view = self._pool.view
        # In C these are addresses: the pool, and the templates below, stay where they are.
        self._words = raw_words(self._pool.words)
        self._target, self._source = raw_bytes(self._pool.map), raw_bytes(self._view)
        self._ends = self.buffers << layout.block_bits  # no entry's address is that high
        self._block_len = layout.block_len
        self._block_shift, self._block_bits = layout.block_shift, layout.block_bits
        self._word_shift, self._block_mask = layout.word_shift, layout.blocks_per_buffer - 1
        # Words between a buffer's own and the next one's.
        self._stride = (1 << layout.word_shift) - layout.blocks_per_buffer
        self._used_list = used_words(layout)
        templates = (self._used_list, free_words(layout), empty_words(layout))
        self._templates = [_packed(words) for words in templates]
        self._used_words = raw_words(self._templates[0])
        self._free_words = raw_words(self._templates[1])
        self._empty_words = raw_words(self._templates[2])
        self._queue: deque[int] = deque()
        self._unused = 0  # the first buffer that was never in the queue
        self._given_back: set[int] = set()
        self.free_blocks = self.buffers * layout.data_blocks
        self.stored_bytes = 0
        self.entries = 0
        self._read_on = NO_ADDRESS  # right behind what was read last
        self._open_next_buffer()

    def __repr__(self) -> str:
        state = self.state()
        how = "compiled" if cython.compiled else "plain"
        return (
            f"<StreamingCache, {how}: {state.entries} entries, "
            f"{state.used} of {state.bytes_max} bytes>"
        )

    def insert(self, data: Buffer) -> int:
        """Put an entry in and return its address, or ``NO_ADDRESS`` when it does not fit."""
        if cython.compiled:
            self._check(1)
        length = len(data)
        need = -(-length >> self._block_shift) or 1
        if need > self.free_blocks:
            return NO_ADDRESS
        words, buffer = self._words, self._queue[0]
        base = buffer << self._word_shift
        head = words[base]
        first = head & FIELD_MASK
        word = words[base + first]
        run = word >> RUN_SHIFT & FIELD_MASK
        if run <= need:
            return self._insert_in_pieces(data, length, need)
        # The usual case: the front of the first free run, of which something is left. The bytes
        # come first, since what is no buffer fails there.
        address = buffer << self._block_bits | first
        start = address << self._block_shift
        if cython.compiled:
            copy_in(self._target, start, data, 0, length)
        else:
            self._target[start : start + length] = data
        words[base] = head + need * STEP
        at = base + first
        if run - need > 1:
            words[at + need] = word + need * STEP
        words[at + run - 1] -= need * ONE_IN_RUN
        unfilled = (need << self._block_shift) - length << LENGTH_SHIFT
        if cython.compiled:
            copy_words(words, at, self._used_words, 1, need)
            words[at + need - 1] -= unfilled
        elif need < 6:
            used = self._used_list
            for number in range(1, need):
                words[at] = used[number]
                at += 1
            words[at] = used[need] - unfilled
        else:
            words[at : at + need] = self._used_words[1 : need + 1]
            words[at + need - 1] -= unfilled
        self.free_blocks -= need
        self.stored_bytes += length
        self.entries += 1
        return address + need - 1

    def reserve(self, length: int) -> int:
        """Put an entry in whose bytes are still to be written (``writable``); see ``insert``."""
        if cython.compiled:
            self._check(1)
        need = self.layout.blocks_of(length)
        if need > self.free_blocks:
            return NO_ADDRESS
        address = self._chain(NO_ADDRESS, None, 0, length, need)
        self.stored_bytes += length
        self.entries += 1
        return address

    def writable(self, address: int) -> list[memoryview]:
        """Return where an entry's bytes lie, in order, to write them: one view for each run."""
        shift, views = self._block_shift, []
        last = self._words[self._word_of(address)] >> LENGTH_SHIFT & LENGTH_MASK
        end = (address << shift) + last
        for first, count in self.runs(address):
            start = first << shift
            stop = end if first + count == address + 1 else first + count << shift
            views.append(self._pool.writable[start:stop])
        return views

    def append(self, address: int, data: Buffer) -> int:
        """Put bytes at an entry's end and return its new address, or ``NO_ADDRESS``: no room.

        What is there is not read: the last block is filled, then the chain grows.
        """
        place = self._word_of(address)
        word = self._words[place]
        assert word & USED, f"no entry ends at block {address}"
        length, size = word >> LENGTH_SHIFT & LENGTH_MASK, len(data)
        room = self._block_len - length
        need = -(room - size >> self._block_shift) if size > room else 0
        if need > self.free_blocks:
            return NO_ADDRESS
        here = min(room, size)
        start = (address << self._block_shift) + length
        source = memoryview(data)
        if here:
            copy_in(self._target, start, source, 0, here)
            self._words[place] = word + (here << LENGTH_SHIFT)
        if need:
            address = self._grow(address, source, here, need)
        self.stored_bytes += size
        return address

    def get(self, address: int) -> list[memoryview]:
        """Return an entry's bytes, in order, as read-only views of the pool: one for each run."""
        words, shift, view = self._words, self._block_shift, self._view
        if cython.compiled:
            self._check(address)
        place = address + (address >> self._block_bits) * self._stride
        word = words[place]
        assert word & USED, f"no entry ends at block {address}"
        before = (word >> RUN_SHIFT & FIELD_MASK) - 1
        end = (address << shift) + (word >> LENGTH_SHIFT & LENGTH_MASK)
        views = [view[address - before << shift : end]]
        prev = words[place - before] & PREV_MASK
        if prev:
            while prev:
                place = self._word_of(prev)
                count = words[place] >> RUN_SHIFT & FIELD_MASK
                first = prev - count + 1
                views.append(view[first << shift : first + count << shift])
                prev = words[place - count + 1] & PREV_MASK
            views.reverse()
        return views

    def read_into(self, address: int, target: memoryview) -> int:
        """Copy an entry to the beginning of ``target``; return how long it is."""
        words, shift = self._words, self._block_shift
        if cython.compiled:
            self._check(address)
        place = address + (address >> self._block_bits) * self._stride
        word = words[place]
        assert word & USED, f"no entry ends at block {address}"
        before = (word >> RUN_SHIFT & FIELD_MASK) - 1
        end = (address << shift) + (word >> LENGTH_SHIFT & LENGTH_MASK)
        if words[place - before] & PREV_MASK:
            return self._read_runs(address, end, target)
        start = address - before << shift
        if cython.compiled:
            # Who reads one after the other goes on where the last one ended.
            step = (address + 1 << shift) - start if address - before == self._read_on else 0
            copy_out(self._source, start, target, 0, end - start, step)
            self._read_on = address + 1
        else:
            target[: end - start] = self._source[start:end]
        return end - start

    def length(self, address: int) -> int:
        """Return how many bytes an entry has."""
        last = self._words[self._word_of(address)] >> LENGTH_SHIFT & LENGTH_MASK
        return (self._blocks_of(address) - 1 << self._block_shift) + last

    def runs(self, address: int) -> list[tuple[int, int]]:
        """Return an entry's runs in order: address of the first block, and how many there are."""
        words, found = self._words, []
        while address:
            place = self._word_of(address)
            word = words[place]
            assert word & USED, f"no entry has block {address}"
            count = word >> RUN_SHIFT & FIELD_MASK
            found.append((address - count + 1, count))
            address = words[place - count + 1] & PREV_MASK
        found.reverse()
        return found

    def delete(self, address: int) -> None:
        """Give an entry's blocks back."""
        words, bits, mask = self._words, self._block_bits, self._block_mask
        if cython.compiled:
            self._check(address)
        last = words[address + (address >> bits) * self._stride] >> LENGTH_SHIFT & LENGTH_MASK
        blocks = 0
        while address:
            place = address + (address >> bits) * self._stride
            word = words[place]
            assert word & USED, f"no entry has block {address}"
            run = word >> RUN_SHIFT & FIELD_MASK
            prev = words[place - run + 1] & PREV_MASK
            self._give(address >> bits, (address & mask) - run + 1, run)
            blocks += run
            address = prev
        self.free_blocks += blocks
        self.stored_bytes -= (blocks - 1 << self._block_shift) + last
        self.entries -= 1

    def bytes_of(self, address: int) -> int:
        """Return what an entry takes of the pool: its blocks as a whole."""
        return self._blocks_of(address) << self._block_shift

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that hold entries, and of all metadata."""
        return self.bytes_max - (self.free_blocks << self._block_shift)

    def state(self) -> CacheState:
        """Say how full the cache is."""
        blocks = self.buffers * self.layout.data_blocks - self.free_blocks
        touched = self._unused - len(self._given_back)
        return CacheState(
            stored=self.stored_bytes,
            used=blocks << self._block_shift,
            touched=touched * self.layout.buffer_len,
            bytes_max=self.bytes_max,
            entries=self.entries,
        )

    def give_back(self) -> int:
        """Give the pages of all empty buffers but the first to the kernel; return the bytes."""
        if cython.compiled:
            self._check(1)
        given = 0
        size, empty = self.layout.buffer_len, self._empty_words[0]
        for buffer in list(self._queue)[1:]:
            if buffer in self._given_back or self._words[buffer << self._word_shift] != empty:
                continue
            if self._pool.give_back(buffer * size, size):
                self._given_back.add(buffer)
                given += size
        return given

    def close(self) -> None:
        """Give the memory back; nothing can be put in or read any more."""
        self._ends = 0
        self._pool.close()

    # What is not the usual case, and what all share

    def _check(self, address: int) -> None:
        """Refuse an address where no pool is, or not any more: C looks at whatever is there."""
        if not self._ends:
            raise ValueError("the memory of the cache was released")
        assert 0 < address < self._ends, f"no entry ends at block {address}"

    def _word_of(self, address: int) -> int:
        if cython.compiled:
            self._check(address)
        return address + (address >> self._block_bits) * self._stride

    def _blocks_of(self, address: int) -> int:
        blocks = 0
        while address:
            place = self._word_of(address)
            word = self._words[place]
            assert word & USED, f"no entry has block {address}"
            count = word >> RUN_SHIFT & FIELD_MASK
            blocks += count
            address = self._words[place - count + 1] & PREV_MASK
        return blocks

    def _read_runs(self, address: int, end: int, target: memoryview) -> int:
        """Copy an entry of several runs, whose bytes end at ``end``; return how many they are."""
        at, shift = 0, self._block_shift
        for first, count in self.runs(address):
            start = first << shift
            size = (end if first + count == address + 1 else first + count << shift) - start
            copy_out(self._source, start, target, at, size, 0)
            at += size
        return at

    def _insert_in_pieces(self, data: Buffer, length: int, need: int) -> int:
        source = memoryview(data)
        address = self._chain(NO_ADDRESS, source, 0, length, need)
        self.stored_bytes += length
        self.entries += 1
        return address

    def _grow(self, address: int, source: memoryview, at: int, need: int) -> int:
        """Chain what ``source`` has from ``at`` on behind a full block, beside it if that is free.

        ``need`` is how many blocks that takes.
        """
        length = len(source)
        block = address & self._block_mask
        beside = self._words[self._word_of(address) + 1] if block < self._block_mask else USED
        if not beside & USED:
            count = min(need, beside >> RUN_SHIFT & FIELD_MASK)
            buffer = address >> self._block_bits
            self._take(buffer, block + 1, count)
            self.free_blocks -= count
            size = min(length - at, count << self._block_shift)
            run = self._words[self._word_of(address)] >> RUN_SHIFT & FIELD_MASK
            self._fill(address + 1, count, source, at, size, run)
            at += size
            need -= count
            address += count
        return self._chain(address, source, at, length, need)

    def _chain(self, prev: int, source: memoryview | None, at: int, length: int, need: int) -> int:
        """Put ``source``, from ``at`` to ``length``, into ``need`` blocks behind ``prev``.

        None: only the room for it. Returns the address of the last.
        """
        while need:
            buffer = self._queue[0]
            first, count = self._fitting(buffer, need)
            self._take(buffer, first, count)
            self.free_blocks -= count
            size = min(length - at, count << self._block_shift)
            address = buffer << self._block_bits | first
            self._fill(address, count, source, at, size, 0)
            self._words[self._word_of(address)] += prev
            prev = address + count - 1
            at += size
            need -= count
        return prev

    def _fill(
        self, address: int, count: int, source: memoryview | None, at: int, size: int, number: int
    ) -> None:
        """Write words and bytes of a run; it goes on behind ``number`` blocks of the same one."""
        place = self._word_of(address)
        copy_words(self._words, place, self._used_words, number + 1, count)
        self._words[place + count - 1] -= (count << self._block_shift) - size << LENGTH_SHIFT
        if source is not None:
            copy_in(self._target, address << self._block_shift, source, at, size)

    def _fitting(self, buffer: int, need: int) -> tuple[int, int]:
        """Choose where the next ``need`` blocks come from: the first free run that holds them.

        Where none of the first few does, the longest of those gives all it has.
        """
        words, base = self._words, buffer << self._word_shift
        block = words[base] & FIELD_MASK
        best, longest = 0, 0
        for _ in range(LOOKS_MAX):
            run = words[base + block] >> RUN_SHIFT & FIELD_MASK
            if run >= need:
                return block, need
            if run > longest:
                best, longest = block, run
            block = words[base + block + run - 1] & FIELD_MASK
            if not block:
                break
        return best, longest

    def _take(self, buffer: int, first: int, count: int) -> None:
        """Take blocks from the front of the free run that begins at ``first``."""
        words, base = self._words, buffer << self._word_shift
        word = words[base + first]
        run = word >> RUN_SHIFT & FIELD_MASK
        if count == run:
            self._unlink(base, first, run)
        else:
            back = word >> BACK_SHIFT & FIELD_MASK
            words[base + back] += count  # it pointed to the run's first block
            if run - count > 1:
                words[base + first + count] = word + count * STEP
                words[base + first + run - 1] -= count * ONE_IN_RUN
            else:
                last = base + first + run - 1
                words[last] = words[last] & FIELD_MASK | back << BACK_SHIFT | ONE_IN_RUN
        words[base] -= count * ONE_IN_RUN
        if not words[base] >> RUN_SHIFT & FIELD_MASK:
            self._full(buffer)

    def _unlink(self, base: int, first: int, run: int) -> None:
        """Take a free run out of its buffer's list."""
        words = self._words
        last = first + run - 1
        back, after = words[base + first] >> BACK_SHIFT & FIELD_MASK, words[base + last]
        after &= FIELD_MASK
        words[base + back] += after - first
        if after:
            words[base + after] += (back - last) * ONE_BACK

    def _give(self, buffer: int, first: int, count: int) -> None:
        """Free a run of used blocks, as one with the free ones beside it."""
        words, base = self._words, buffer << self._word_shift
        head = words[base]
        words[base] = head + count * ONE_IN_RUN
        was_full = not head & FIELD_MASK
        if count < 6:
            for block in range(first, first + count):
                words[base + block] = block + 1
        else:
            copy_words(words, base + first, self._free_words, first, count)
        before, after = words[base + first - 1], first + count
        beside = words[base + after] if after <= self._block_mask else USED
        if not before & USED and beside & USED:  # block 0 counts as used
            self._lengthen(base, first, count, before)
            return
        if not beside & USED:
            run = beside >> RUN_SHIFT & FIELD_MASK
            self._unlink(base, after, run)
            count += run
            words[base + after] = after + 1 & self._block_mask
        if not before & USED:
            run = before >> RUN_SHIFT & FIELD_MASK
            self._unlink(base, first - run, run)
            words[base + first - 1] = first
            first -= run
            count += run
        # The new run comes first in the list.
        last, after = first + count - 1, words[base] & FIELD_MASK
        words[base] += first - after
        words[base + first] = (first + 1) | count << RUN_SHIFT
        words[base + last] = after | count << RUN_SHIFT
        if after:
            words[base + after] += last * ONE_BACK
        if was_full:
            self._queue.append(buffer)

    def _lengthen(self, base: int, first: int, count: int, before: int) -> None:
        """Put blocks at the end of the free run before them, which keeps its place in the list.

        ``before`` is the word of its last block.
        """
        words = self._words
        run, after = before >> RUN_SHIFT & FIELD_MASK, before & FIELD_MASK
        if run == 1:  # its first block too
            words[base + first - 1] = before - after + first + count * ONE_IN_RUN
        else:
            words[base + first - 1] = first
            words[base + first - run] += count * ONE_IN_RUN
        words[base + first + count - 1] = after | (run + count) << RUN_SHIFT
        if after:
            words[base + after] += count * ONE_BACK

    def _full(self, buffer: int) -> None:
        """Take a buffer without room out of the queue; the next one comes to its front."""
        if self._queue[0] != buffer:
            self._queue.remove(buffer)  # an entry in it grew
            return
        self._queue.popleft()
        self._open_next_buffer()

    def _open_next_buffer(self) -> None:
        """See to it that the first of the queue is a buffer whose words are written."""
        if self._unused < self.buffers:
            self._queue.appendleft(self._unused)
            self._unused += 1
        elif not self._queue:
            return
        buffer = self._queue[0]
        base = buffer << self._word_shift
        if not self._words[base]:
            self._given_back.discard(buffer)
            copy_words(self._words, base, self._empty_words, 0, self._block_mask + 1)


def _packed(words: list[int]) -> memoryview:
    packed = memoryview(bytearray(WORD_LEN * len(words))).cast("Q")
    for number, word in enumerate(words):
        packed[number] = word
    return packed.toreadonly()
