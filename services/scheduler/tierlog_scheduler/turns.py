"""Whose turn it is in a pass, among all that may take long: deletions, sweeps, trimming.

Owns the order of streams, and of one stream's actions, and where the next pass goes on. Does not
own what is to be done (``policy``, ``retention``), nor doing it (``actions``). Knows for how long
something has failed each time that its turn came: of each stream one action, the oldest that did.

Invariants:
    * Behind ``TURNS_S_MAX`` nothing begins: a pass takes so long for all of it, and one action.
    * A pass begins with whoever had no turn in the one before, and goes around: each stream has
      its turn, and each action of a stream, also where others take long and fail each time.
"""

from collections.abc import Collection, Container, Iterable, Iterator
from typing import Final, NamedTuple

import structlog

from tierlog.model.ids import StreamName
from tierlog.ports.clock import Clock
from tierlog_scheduler.policy import AbandonStalled, Action, DeleteTier1, SweepAbandoned
from tierlog_scheduler.retention import BeginTrim, DropTrimmed, FinishTrim, Trimming

log = structlog.get_logger()

TURNS_S_MAX: Final = 30.0


class Place(NamedTuple):
    """Where an action stands among its stream's: there again in the next pass, if still due."""

    ledger_id: int
    kind: int = 0
    uuid: int = 0


def place_of(action: Action | Trimming) -> Place:
    """Return an action's place, which no other one of its stream has."""
    match action:
        case BeginTrim():
            return Place(action.ledger_ids[0])
        case AbandonStalled() | DropTrimmed() | FinishTrim():
            return Place(action.ledger_id, 1)
        case SweepAbandoned():
            return Place(action.ledger_id, 2, action.attempt.uuid.int)
        case DeleteTier1():
            return Place(action.context.ledger_id, 3)
        case _:
            # Of the whole stream: it has one at most.
            return Place(-1)


class _Failing(NamedTuple):
    """An action that fails: since when it was seen to, and has been to be done by the metadata."""

    at: Place
    seen_s: float
    stamp_ms: int | None


def stamp_of(action: Action | Trimming) -> int | None:
    """Return since when an action has been to be done; None: the metadata do not say."""
    if isinstance(action, SweepAbandoned):
        return max(action.attempt.abandoned_ms, action.attempt.swept_ms)
    return None


class Turns:
    """The turns of one pass after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.forget()

    def __repr__(self) -> str:
        return f"<Turns stream={self._stream!r} streams_cut={len(self._places)}>"

    def forget(self) -> None:
        """Know nothing of what was put off."""
        self._stream: StreamName | None = None
        self._places: dict[StreamName, Place] = {}
        self._failing: dict[StreamName, _Failing] = {}
        self._until_s = 0.0
        self._behind_since_s: float | None = None
        self._cut = False

    @property
    def behind_s(self) -> float:
        """For how long no pass has come to the end of what was due; the one after tells of it."""
        since_s = self._behind_since_s
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    @property
    def failing_s(self) -> float:
        """For how long something that is still due has failed whenever it was tried.

        Where the metadata say so, since before this leader's term.
        """
        return max(map(self._fails_for_s, self._failing.values()), default=0.0)

    def _fails_for_s(self, one: _Failing) -> float:
        seen_s = self._clock.monotonic_s() - one.seen_s
        if one.stamp_ms is None:
            return seen_s
        return max(seen_s, (self._clock.wall_ms() - one.stamp_ms) / 1000)

    def note(self, name: StreamName, action: Action | Trimming, *, failed: bool) -> None:
        """Note how an action ended."""
        known = self._failing.get(name)
        one = _Failing(place_of(action), self._clock.monotonic_s(), stamp_of(action))
        if known is not None and known.at == one.at:
            if not failed:
                del self._failing[name]
        elif failed and (known is None or self._fails_for_s(one) > self._fails_for_s(known)):
            self._failing[name] = one

    def begin(
        self, due: Collection[StreamName], *, known: Container[StreamName]
    ) -> list[StreamName]:
        """Let the time of a pass begin; return the streams in their order."""
        if not self._cut:
            self._behind_since_s = None
        self._cut = False
        self._places = {name: at for name, at in self._places.items() if name in known}
        self._failing = {name: one for name, one in self._failing.items() if name in due}
        self._until_s = self._clock.monotonic_s() + TURNS_S_MAX
        first, self._stream = self._stream, None
        return sorted(due, key=lambda name: (first is not None and name < first, name))

    def has_turn(self, name: StreamName) -> bool:
        """Tell whether there is time for a stream; if not, the next pass begins with it."""
        if self._clock.monotonic_s() < self._until_s:
            return True
        self._stream = name
        self._fall_behind()
        log.info("streams.put_off", stream=name)
        return False

    def of(
        self, name: StreamName, actions: Iterable[Action | Trimming]
    ) -> Iterator[Action | Trimming]:
        """Iterate over a stream's actions: one, and as many more as there is time for."""
        first = self._places.pop(name, Place(-1))
        due = sorted(actions, key=lambda one: (place_of(one) < first, place_of(one)))
        if name in self._failing and self._failing[name].at not in map(place_of, due):
            del self._failing[name]
        for count, one in enumerate(due):
            if count and self._clock.monotonic_s() >= self._until_s:
                self._places[name] = place_of(one)
                self._fall_behind()
                log.info("deletions.put_off", stream=name, left=len(due) - count)
                return
            yield one

    def _fall_behind(self) -> None:
        self._cut = True
        if self._behind_since_s is None:
            self._behind_since_s = self._clock.monotonic_s()
