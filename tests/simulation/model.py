"""What producers were told, and what was seen of the stream since: the truth of a run.

Shares no code with the system. An entry's bytes are a function of the stream and of the entry's
own number, its token, so each entry that turns up anywhere tells by itself which one it is.

Invariants (each ``Complaint`` names the one that failed):
    * An acknowledged entry has one position for ever; so has any entry that was ever seen.
    * What is seen at a position is the same whenever, and wherever, it is looked at.
    * What was refused ("nothing was appended") is never seen; what is ambiguous, at most once.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Position = tuple[int, int]
Complaint = Callable[[str, str], None]

TOKEN_LEN = 8
PAYLOAD_LEN_MAX = 240


class Fate(Enum):
    """What an append's producer was told."""

    PENDING = "pending"
    ACKED = "acknowledged"
    REFUSED = "refused"
    UNKNOWN = "ambiguous"


@dataclass(slots=True)
class _Entry:
    token: int
    producer: str
    fate: Fate = Fate.PENDING
    position: Position | None = None


def payload_of(stream: str, token: int) -> bytes:
    """Return the bytes of an entry."""
    seed = hashlib.sha256(f"{stream}/{token}".encode()).digest()
    size = int.from_bytes(seed[:2], "big") % (PAYLOAD_LEN_MAX - TOKEN_LEN)
    return token.to_bytes(TOKEN_LEN, "big") + hashlib.shake_128(seed).digest(size)


class Model:
    """One stream. Positions are (ledger id, entry id)."""

    def __init__(self, stream: str, complain: Complaint) -> None:
        self.stream = stream
        self._complain = complain
        self._entries: list[_Entry] = []
        self._at: dict[Position, _Entry] = {}
        self.acked_ends: dict[int, int] = {}
        """The highest acknowledged entry of each ledger."""
        self.shown_ends: dict[int, int] = {}
        """The highest entry of each ledger that anyone was told of, or read."""

    def __repr__(self) -> str:
        return f"<Model {self.stream} {self.counts()}>"

    def counts(self) -> dict[str, int]:
        """Return how many entries had which fate."""
        return {fate.value: sum(entry.fate is fate for entry in self._entries) for fate in Fate}

    def new_entries(self, producer: str, count: int) -> list[int]:
        """Return tokens of entries that are about to be appended."""
        first = len(self._entries)
        self._entries += [_Entry(first + step, producer) for step in range(count)]
        return [first + step for step in range(count)]

    def payload(self, token: int) -> bytes:
        """Return an entry's bytes."""
        return payload_of(self.stream, token)

    def acknowledged(self, tokens: list[int], positions: list[Position]) -> None:
        """Note an acknowledgement."""
        if len(tokens) != len(positions):
            self._complain("d", f"{len(tokens)} entries were acknowledged at {positions}")
            return
        for token, position in zip(tokens, positions, strict=True):
            self._settle(token, Fate.ACKED)
            self._place(token, position, "an acknowledgement")
            ledger_id, entry_id = position
            self.acked_ends[ledger_id] = max(entry_id, self.acked_ends.get(ledger_id, -1))
            self._show(position)

    def refused(self, tokens: list[int]) -> None:
        """Note that nothing was appended."""
        for token in tokens:
            self._settle(token, Fate.REFUSED)
            if self._entries[token].position is not None:
                self._complain("d", f"entry #{token} was seen, then refused")

    def ambiguous(self, tokens: list[int]) -> None:
        """Note that nobody knows."""
        for token in tokens:
            self._settle(token, Fate.UNKNOWN)

    def _settle(self, token: int, fate: Fate) -> None:
        entry = self._entries[token]
        if entry.fate is not Fate.PENDING:
            self._complain("d", f"entry #{token} is {fate.value} after {entry.fate.value}")
        entry.fate = fate

    def seen(self, position: Position, data: bytes, where: str) -> None:
        """Note what was found at a position."""
        token = int.from_bytes(data[:TOKEN_LEN], "big")
        if len(data) < TOKEN_LEN or token >= len(self._entries):
            self._complain("a", f"{where} has at {position} what nobody appended: {data[:16]!r}")
        elif data != self.payload(token):
            self._complain("a", f"{where} has other bytes at {position} than entry #{token} had")
        else:
            if self._entries[token].fate is Fate.REFUSED:
                self._complain("d", f"{where} has entry #{token} at {position}; it was refused")
            self._place(token, position, where)
            self._show(position)

    def _show(self, position: Position) -> None:
        ledger_id, entry_id = position
        self.shown_ends[ledger_id] = max(entry_id, self.shown_ends.get(ledger_id, -1))

    def _place(self, token: int, position: Position, where: str) -> None:
        entry, known = self._entries[token], self._at.get(position)
        if known is not None and known is not entry:
            self._complain("d", f"{where} has #{token} at {position}, which is #{known.token}")
        if entry.position is not None and entry.position != position:
            self._complain(
                "d", f"{where} has #{token} at {position}; it is at {entry.position} already"
            )
        self._at[position], entry.position = entry, position

    def acked_positions(self) -> list[Position]:
        """Return where acknowledged entries are."""
        return sorted(
            entry.position
            for entry in self._entries
            if entry.fate is Fate.ACKED and entry.position is not None
        )

    def check_order(self) -> None:
        """Check that what one producer sent one after the other lies in that order."""
        last: dict[str, _Entry] = {}
        for entry in self._entries:
            if entry.fate is not Fate.ACKED or entry.position is None:
                continue
            before = last.get(entry.producer)
            if before is not None and (before.position or entry.position) >= entry.position:
                text = f"#{before.token} at {before.position} came after #{entry.token}"
                self._complain("d", text)
            last[entry.producer] = entry
