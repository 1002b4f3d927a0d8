"""Histories made up: good ones, and what each way to be wrong makes of them.

Owns a made-up log and its clients, in a time of its own, and the doctoring. A doctored history
differs from a good one by one lie, so that a judge that overlooks it is seen to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

Line = dict[str, Any]
Place = tuple[int, int]
LEDGER_ENTRIES: Final = 7
HEADER: Final = {"type": "history", "version": 1, "stream": "made.up"}


@dataclass
class MadeUp:
    """A log in a time of its own, and the lines of those who use it."""

    rng: random.Random
    log: list[tuple[Place, str]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    now: int = 1000
    number: int = 0

    def timed(self, kind: str, outcome: str = "ok", **told: Any) -> Line:
        """Write an operation down whose effect is now."""
        line = {"type": kind, "client": self.rng.randrange(5), "outcome": outcome, **told}
        line["call_ns"] = self.now - self.rng.randrange(1, 40)
        if outcome != "unknown":
            line["return_ns"] = self.now + self.rng.randrange(1, 40)
        self.lines.append(line)
        return line

    def append(self, outcome: str = "ok", *, lands: bool = True) -> None:
        """Append one value."""
        self.number += 1
        value = f"1.{self.number}/10/{self.number:08x}"
        line = self.timed("append", outcome, values=[value])
        if not lands:
            return
        count = len(self.log)
        place = (3 + 2 * (count // LEDGER_ENTRIES), count % LEDGER_ENTRIES)
        self.log.append((place, value))
        if outcome == "ok":
            line["ranges"] = [_range(place)]

    def read(self, begin: int, end: int) -> Line:
        """Read entries ``begin`` to ``end``, by their number in the log."""
        return self.timed(
            "read",
            resume=self.text(end),
            runs=list(_runs(self.log[begin:end])),
            **{"from": self.text(begin)},
        )

    def text(self, count: int) -> str:
        """Return the position behind so many entries."""
        if count == 0:
            return "earliest"
        (ledger_id, entry_id), _ = self.log[count - 1]
        return f"{ledger_id}:{entry_id + 1}"


def _range(place: Place) -> Line:
    return {"ledger_id": place[0], "first_entry_id": place[1], "last_entry_id": place[1]}


def _runs(entries: list[tuple[Place, str]]) -> Iterator[Line]:
    run: Line | None = None
    for (ledger_id, entry_id), value in entries:
        if run is None or run["ledger_id"] != ledger_id:
            if run is not None:
                yield run
            run = {"ledger_id": ledger_id, "first_entry_id": entry_id, "values": []}
        run["values"].append(value)
    if run is not None:
        yield run


def good(seed: int, *, steps: int = 120) -> list[Line]:
    """Return a history that is linearizable."""
    made = MadeUp(random.Random(seed))
    for _ in range(steps):
        made.now += made.rng.randrange(1, 30)
        chance = made.rng.random()
        if chance < 0.45:
            made.append()
        elif chance < 0.5:
            made.append("failed", lands=False)
        elif chance < 0.6:
            made.append("unknown", lands=made.rng.random() < 0.5)
        elif chance < 0.65:
            made.lines.append({"type": "event", "at_ns": made.now, "what": "kill -9"})
        elif chance < 0.75:
            made.timed("bounds", next=made.text(len(made.log)), final=False)
        else:
            begin = made.rng.randrange(len(made.log) + 1)
            made.read(begin, made.rng.randrange(begin, len(made.log) + 1))
    for _ in range(2):
        made.now += 100
        made.append()
    made.now += 100
    made.timed("bounds", next=made.text(len(made.log)), final=True)
    page = 20
    for begin in range(0, len(made.log), page):
        made.now += 100
        made.read(begin, min(begin + page, len(made.log)))
    # Lines are written when an operation ends.
    made.lines.sort(key=lambda line: int(line.get("return_ns") or line.get("call_ns") or 0))
    return [dict(HEADER, seed=seed), *made.lines]


def _acknowledged(lines: list[Line]) -> list[Line]:
    return [one for one in lines if one["type"] == "append" and one["outcome"] == "ok"]


def _reads(lines: list[Line]) -> list[Line]:
    return [one for one in lines if one["type"] == "read" and one["outcome"] == "ok"]


def _final(lines: list[Line]) -> Line:
    return next(one for one in lines if one.get("final"))


def _value_at(lines: list[Line], change: Callable[[str], str]) -> None:
    """Change values wherever reads tell them."""
    for read in _reads(lines):
        for run in read["runs"]:
            run["values"] = [change(value) for value in run["values"]]


def _lost_tail(lines: list[Line]) -> None:
    """The last acknowledged entry is not there at the end."""
    end = _final(lines)
    ledger_id, _, entry_id = end["next"].partition(":")
    shorter = f"{ledger_id}:{int(entry_id) - 1}"
    for read in _reads(lines):
        if read["resume"] == end["next"] and read["runs"]:
            read["resume"] = shorter
            read["runs"][-1]["values"].pop()
        if read["from"] == end["next"]:
            read["from"] = read["resume"] = shorter
    end["next"] = shorter


def _lost_within(lines: list[Line]) -> None:
    """An acknowledged entry in the middle is there under no id: the last read leaves it out."""
    read = _reads(lines)[-1]
    run = max(read["runs"], key=lambda one: len(one["values"]))
    at = len(run["values"]) // 2
    rest = {**run, "first_entry_id": run["first_entry_id"] + at + 1}
    rest["values"] = run["values"][at + 1 :]
    run["values"] = run["values"][:at]
    read["runs"].insert(read["runs"].index(run) + 1, rest)


def _changed(lines: list[Line]) -> None:
    """One acknowledged value is another one when it is read, each time."""
    victim = _acknowledged(lines)[3]["values"][0]
    _value_at(lines, lambda value: "?/10/00000bad" if value == victim else value)


def _changed_once(lines: list[Line]) -> None:
    """One read, and only it, tells another value than all others."""
    run = next(run for read in _reads(lines)[:-1] for run in read["runs"])
    run["values"][0] = "?/10/00000bad"


def _reordered(lines: list[Line]) -> None:
    """Two appends, the one called after the other had returned, lie the other way round."""
    first, second = next(
        (one, other)
        for one in _acknowledged(lines)
        for other in _acknowledged(lines)
        if one["return_ns"] < other["call_ns"]
    )
    first["ranges"], second["ranges"] = second["ranges"], first["ranges"]
    one, other = first["values"][0], second["values"][0]
    _value_at(lines, lambda value: {one: other, other: one}.get(value, value))


def _twice(lines: list[Line]) -> None:
    """An acknowledged value is there a second time, at the end."""
    end = _final(lines)
    ledger_id, _, entry_id = end["next"].partition(":")
    longer = f"{ledger_id}:{int(entry_id) + 1}"
    read = next(one for one in reversed(_reads(lines)) if one["resume"] == end["next"])
    read["resume"] = end["next"] = longer
    read["runs"][-1]["values"].append(_acknowledged(lines)[0]["values"][0])


def _same_id(lines: list[Line]) -> None:
    """Two owners both acknowledge an entry under one id."""
    one, other = _acknowledged(lines)[4:6]
    other["ranges"] = one["ranges"]


def _refused(lines: list[Line]) -> None:
    """What was refused is there."""
    line = _acknowledged(lines)[2]
    line["outcome"] = "failed"
    del line["ranges"]


def _too_early(lines: list[Line]) -> None:
    """A read tells a value before its append was called."""
    last = _acknowledged(lines)[-1]
    call_ns = next(one["call_ns"] for one in lines if one["type"] == "append")
    for read in _reads(lines):
        if last["values"][0] in [value for run in read["runs"] for value in run["values"]]:
            lines.append({**read, "call_ns": call_ns - 20, "return_ns": call_ns - 10})
            return


def _skipped_id(lines: list[Line]) -> None:
    """The ids of a ledger are not dense: the last entry lies one further."""
    end = _final(lines)
    ledger_id, _, entry_id = end["next"].partition(":")
    longer = f"{ledger_id}:{int(entry_id) + 1}"
    last = _acknowledged(lines)[-1]
    last["ranges"] = [_range((int(ledger_id), int(entry_id)))]
    for read in _reads(lines):
        if read["resume"] == end["next"] and read["runs"]:
            *_, value = read["runs"][-1]["values"]
            read["runs"][-1]["values"].pop()
            run = {"ledger_id": int(ledger_id), "first_entry_id": int(entry_id), "values": [value]}
            read["runs"].append(run)
            read["resume"] = longer
    end["next"] = longer


def _skipping_read(lines: list[Line]) -> None:
    """A read leaves its last entry out and goes on behind it."""
    read = next(one for one in _reads(lines) if sum(len(run["values"]) for run in one["runs"]) > 1)
    read["runs"][-1]["values"].pop()


def _gone_again(lines: list[Line]) -> None:
    """An append without an answer was read, and is not there at the end."""
    end = _final(lines)
    ledger_id, _, entry_id = end["next"].partition(":")
    value = "9.1/10/00000999"
    run = {"ledger_id": int(ledger_id), "first_entry_id": int(entry_id), "values": [value]}
    longer = f"{ledger_id}:{int(entry_id) + 1}"
    when = end["call_ns"]
    append = {"type": "append", "client": 9, "outcome": "unknown", "values": [value]}
    lines.append({**append, "call_ns": when - 30})
    read = {"type": "read", "client": 9, "outcome": "ok", "from": end["next"], "resume": longer}
    lines.append({**read, "runs": [run], "call_ns": when - 20, "return_ns": when - 10})


def _short_end(lines: list[Line]) -> None:
    """Bounds tell an end before an entry that was acknowledged before they were asked."""
    last = _acknowledged(lines)[-1]
    ledger_id, entry_id = (last["ranges"][0][key] for key in ("ledger_id", "first_entry_id"))
    when = last["return_ns"]
    told = {"type": "bounds", "client": 9, "outcome": "ok", "next": f"{ledger_id}:{entry_id}"}
    lines.append({**told, "final": False, "call_ns": when + 1, "return_ns": when + 2})


LIES: Final[dict[str, tuple[Callable[[list[Line]], None], str]]] = {
    "a lost acknowledgement at the end": (_lost_tail, "lost:"),
    "a lost acknowledgement within": (_lost_within, "lost:"),
    "a changed value": (_changed, "changed:"),
    "a value that one read saw changed": (_changed_once, "changed:"),
    "two appends in the wrong order": (_reordered, "out of order:"),
    "a duplicate": (_twice, "twice:"),
    "one id given twice": (_same_id, "changed:"),
    "a refused append that is there": (_refused, "refused, and there:"),
    "a value read before it was appended": (_too_early, "read before it was appended:"),
    "an id left out": (_skipped_id, "hole:"),
    "a read that skips an entry": (_skipping_read, "no order"),
    "an end that leaves out an acknowledged entry": (_short_end, "short end:"),
    "an entry that was read and went": (_gone_again, "lost:"),
}
"""What is wrong, the doctoring, and how the judge's words begin."""
