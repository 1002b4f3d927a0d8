"""A reader and a writer of data objects, from the text alone, sharing no code with the codecs.

One loop, one entry at a time, as slow and as plain as the specification reads.
"""

from struct import unpack_from
from typing import NamedTuple

PAD = (0xFE, 0xDC, 0xDE, 0xAD)


class NaiveBlock(NamedTuple):
    """A block as the naive reader finds it."""

    offset: int
    block_len: int
    first_entry_id: int
    entries: list[tuple[int, bytes]]
    padding: bytes


def naive_write(entries: list[bytes], block_size: int) -> list[bytes]:
    """Write the blocks of a ledger whose entries are given (writeToS3 of the proposal)."""
    length, written, number, blocks = sum(len(entry) for entry in entries), 0, 0, []
    while number < len(entries):
        remaining = 128 + (length - written) + (len(entries) - number) * (4 + 8)
        block_len = min(block_size, remaining)
        out = bytearray(b"\xfb\xdb\xab\xcb")
        for value in (128, block_len, number):
            out += value.to_bytes(8, "big")
        while len(out) < 128:
            out.append(0)
        while number < len(entries) and len(out) + 12 + len(entries[number]) <= block_len:
            entry = entries[number]
            out += len(entry).to_bytes(4, "big") + number.to_bytes(8, "big") + entry
            written += len(entry)
            number += 1
        pad = 0
        while len(out) < block_len:
            out.append(PAD[pad % 4])
            pad += 1
        blocks.append(bytes(out))
    return blocks


def naive_read(data: bytes) -> list[NaiveBlock]:
    """Read a whole data object; fails on anything that is not exactly as the text says."""
    blocks, at = [], 0
    while at < len(data):
        assert data[at : at + 4] == b"\xfb\xdb\xab\xcb"
        header_len, block_len, first = unpack_from(">QQQ", data, at + 4)
        assert header_len == 128
        assert data[at + 28 : at + 128] == bytes(100)
        end, place, expected, entries = at + block_len, at + 128, first, []
        while end - place >= 12:
            entry_len, entry_id = unpack_from(">iq", data, place)
            if entry_len < 0:
                break
            assert entry_id == expected
            assert place + 12 + entry_len <= end
            entries.append((entry_id, data[place + 12 : place + 12 + entry_len]))
            place += 12 + entry_len
            expected += 1
        padding = data[place:end]
        assert all(byte == PAD[step % 4] for step, byte in enumerate(padding))
        blocks.append(NaiveBlock(at, block_len, first, entries, padding))
        at = end
    assert at == len(data)
    return blocks
