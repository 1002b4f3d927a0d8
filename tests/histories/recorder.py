"""Writes down what the Python client was asked and told, as docs/reference/histories.md has it.

Owns the lines of one history, and which outcome an error of the client means. Does not own what is
asked when (``life``), nor what it is worth (``checker``).

Invariants:
    * Every append that was called has a line, also one that was cut off: then it is unknown.
    * ``call_ns`` is read before the client is called, ``return_ns`` after it answered.
    * ``failed`` is written only where the client says that nothing was appended.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import zlib
from typing import TYPE_CHECKING, Any, Final, Self

from tierlog.client import Edge, Position
from tierlog.client.reading import entries_of, events_of
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tierlog.client import Client, StreamWriter
    from tierlog.ports.reads import FramesAnswer

VERSION: Final = 1
_HEAD: Final = re.compile(rb"[0-9]+\.[0-9]+(?= )", re.ASCII)


def payload_of(client: int, number: int, *, size: int) -> bytes:
    """Return what is appended: who, the how-manieth, and filling that differs each time."""
    head = b"%d.%d " % (client, number)
    filling = zlib.crc32(head).to_bytes(4, "big") * (size // 4 + 1)
    return head + filling[:size]


def value_of(payload: bytes) -> str:
    """Return what a history calls these bytes: a short name, and their checksum."""
    head = _HEAD.match(payload)
    return f"{head[0].decode() if head else '?'}/{len(payload)}/{zlib.crc32(payload):08x}"


class History:
    """One history in a file, written as it comes."""

    def __init__(self, path: Path, **header: Any) -> None:
        self.path = path
        self.outcomes = dict.fromkeys(("ok", "failed", "unknown"), 0)
        self.settled: list[str] = []
        """What is there, by its number, where nobody knows."""
        self.read: set[str] = set()
        self._file = path.open("w", encoding="utf-8")
        self._write({"type": "history", "version": VERSION, **header})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def event(self, what: str, **details: Any) -> None:
        """Note what was done to the system, for people."""
        self._write({"type": "event", "at_ns": time.monotonic_ns(), "what": what, **details})

    @contextlib.contextmanager
    def operation(self, kind: str, client: int, **asked: Any) -> Iterator[dict[str, Any]]:
        """Time an operation; the block puts what it was told into the dictionary."""
        told: dict[str, Any] = {}
        call_ns = time.monotonic_ns()
        outcome = "ok"
        error: BaseException | None = None
        try:
            yield told
        except (RetryableError, RefusedError) as caught:
            outcome, error = "failed", caught
            raise
        except BaseException as caught:
            outcome, error = "unknown", caught
            raise
        finally:
            line = {"type": kind, "client": client, "call_ns": call_ns, "outcome": outcome}
            if outcome != "unknown":
                line["return_ns"] = time.monotonic_ns()
            if error is not None:
                line["error"] = f"{type(error).__name__}: {error}"
                told = {}
            if kind == "append":
                self.outcomes[outcome] += 1
            self._write({**line, **asked, **told})

    def lost(self) -> list[str]:
        """Return what was acknowledged by its number and never read."""
        return [one for one in self.settled if one not in self.read]

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


class RecordedClient:
    """The part of ``tierlog.client`` that a history tells of, for one numbered client."""

    def __init__(self, client: Client, history: History, *, stream: str, number: int) -> None:
        self._client = client
        self._history = history
        self._stream = stream
        self.number = number
        self._appends = 0

    async def append(self, writer: StreamWriter, *, size: int) -> None:
        """Append one event with a writer of the client's, and wait until it is acknowledged."""
        self._appends += 1
        payload = payload_of(self.number, self._appends, size=size)
        values = [value_of(payload)]
        with self._history.operation("append", self.number, values=values) as told:
            before = writer.last_position
            await writer.send(payload)
            place = await writer.flush()
            if place is None or place == before:
                # Its answer was lost, and its number tells that it is there: the judge looks for it
                # among what is read in the end, and so does `lost`.
                self._history.settled += values
                raise IndeterminateError("nobody knows where it went", remedy="Read it back")
            told["ranges"] = [
                {
                    "ledger_id": place.ledger_id,
                    "first_entry_id": place.entry_id,
                    "last_entry_id": place.entry_id,
                }
            ]

    async def read(
        self,
        start: Position | Edge,
        *,
        until: Position | None = None,
        limit: int | None = None,
    ) -> Position | Edge:
        """Read a range; each answer is an operation. Returns where to go on."""
        reader = self._client.reader(self._stream, start=start, until=until, limit=limit)
        where, answers = start, reader.answers()
        async with contextlib.aclosing(answers):
            while True:
                begun = {"from": str(where)}
                with self._history.operation("read", self.number, **begun) as told:
                    answer = await anext(answers, None)
                    if answer is None:
                        told |= {"resume": str(where), "runs": []}
                        return where
                    run = _run_of(answer)
                    self._history.read.update(run["values"])
                    told |= {"resume": str(answer.resume), "runs": [run]}
                where = answer.resume

    async def bounds(self, *, final: bool = False) -> Position | Edge:
        """Ask for the end of the stream; ``final``: nothing is appended any more."""
        with self._history.operation("bounds", self.number, final=final) as told:
            _, end = await self._client.bounds(self._stream)
            told["next"] = str(end)
        return end


def _run_of(answer: FramesAnswer) -> dict[str, Any]:
    values = []
    for entry in entries_of(answer):
        values += [value_of(event.payload) for event in events_of(entry)]
    assert len(values) == answer.count, "an entry holds one event"
    return {
        "ledger_id": answer.ledger_id,
        "first_entry_id": answer.first_entry_id,
        "values": values,
    }
