"""Runs as they come in: bytes of a body are received into pieces, and cut into runs there.

Owns where the bytes of a body lie, and when they become runs. Does not own connections.

Invariants:
    * Received bytes stay where they were received: runs are views of their piece. Copied are only
      the cut run at a piece's end, into the next piece, and a body that is far smaller than one.
    * Every run's structure and checksum is verified before it is handed on; what came whole
      before a damaged run, or before a cut, is handed on too.
    * Memory is taken as bytes come: a length that is announced costs none, as no checksum was
      looked at by then; nor does an answer that is waited for. What is held is no more than twice
      what came.
"""

from collections import deque
from typing import Final

import numpy as np

from tierlog.adapters.pieces import Pieces
from tierlog.format.run import RUN_PREFIX_LEN, Run, take_runs
from tierlog.format.run_stream import END_MAGIC, END_MARK_LEN, check_end_mark
from tierlog.model.errors import TierlogError

PIECE_BYTES: Final = 1024 * 1024
SMALL_BYTES: Final = PIECE_BYTES // 2
KEPT_BYTES_MAX: Final = 160 * 1024 * 1024  # two blocks, and what is read meanwhile
RUN_BYTES_MAX: Final = 2**31


def receiving_pieces(*, kept_bytes_max: int = KEPT_BYTES_MAX) -> Pieces:
    """Return the pieces that bodies are received into, for as many of them as share it."""
    return Pieces(piece_bytes=PIECE_BYTES, kept_bytes_max=kept_bytes_max)


class RunInflow:
    """One body: say ``space``, receive into it, say ``received``; take ``lists``."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._fill = 0
        self._count = 0
        self.lists: deque[list[Run]] = deque()
        """Runs to hand on, in order; never an empty list."""
        self.error: TierlogError | None = None
        """What comes behind ``lists`` when a run was damaged. Nothing is received any more."""

    def __repr__(self) -> str:
        return f"<RunInflow {self._count} runs, {self._fill} bytes behind them>"

    def space(self) -> memoryview:
        """Return where the next bytes belong; never empty."""
        if not self._piece:
            self._piece = self._pieces.lend()
        return self._piece[self._fill :]

    def received(self, length: int) -> None:
        """Take the first ``length`` bytes of ``space`` for received."""
        self._fill += length
        if self._fill == len(self._piece) and self.error is None:
            self._split()
            if self.error is None:
                rest = self._piece
                self._piece = self._next_piece(rest)
                self._piece[: len(rest)] = rest

    def finish(self) -> None:
        """Make runs of what came last, and check the end mark, unless an error was met before.

        A body without its mark is cut: ``error`` is UNKNOWN then.
        """
        if self.error is None:
            if self._fill <= SMALL_BYTES:
                # A piece must not be held for less than half of it.
                self._piece = memoryview(bytearray(self._piece[: self._fill]))
            self._split()
        if self.error is None:
            # One byte more than a mark has shows that it is none; a cut run may be long.
            mark = bytes(self._piece[: END_MARK_LEN + 1])
            try:
                check_end_mark(mark, self._count)
            except TierlogError as error:
                self.error = error

    def _split(self) -> None:
        """Make runs of the piece, and leave of it what follows them."""
        came = self._piece[: self._fill]
        taken = take_runs(came.toreadonly(), len_max=RUN_BYTES_MAX)
        if taken.runs:
            self._count += len(taken.runs)
            self.lists.append(taken.runs)
        rest = came[taken.length :]
        if taken.error is not None and not _is_mark(rest):
            self.error = taken.error
            return
        self._piece, self._fill = rest, len(rest)

    def _next_piece(self, rest: memoryview) -> memoryview:
        if len(rest) >= RUN_PREFIX_LEN and not _is_mark(rest):
            wanted = Run.encoded_len(rest, len_max=RUN_BYTES_MAX)
            if wanted > PIECE_BYTES:
                # Not zeroed, so that no page is touched before bytes come; nor a mapping of its
                # own, as the allocator has pages again that an earlier long run has touched.
                return memoryview(np.empty(wanted, np.uint8))  # type: ignore[arg-type]
        return self._pieces.lend()


def _is_mark(rest: memoryview) -> bool:
    return len(rest) <= END_MARK_LEN and bytes(rest[: len(END_MAGIC)]) == END_MAGIC
