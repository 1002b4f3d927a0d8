"""Bytes that come in pieces, written into buffers that are there already, back to back.

For adapters that read objects into a caller's memory. Owns where the next byte goes; does not own
the buffers.

Invariant: nothing is written outside the buffers; a body that is longer is the adapter's to refuse.
"""

from collections.abc import Sequence

from tierlog.ports.files import Buffer


class Filling:
    """``targets``, filled from their first byte on."""

    def __init__(self, targets: Sequence[memoryview]) -> None:
        self._targets = targets
        self.length = length_of(targets)
        self.filled = 0
        self._number = 0
        self._at = 0

    def __repr__(self) -> str:
        return f"<Filling {self.filled} of {self.length} bytes>"

    def add(self, piece: Buffer) -> None:
        """Write a piece behind what is there; it fits."""
        assert self.filled + len(piece) <= self.length, (self, len(piece))
        start, view = 0, memoryview(piece)
        while start < len(view):
            target = self._targets[self._number]
            size = min(len(view) - start, len(target) - self._at)
            target[self._at : self._at + size] = view[start : start + size]
            start, self._at = start + size, self._at + size
            if self._at == len(target):
                self._number, self._at = self._number + 1, 0
        self.filled += len(view)


def length_of(buffers: Sequence[Buffer]) -> int:
    """Return how many bytes buffers have together."""
    return sum(map(len, buffers))


def cut(buffers: Sequence[Buffer], start: int, end: int) -> list[memoryview]:
    """Return bytes ``start`` to ``end`` of ``buffers`` as they lie back to back, without a copy."""
    found, at = [], 0
    for buffer in buffers:
        low, high = max(start - at, 0), min(end - at, len(buffer))
        if low < high:
            found.append(memoryview(buffer)[low:high])
        at += len(buffer)
    return found
