"""Recovers the states that power cuts leave, and compares each with what was answered.

Two levels: a node's first life is cut at every operation; a seeded choice of the disks that this
leaves begins a second life (replay, reads, a few adds), which is cut at every operation, too.

Invariant: a state is counted once, by digest; it is judged at every cut that may leave it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from tests.crash_states.checker import Expectation, Key, Observation, observe
from tests.crash_states.life import (
    ROOTS,
    VIRTUAL_S_MAX,
    open_node,
    record_first_life,
    record_next_life,
    running,
)
from tests.crash_states.model import Cut, State, cuts
from tests.crash_states.ram import RamFiles
from tests.crash_states.recorder import Recording
from tests.simulation.virtual_loop import run_virtual
from tierlog.format.run import Run

DEEP_SHARE = 0.1
"""So many states are opened a second time, after an orderly end: nothing may have changed."""


class CrashStateError(AssertionError):
    """A legal disk on which something is not as it was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How far to look."""

    kind: str
    seed: int
    roots: tuple[str, ...] = ROOTS[:1]
    steps: int = 40
    states_per_cut: int = 64
    next_lives: int = 6
    states_per_next_cut: int = 16
    states_max: int = 10**9
    """About so many in all; fewer are looked at at each cut then, but every cut is made."""
    only: str = ""
    """End at findings with this text alone: to see what else a defect does."""


@dataclass(slots=True)
class Tally:
    """What was looked at."""

    cuts: int = 0
    lives: int = 0
    observations: dict[bytes, Observation] = field(default_factory=dict)
    judgements: int = 0

    @property
    def states(self) -> int:
        """Distinct disks."""
        return len(self.observations)


def explore(plan: Plan) -> Tally:
    """Look at the states of one workload; ``CrashStateError`` at the first that is wrong."""
    search = _Search(plan)
    recording = record_first_life(plan.kind, plan.seed, steps=plan.steps, roots=plan.roots)
    share = plan.states_max * 2 // 3 if plan.next_lives else plan.states_max
    chosen = search.explore_life(recording, Expectation(), {}, plan.states_per_cut, share)
    for number, (state, before) in enumerate(chosen):
        try:
            following = record_next_life(
                state.files,
                state.directories,
                before.asked,
                plan.seed * 1000 + number,
                roots=plan.roots,
            )
        except Exception as error:
            if plan.only:
                continue
            raise CrashStateError(f"{plan}: life {number} fails") from error
        share = plan.states_max // 3 // len(chosen)
        search.explore_life(following, before, before.asked, plan.states_per_next_cut, share)
    return search.tally


class _Search:
    def __init__(self, plan: Plan) -> None:
        self.tally = Tally()
        self._plan = plan
        self._rng = random.Random(f"states/{plan.kind}/{plan.seed}")

    def explore_life(
        self,
        recording: Recording,
        expected: Expectation,
        before: Mapping[Key, Run],
        states_per_cut: int,
        states_max: int,
    ) -> list[tuple[State, Expectation]]:
        """Cut one life at every operation; return some states, with what holds for them."""
        self.tally.lives += 1
        known = dict(before) | _asked(recording)
        counts = [model.count_states(self._rng) for _, model in cuts(recording)]
        per_cut = _fair_share(counts, states_per_cut, states_max)
        wanted = set(self._rng.sample(range(len(counts)), min(len(counts), self._plan.next_lives)))
        chosen: list[tuple[State, Expectation]] = []
        done = 0
        for number, (cut, model) in enumerate(cuts(recording)):
            self.tally.cuts += 1
            expected.follow(recording.operations[done : cut.first])
            done = cut.first
            at_last = expected.copy()
            at_last.follow(recording.operations[cut.first : cut.last])
            at_last.free_asked = expected.free_asked  # the cut may have come before the question
            states = list(model.states(self._rng, states_max=per_cut))
            for state in states:
                self._judge(state, cut, known, at_last)
            if number in wanted:
                chosen.append((self._rng.choice(states), at_last.copy()))
        return chosen

    def _judge(
        self, state: State, cut: Cut, known: Mapping[Key, Run], expected: Expectation
    ) -> None:
        plan, tally = self._plan, self.tally
        seen = tally.observations.get(state.digest)
        if seen is None:
            seen = look_at(state, known, plan.roots, deep=self._rng.random() < DEEP_SHARE)
            tally.observations[state.digest] = seen
        tally.judgements += 1
        wrong = [what for what in expected.judge(seen) if plan.only in what]
        if wrong:
            where = f"{plan}, life {tally.lives}, cut {cut}, state {state.digest.hex()}"
            raise CrashStateError("\n".join([where, *_listing(state), *wrong]))


def look_at(
    state: State, known: Mapping[Key, Run], roots: Sequence[str], *, deep: bool = False
) -> Observation:
    """Open a disk and read all of it; an error is an observation, too."""
    with structlog.testing.capture_logs():
        try:
            return run_virtual(_look(state, known, roots, deep=deep), until_s=VIRTUAL_S_MAX)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
            return Observation(wrong=[f"opening or reading ends with {_inner(error)!r}"])


async def _look(
    state: State, known: Mapping[Key, Run], roots: Sequence[str], *, deep: bool
) -> Observation:
    image: dict[str, bytes | bytearray] = dict(state.files)
    folders = [RamFiles(image, root=root) for root in roots]
    for folder in folders:
        folder.directories.update(state.directories)
    async with running(await open_node(folders), in_order=deep) as node:
        seen = await observe(node, known)
    if deep:
        async with running(await open_node(folders, 2), in_order=False) as node:
            again = await observe(node, known)
        for ledger_id, one in seen.ledgers.items():
            other = again.ledgers[ledger_id]
            if one.runs != other.runs or one.gone != other.gone:
                seen.wrong.append(f"ledger {ledger_id} is another after a stop: {other}")
            if not (other.fenced or other.gone):
                seen.wrong.append(f"ledger {ledger_id} lost its fence at an orderly stop")
            seen.wrong += other.wrong
        seen.wrong += again.wrong
    return seen


def _fair_share(counts: list[int], most: int, total: int) -> int:
    """Return how many states to look at at each cut, so that it is about ``total`` in all."""
    low, high = 2, max(2, most)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(one, middle) for one in counts) <= total:
            low = middle
        else:
            high = middle - 1
    return low


def _asked(recording: Recording) -> dict[Key, Run]:
    later = Expectation()
    later.follow(recording.operations)
    return later.asked


def _listing(state: State) -> list[str]:
    return [f"  {path}: {len(data)} bytes" for path, data in state.files.items()]


def _inner(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
