"""What must hold on every disk that a power cut may leave (protocols.md section 2).

    opens       the node opens it, in bounded time, and calls nothing damaged
    kept        each entry whose add was answered is there, the same bytes, under its id
    invented    nothing is there that nobody sent, nothing twice
    dense       of a ledger's runs, a later one is there only with the earlier
    fenced      a fence that was answered refuses ordinary adds; none is invented
    freed       a ledger whose free was answered is gone, and its id refuses adds; none is invented
    stable      what a read brought, or a recovery read called absent, stays so after another cut
    alive       a ledger that was not fenced takes adds, and reads tell four answers apart

Owns: reading everything (``observe``) and comparing it with what was asked and answered
(``Expectation``). An observation depends on the disk alone, so that one that is legal at several
cuts is opened once and judged at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.crash_states.recorder import Mark, Operation
from tests.unit.storage.node_kit import make_run, outcome
from tierlog.format.run import Run
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.storage_node import LacAnswer

Key = tuple[int, int]
"""A ledger, and the first entry of a run in it."""

LEDGERS = (1, 2, 3, 4)
PROBE_ENTRY_ID = 4000
"""No workload comes so far."""
BYTES_MAX = 10**8
COULD_NOT_READ = frozenset({Reason.UNKNOWN, Reason.CORRUPT})


@dataclass(slots=True)
class Seen:
    """What the node told of one ledger."""

    gone: bool = False
    fenced: bool = False
    runs: list[Key] = field(default_factory=list)
    absent: list[Key] = field(default_factory=list)
    unknown: list[Key] = field(default_factory=list)
    last_add_confirmed: int = -1
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Observation:
    """What the node told of everything."""

    ledgers: dict[int, Seen] = field(default_factory=dict)
    listed: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Expectation:
    """What was asked of the node, and answered, until some moment."""

    asked: dict[Key, Run] = field(default_factory=dict)
    stored: set[Key] = field(default_factory=set)
    absent: set[Key] = field(default_factory=set)
    fence_asked: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    free_asked: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)

    def copy(self) -> Expectation:
        """Return another that changes by itself."""
        return replace(
            self,
            asked=dict(self.asked),
            **{
                name: set(getattr(self, name))
                for name in ("stored", "absent", "fence_asked", "fenced", "free_asked", "freed")
            },
        )

    def follow(self, operations: Iterable[Operation]) -> None:
        """Take more of the log."""
        for one in operations:
            if isinstance(one, Mark):
                self._mark(one.what, one.subject)

    def _mark(self, what: str, subject: Any) -> None:
        if what == "asked":
            key, run = subject
            self.asked[key] = run
            self.absent.discard(key)
        elif what == "seen":
            self.stored.add(subject)
        else:
            getattr(self, what).add(subject)

    def judge(self, seen: Observation) -> list[str]:
        """Return what is wrong, in words."""
        wrong = list(seen.wrong)
        for ledger_id, one in seen.ledgers.items():
            wrong += [f"ledger {ledger_id}: {what}" for what in one.wrong]
            wrong += [f"ledger {ledger_id}: {what}" for what in self._judge_ledger(ledger_id, one)]
            if one.runs and ledger_id not in seen.listed:
                wrong.append(f"ledger {ledger_id} has entries, and is not listed")
        return wrong

    def _judge_ledger(self, ledger_id: int, seen: Seen) -> list[str]:
        wrong = []
        if seen.gone:
            if ledger_id not in self.free_asked:
                wrong.append("is gone, and nobody freed it")
            return wrong
        if ledger_id in self.freed:
            wrong.append("was freed, and is back")
        if ledger_id in self.fenced and not seen.fenced:
            wrong.append("lost its fence")
        if seen.fenced and ledger_id not in self.fence_asked:
            wrong.append("is fenced, and nobody asked for it")
        wrong += [f"{key} can't be read, though nothing is damaged" for key in seen.unknown]
        found = set(seen.runs)
        asked = [key for key in self.asked if key[0] == ledger_id]
        kept = {key for key in self.stored if key[0] == ledger_id}
        wrong += [f"{key} was answered, and is lost" for key in sorted(kept - found)]
        wrong += [f"{key} was never sent" for key in sorted(found - set(asked))]
        wrong += [f"{key} was absent, and is back" for key in sorted(found & self.absent)]
        gap = False
        for key in asked:
            if key in found and gap:
                wrong.append(f"{key} is there without what came before it")
            gap = gap or (key not in found and key not in self.absent)
        # A run tells the LAC to the node as soon as it comes, stored or not.
        low = max((self.asked[key].header.last_add_confirmed for key in kept), default=-1)
        high = max((self.asked[key].header.last_add_confirmed for key in asked), default=-1)
        if not low <= seen.last_add_confirmed <= high:
            wrong.append(f"its LAC is {seen.last_add_confirmed}, not from {low} to {high}")
        return wrong


async def read_ledger(node: Any, ledger_id: int, known: Mapping[Key, Run]) -> Seen:
    """Read all of a ledger as recovery does, which fences it."""
    seen = Seen()
    firsts = sorted(key[1] for key in known if key[0] == ledger_id)
    position = firsts[0] if firsts else 0
    end = await outcome(node.last_add_confirmed(LedgerId(ledger_id)))
    last_entry_id = end.last_entry_id if isinstance(end, LacAnswer) else -1
    while True:
        runs, error = await read_from(node, ledger_id, position)
        if not _note_runs(seen, ledger_id, runs, known):
            return seen
        if runs:
            position = runs[-1].last_entry_id + 1
        if error is None:
            if not runs:
                seen.wrong.append(f"a read from entry {position} brings nothing, and no error")
                return seen
            continue
        if error.reason is Reason.LEDGER_NOT_FOUND:
            seen.gone = True
            return seen
        missing = [first for first in firsts if first >= position]
        # One place behind the end is enough to ask for.
        missed = missing if position > last_entry_id else missing[: missing[:1] == [position]]
        _note_error(seen, error, [(ledger_id, first) for first in missed], position)
        if len(missed) == len(missing):
            return seen
        position = missing[len(missed)]


def _note_runs(seen: Seen, ledger_id: int, runs: list[Run], known: Mapping[Key, Run]) -> bool:
    """Take runs that a read brought; False when it makes no sense to go on."""
    for run in runs:
        key = ledger_id, run.first_entry_id
        if known.get(key) != run:
            seen.wrong.append(f"{run} is not what was sent")
            return False
        if seen.runs and run.first_entry_id <= known[seen.runs[-1]].last_entry_id:
            seen.wrong.append(f"{run} comes twice, or too late")
            return False
        seen.runs.append(key)
    return True


def _note_error(seen: Seen, error: TierlogError, missed: list[Key], position: int) -> None:
    if error.reason is Reason.NO_SUCH_ENTRY:
        seen.absent += missed
    elif error.reason in COULD_NOT_READ:
        seen.unknown += missed
    else:
        seen.wrong.append(f"entry {position}: {error.reason} {error}")


async def read_from(
    node: Any, ledger_id: int, first_entry_id: int, *, recovery: bool = True
) -> tuple[list[Run], TierlogError | None]:
    """Return the runs of one read, and the error that ended it."""
    runs: list[Run] = []
    reading = node.read(
        LedgerId(ledger_id), EntryId(first_entry_id), bytes_max=BYTES_MAX, recovery=recovery
    )
    try:
        async for brought in reading:
            runs += [brought] if isinstance(brought, Run) else brought
    except TierlogError as error:
        return runs, error
    return runs, None


async def observe(node: Any, known: Mapping[Key, Run]) -> Observation:
    """Ask a running node for everything. It is no longer the same afterwards."""
    seen = Observation()
    if node.damages:
        seen.wrong.append(f"the node calls damaged what is not: {node.damages}")
    seen.listed = set(await node.list_ledgers())
    for ledger_id in LEDGERS:
        probe = make_run(ledger_id, PROBE_ENTRY_ID, lac=-1)
        answer = await outcome(node.add(probe))
        one = await read_ledger(node, ledger_id, {**known, (ledger_id, PROBE_ENTRY_ID): probe})
        seen.ledgers[ledger_id] = one
        if isinstance(answer, TierlogError):
            one.fenced = answer.reason is Reason.FENCED
            if not one.fenced:
                one.wrong.append(f"it takes no adds: {answer}")
        elif one.gone:
            one.wrong.append("it took an add, and then it is gone")
        elif one.runs[-1:] != [(ledger_id, PROBE_ENTRY_ID)]:
            one.wrong.append("it took an add, which is not there")
        if not one.gone:
            sent = {**known, (ledger_id, PROBE_ENTRY_ID): probe}
            await _check_end(node, ledger_id, one, sent)
        one.runs = [key for key in one.runs if key[1] != PROBE_ENTRY_ID]
        one.absent = [key for key in one.absent if key[1] != PROBE_ENTRY_ID]
    return seen


async def _check_end(node: Any, ledger_id: int, one: Seen, known: Mapping[Key, Run]) -> None:
    end = await node.last_add_confirmed(LedgerId(ledger_id))
    one.last_add_confirmed = end.last_add_confirmed
    last = known[one.runs[-1]].last_entry_id if one.runs else -1
    if end.last_entry_id != last:
        one.wrong.append(f"it ends with {last}, but says {end.last_entry_id}")
    confirmed, error = await read_from(node, ledger_id, 0, recovery=False)
    if error is not None and error.reason not in {Reason.NOT_YET, Reason.NO_SUCH_ENTRY}:
        one.wrong.append(f"an ordinary read fails: {error}")
    keys = [(ledger_id, run.first_entry_id) for run in confirmed]
    if keys != one.runs[: len(keys)]:
        one.wrong.append(f"an ordinary read brings {keys}, not {one.runs}")
