"""Histories of attributes made up: good ones, and each way in which registers could lie.

Owns a small world of registers in a time of its own, written anew here from what the verbs are to
do. The judge has to pass what it makes, and to find each lie.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

Line = dict[str, Any]

HEADER: Final[Line] = {"type": "history", "version": 1, "of": "attributes", "stream": "made.up"}
WORD, SUM, CHAIN, PEAK, LEFT, RIGHT = "word", "sum", "chain", "peak", "left", "right"
NOBODYS: Final = 999


def after(values: dict[str, int], updates: list[Line]) -> tuple[dict[str, int], Line | None]:
    """Return the values after all updates; or as they are, and what is in the way."""
    made = dict(values)
    for one in updates:
        key, value = one["key"], one["value"]
        now = made.get(key)
        holds = {
            "replace": True,
            "replace-if-greater": now is not None and value > now,
            "replace-if-equals": now is not None and now == one.get("expected"),
            "replace-if-absent": now is None,
            "accumulate": True,
        }[one["verb"]]
        if not holds:
            return values, {"key": key, "value": now}
        made[key] = value + (now or 0) if one["verb"] == "accumulate" else value
    return made, None


@dataclass
class MadeUp:
    """Registers, and the lines of those who use them; ``at`` of a line is when it took effect."""

    rng: random.Random
    values: dict[str, int] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    now: int = 1000
    number: int = 0

    def timed(self, kind: str, outcome: str = "ok", **told: Any) -> Line:
        """Write an operation down whose effect is now."""
        line = {"type": kind, "client": self.rng.randrange(5), "outcome": outcome, **told}
        line |= {"at": self.now, "call_ns": self.now - self.rng.randrange(1, 40)}
        if outcome != "unknown":
            line["return_ns"] = self.now + self.rng.randrange(1, 40)
        self.lines.append(line)
        return line

    def update(self, *updates: Line, outcome: str = "ok", lands: bool = True) -> None:
        """Update registers."""
        line = self.timed("update", outcome, updates=list(updates))
        if lands:
            self.values, found = after(self.values, list(updates))
            if found is not None and outcome == "ok":
                line["found"] = found

    def get(self, *keys: str) -> Line:
        """Read registers."""
        told = [{"key": key, "value": self.values.get(key)} for key in keys]
        return self.timed("get", registers=told)

    def fresh(self) -> int:
        """Return a value that nobody else sets."""
        self.number += 1
        return 1000 * self.number

    def step(self) -> None:
        """Do something."""
        self.now += self.rng.randrange(1, 30)
        chance = self.rng.random()
        if chance < 0.4:
            self.get(*self.rng.choice(((WORD,), (SUM,), (CHAIN,), (PEAK,), (LEFT, RIGHT))))
        elif chance < 0.8:
            self.update(*self.rng.choice(self._updates()))
        elif chance < 0.84:
            self.update(self._some(WORD, "replace"), outcome="failed", lands=False)
        elif chance < 0.88:
            # Less than what is ever acknowledged, so that sums tell the difference.
            lost = {"key": SUM, "verb": "accumulate", "value": self.rng.randrange(1, 1000)}
            self.update(lost, outcome="unknown", lands=self.rng.random() < 0.5)
        elif chance < 0.9:
            lands = self.rng.random() < 0.5
            self.update(self._some(WORD, "replace"), outcome="unknown", lands=lands)
        else:
            self.lines.append({"type": "event", "at_ns": self.now, "what": "kill -9"})

    def _some(self, key: str, verb: str) -> Line:
        return {"key": key, "verb": verb, "value": self.fresh()}

    def _updates(self) -> list[list[Line]]:
        amount = self.rng.randrange(1 << 30, 1 << 31)
        heard = self.values.get(CHAIN, 0) + self.rng.choice((0, 0, 1))
        return [
            [self._some(WORD, "replace")],
            [{"key": SUM, "verb": "accumulate", "value": amount}],
            [self._some(CHAIN, "replace-if-absent")],
            [{**self._some(CHAIN, "replace-if-equals"), "expected": heard}],
            [self._some(PEAK, "replace" if PEAK not in self.values else "replace-if-greater")],
            [{"key": PEAK, "verb": "replace-if-greater", "value": 1}],
            [
                {"key": LEFT, "verb": "accumulate", "value": amount},
                {"key": RIGHT, "verb": "accumulate", "value": -amount},
            ],
        ]


def good(seed: int, *, steps: int = 400) -> list[Line]:
    """Return a history that is linearizable."""
    made = MadeUp(random.Random(seed))
    for _ in range(steps):
        made.step()
    for keys in ((WORD,), (SUM,), (CHAIN,), (PEAK,), (LEFT, RIGHT)):
        made.now += 100
        made.get(*keys)
    # Lines are written when an operation ends.
    made.lines.sort(key=lambda line: int(line.get("return_ns") or line.get("call_ns") or 0))
    return [dict(HEADER, seed=seed), *made.lines]


def _updates(lines: list[Line], key: str, verb: str, outcome: str = "ok") -> list[Line]:
    """Return the updates of a register by a verb that were made."""
    return [
        one
        for one in lines
        if one["type"] == "update"
        and (one["updates"][0]["key"], one["updates"][0]["verb"]) == (key, verb)
        and one["outcome"] == outcome
        and "found" not in one
    ]


def _checks_failed(lines: list[Line], key: str, verb: str) -> list[Line]:
    return [
        one
        for one in lines
        if "found" in one and (one["found"]["key"], one["updates"][0]["verb"]) == (key, verb)
    ]


def _gets(lines: list[Line], key: str) -> list[Line]:
    """Return what was told of a register, with the times of the get."""
    return [
        {"line": one, "told": told}
        for one in lines
        if one["type"] == "get"
        for told in one["registers"]
        if told["key"] == key
    ]


def _stale(lines: list[Line]) -> None:
    """A get tells a value after another one had been acknowledged."""
    first, second, *_ = _updates(lines, WORD, "replace")
    assert first["return_ns"] < _gets(lines, WORD)[-1]["line"]["call_ns"]
    later = next(
        one
        for one in _updates(lines, WORD, "replace")
        if one["call_ns"] > first["return_ns"] and one is not second
    )
    victim = next(one for one in _gets(lines, WORD) if one["line"]["call_ns"] > later["return_ns"])
    victim["told"]["value"] = first["updates"][0]["value"]


def _from_then_on(lines: list[Line], update: Line, times: int) -> None:
    """Let an accumulate count so many times more, in all that is told behind it."""
    for one in _gets(lines, SUM):
        if one["line"]["at"] > update["at"]:
            one["told"]["value"] += times * update["updates"][0]["value"]


def _lost_sum(lines: list[Line]) -> None:
    """An accumulate that was acknowledged is in no sum."""
    _from_then_on(lines, _updates(lines, SUM, "accumulate")[2], -1)


def _applied_twice(lines: list[Line]) -> None:
    """An accumulate was applied twice: sent again after a lost answer, say."""
    _from_then_on(lines, _updates(lines, SUM, "accumulate")[2], 1)


def _lost_at_the_end(lines: list[Line]) -> None:
    """The last accumulate is gone when everything is mended, and was there before."""
    last = _gets(lines, SUM)[-1]
    last["told"]["value"] -= _updates(lines, SUM, "accumulate")[-1]["updates"][0]["value"]


def _wrong_check(lines: list[Line]) -> None:
    """A check that failed tells a value that the register never had."""
    _checks_failed(lines, CHAIN, "replace-if-equals")[0]["found"]["value"] = NOBODYS


def _passed_check(lines: list[Line]) -> None:
    """A check passes though the register is otherwise."""
    del _checks_failed(lines, CHAIN, "replace-if-equals")[0]["found"]


def _passed_greater(lines: list[Line]) -> None:
    """A lower value takes a greater one's place."""
    del _checks_failed(lines, PEAK, "replace-if-greater")[0]["found"]


def _absent_twice(lines: list[Line]) -> None:
    """A register is found absent twice."""
    del _checks_failed(lines, CHAIN, "replace-if-absent")[0]["found"]


def _half(lines: list[Line]) -> None:
    """A get sees one of two changes that were made at once."""
    batch = _updates(lines, LEFT, "accumulate")[-1]
    seen = next(one for one in _gets(lines, LEFT) if one["line"]["at"] > batch["at"])
    seen["told"]["value"] -= batch["updates"][0]["value"]


def _refused(lines: list[Line]) -> None:
    """What was refused is there."""
    seen = {one["told"]["value"] for one in _gets(lines, WORD)}
    made = _updates(lines, WORD, "replace")
    victim = next(one for one in made if one["updates"][0]["value"] in seen)
    victim["outcome"] = "failed"


def _nobodys(lines: list[Line]) -> None:
    """A get tells a value that nobody set."""
    _gets(lines, WORD)[-2]["told"]["value"] = NOBODYS


def _too_early(lines: list[Line]) -> None:
    """A get tells a value before it is set."""
    last = _updates(lines, WORD, "replace")[-1]
    told = {"key": WORD, "value": last["updates"][0]["value"]}
    when = {"call_ns": 10, "return_ns": 20, "at": 15}
    lines.append({"type": "get", "client": 9, "outcome": "ok", "registers": [told], **when})


def _gone_again(lines: list[Line]) -> None:
    """An update without an answer was seen, and then what was acknowledged before it."""
    final = _gets(lines, WORD)[-1]
    before, seen, when = 10**9, 10**9 + 1, final["line"]["call_ns"] - 20

    def update(value: int, outcome: str, **times: int) -> Line:
        change = {"key": WORD, "verb": "replace", "value": value}
        return {"type": "update", "outcome": outcome, "updates": [change], **times}

    told = {"type": "get", "outcome": "ok", "registers": [{"key": WORD, "value": seen}]}
    lines += [
        update(before, "ok", call_ns=when, return_ns=when + 2),
        update(seen, "unknown", call_ns=when + 3),
        {**told, "call_ns": when + 5, "return_ns": when + 10},
    ]
    final["told"]["value"] = before


LIES: Final[dict[str, tuple[Callable[[list[Line]], None], str]]] = {
    "a stale get": (_stale, "stale:"),
    "a lost accumulate": (_lost_sum, "lost:"),
    "an accumulate applied twice": (_applied_twice, "too much:"),
    "an accumulate lost at the end": (_lost_at_the_end, "lost:"),
    "a check that tells what never was": (_wrong_check, "stranger:"),
    "a check that passes and must not": (_passed_check, "no order"),
    "a greater value replaced": (_passed_greater, "no order"),
    "absent twice": (_absent_twice, "made twice:"),
    "half of a batch": (_half, "no order"),
    "a refused update that is there": (_refused, "refused, and there:"),
    "a value that nobody set": (_nobodys, "stranger:"),
    "a value told before it was set": (_too_early, "told before it was set:"),
    "an update that was seen and went": (_gone_again, "no order"),
}
"""What is wrong, the doctoring, and how the judge's words begin."""
