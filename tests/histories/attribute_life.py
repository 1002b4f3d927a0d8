"""One history of attributes: clients that update and read a few while things go wrong.

Owns what clients do and how a history ends: everything is mended, and each attribute is read once
more, so that the judge sees what became of it.

An answer that is lost leaves a call that is open for ever, and the judge has to try each of them
at every place behind it. So an attribute with several open calls is left for another one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tests.exactly_once.losing import open_losing_client
from tests.histories.attribute_recorder import RecordedAttributes
from tests.histories.life import END_S_MAX, Plan
from tests.histories.nemeses import Plague, infest
from tests.histories.recorder import History
from tierlog.client import open_client
from tierlog.format.entry import AttributeUpdate, Verb
from tierlog.model.errors import IndeterminateError, TierlogError
from tierlog.model.policy import Policy

if TYPE_CHECKING:
    from pathlib import Path

    from tests.histories.cluster import HistoryCluster

STREAM: Final = "history.attributes"
LOST: Final = 0.03
"""Of so many updates the answer is lost on its way."""
BACKOFF_S: Final = 0.2
PAUSE_S_MAX: Final = 0.02
GETS: Final = 0.4
OPEN_MAX: Final = 4
CALLS_MAX: Final = 150
LEDGER_ENTRIES: Final = (20, 200, 100_000)
ATTRIBUTES: Final = "TIERLOG_INGEST__OWNER__ATTRIBUTES__"
SMALL: Final = {
    f"{ATTRIBUTES}CACHED_MAX": "12",
    f"{ATTRIBUTES}CHECKPOINT_UPDATES": "5",
    f"{ATTRIBUTES}PAGE_CACHE_BYTES_MAX": "1",
    f"{ATTRIBUTES}CHUNK_OBJECTS_MAX": "8",
}
"""Nodes flush all the time and keep little in memory, so that values come from tier 2 as well."""


class Numbers:
    """Values that are each given once, ascending."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Return the next one."""
        self._last += 1
        return 1000 * self._last

    def about_next(self, rng: random.Random) -> int:
        """Return one that need not be the highest so far."""
        self._last += 1
        return 1000 * (self._last - rng.randrange(20)) + self._last % 1000


@dataclass(eq=False)
class Register:
    """Attributes that are used together, and what was last heard of them."""

    kind: str
    keys: tuple[UUID, ...]
    heard: dict[UUID, int | None] = field(default_factory=dict)
    calls: int = 0
    open: int = 0

    @property
    def is_worn(self) -> bool:
        """Whether another one is to be used from now on."""
        return self.open >= OPEN_MAX or self.calls >= CALLS_MAX


Choose = Callable[[Register, Numbers, random.Random], list[AttributeUpdate]]


def _update(verb: Verb, key: UUID, value: int, expected: int = 0) -> AttributeUpdate:
    return AttributeUpdate(key=key, verb=verb, value=value, expected=expected)


def _replace(register: Register, numbers: Numbers, _: random.Random) -> list[AttributeUpdate]:
    return [_update(Verb.REPLACE, register.keys[0], numbers.next())]


def _accumulate(register: Register, _: Numbers, rng: random.Random) -> list[AttributeUpdate]:
    # So large that a sum tells which were added.
    return [_update(Verb.ACCUMULATE, register.keys[0], rng.randrange(1, 1 << 48))]


def _raise(register: Register, numbers: Numbers, rng: random.Random) -> list[AttributeUpdate]:
    (key,) = register.keys
    if register.heard.get(key) is None:
        return [_update(Verb.REPLACE_IF_ABSENT, key, numbers.next())]
    return [_update(Verb.REPLACE_IF_GREATER, key, numbers.about_next(rng))]


def _exchange(register: Register, numbers: Numbers, _: random.Random) -> list[AttributeUpdate]:
    key = register.keys[0]
    heard = register.heard.get(key)
    if heard is None:
        return [_update(Verb.REPLACE_IF_ABSENT, key, numbers.next())]
    return [_update(Verb.REPLACE_IF_EQUALS, key, numbers.next(), heard)]


def _any(register: Register, numbers: Numbers, rng: random.Random) -> list[AttributeUpdate]:
    choose = rng.choice((_replace, _accumulate, _raise, _exchange))
    return choose(register, numbers, rng)


def _both(register: Register, numbers: Numbers, rng: random.Random) -> list[AttributeUpdate]:
    one, other = register.keys
    if rng.random() < 0.5:
        amount = rng.randrange(1, 1 << 48)
        return [_update(Verb.ACCUMULATE, one, amount), _update(Verb.ACCUMULATE, other, -amount)]
    # The second check fails as often as not, and then the first change is not made either.
    first = _update(Verb.REPLACE, other, numbers.next())
    return [first, *_exchange(register, numbers, rng)]


KINDS: Final[dict[str, tuple[int, Choose]]] = {
    "replace": (1, _replace),
    "accumulate": (1, _accumulate),
    "replace-if-greater": (1, _raise),
    "replace-if-equals": (1, _exchange),
    "any": (1, _any),
    "two at once": (2, _both),
}
"""How many attributes, and what is done with them."""


class Registers:
    """The attributes in use, one register a kind, and those that were."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.numbers = Numbers()
        self.all: list[Register] = []
        self._used = {kind: self._made(kind) for kind in KINDS}

    def pick(self, rng: random.Random) -> Register:
        """Return one to do something with."""
        kind = rng.choice(list(KINDS))
        if self._used[kind].is_worn:
            self._used[kind] = self._made(kind)
        return self._used[kind]

    def _made(self, kind: str) -> Register:
        count, _ = KINDS[kind]
        # The first bit is set, so that none is a core attribute's.
        keys = tuple(UUID(int=self._rng.getrandbits(127) | 1 << 127) for _ in range(count))
        self.all.append(Register(kind, keys))
        return self.all[-1]


async def _use(recorded: RecordedAttributes, registers: Registers, rng: random.Random) -> None:
    """Do one thing with one register."""
    register = registers.pick(rng)
    register.calls += 1
    if rng.random() < GETS:
        register.heard |= await recorded.get(register.keys)
        return
    _, choose = KINDS[register.kind]
    updates = choose(register, registers.numbers, rng)
    try:
        found = await recorded.update(updates)
    except (IndeterminateError, TimeoutError):
        register.open += 1
        raise
    if found is not None:
        register.heard |= found
    else:
        # Sums are not told.
        sets = [one for one in updates if one.verb is not Verb.ACCUMULATE]
        register.heard |= {one.key: one.value for one in sets}


async def _live(
    cluster: HistoryCluster,
    history: History,
    registers: Registers,
    stop: asyncio.Event,
    number: int,
    rng: random.Random,
) -> None:
    """Use registers until told to stop, with connections of one's own."""
    async with open_losing_client(cluster.settings, rng=rng, lost=LOST) as client:
        recorded = RecordedAttributes(client.attributes(STREAM), history, number=number)
        while not stop.is_set():
            try:
                await _use(recorded, registers, rng)
            except (TierlogError, TimeoutError):
                await asyncio.sleep(BACKOFF_S)
            await asyncio.sleep(rng.uniform(0.0, PAUSE_S_MAX))


async def _read_all(recorded: RecordedAttributes, registers: Registers) -> None:
    """Read every register once more; everything is mended, and may need a moment to be found."""
    async with asyncio.timeout(END_S_MAX):
        for register in registers.all:
            while True:
                try:
                    await recorded.get(register.keys)
                except (TierlogError, TimeoutError):
                    await asyncio.sleep(BACKOFF_S)
                else:
                    break


async def record_attributes(
    cluster: HistoryCluster, path: Path, *, seed: int, plan: Plan
) -> dict[str, int]:
    """Live one history and write it to a file; return how often each fault came."""
    rng = random.Random(seed)
    policy = Policy(ledger_entries_max=rng.choice(LEDGER_ENTRIES))
    header = {
        "of": "attributes",
        "stream": STREAM,
        "seed": seed,
        "nodes": len(cluster.nodes),
        "ledger_entries_max": policy.ledger_entries_max,
    }
    registers = Registers(random.Random(rng.random()))
    stop = asyncio.Event()
    with History(path, **header) as history:
        plague = Plague(cluster, history, STREAM, random.Random(rng.random()))
        async with open_client(cluster.settings) as client:
            await client.create_stream(STREAM, policy=policy)
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, plan.writers + 1):
                own = random.Random(rng.random())
                tasks.create_task(_live(cluster, history, registers, stop, number, own))
            await infest(plague, seconds=plan.seconds, names=plan.faults, rounds=plan.rounds)
            stop.set()
        # Nodes may have come and gone.
        async with open_client(cluster.settings) as client:
            recorded = RecordedAttributes(client.attributes(STREAM), history, number=0)
            await _read_all(recorded, registers)
    return plague.counts
