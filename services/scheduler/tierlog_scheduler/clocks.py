"""How much time has passed: for sure, where something is deleted; at most, where it is kept.

Owns the meaning of two clocks that are both doubted. The wall clock jumps; the monotonic one
knows nothing of the time before its process. ``progress`` grows, step by step, by the smaller of
what the two say, and is checkpointed, so that it goes on under the next leader. Time without a
leader does not count.

``samples`` say what the wall clock showed at which progress: by them a time that another process
noted, by its wall clock, is turned into a progress, the latest that it can stand for.

Invariants:
    * ``surely_since`` never exceeds the true time since a stamp by more than ``JUMP_MS``, if the
      stamp was right by the wall clock of its time; however that jumps, and however often.
    * Neither way of a jump stops the time: what is lost is the one step that it happened in. Only
      a stamp that the wall clock showed twice, since it was set back, counts from the second time.
    * Losing the samples makes waits longer, never shorter. There are at most ``SAMPLES_MAX``.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from tierlog.model.offload import ClockSample, SchedulerProgress
from tierlog.ports.clock import Clock

SAMPLE_AGAIN_MS: Final = 10 * 60_000
JUMP_MS: Final = 2_000
SAMPLES_MAX: Final = 600
PARTS: Final = 64


class History:
    """What the wall clock showed at which progress, oldest first. Never changed once made."""

    def __init__(self, samples: Sequence[ClockSample] = ()) -> None:
        self.samples = tuple(samples)
        self._walls = [one.wall_ms for one in self.samples]
        self._went_back = any(after < before for before, after in pairwise(self._walls))

    def __repr__(self) -> str:
        return f"<History of {len(self.samples)} samples>"

    def latest(self, stamp_ms: int, now: ClockSample) -> int | None:
        """Return the latest progress at which the wall clock can have shown a time; None: never."""
        if not self._walls:
            return None
        if self._went_back or now.wall_ms < self._walls[-1]:
            return self._latest_of_all(stamp_ms, now)
        if not self._walls[0] <= stamp_ms <= now.wall_ms:
            return None
        after = bisect_right(self._walls, stamp_ms)
        return now.progress_ms if after == len(self._walls) else self.samples[after].progress_ms

    def _latest_of_all(self, stamp_ms: int, now: ClockSample) -> int | None:
        found: int | None = None
        for before, after in pairwise((*self.samples, now)):
            low, high = sorted((before.wall_ms, after.wall_ms))
            if low <= stamp_ms <= high:
                found = after.progress_ms
        return found

    def begin(self, now: ClockSample) -> ClockSample:
        """Return the earliest that is known."""
        return min((*self.samples, now), key=lambda one: one.wall_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Two clocks: the wall's, and how long leaders have been at work in all."""

    wall_ms: int
    progress_ms: int
    history: History = field(default_factory=History)

    def surely_since(self, stamp_ms: int, *, seen_ms: int | None = None) -> int:
        """Return how long a wall clock's stamp is past for sure; never less than 0.

        ``seen_ms``: the progress at which this leader saw it happen. Then no stamp is asked.
        """
        if seen_ms is not None:
            return max(0, self.progress_ms - seen_ms)
        here = ClockSample(self.wall_ms, self.progress_ms)
        then_ms = self.history.latest(stamp_ms, here)
        if then_ms is not None:
            elapsed_ms = self.progress_ms - then_ms
        else:
            # Before all that is known: at least since then; or by a clock that is ahead of ours.
            first = self.history.begin(here)
            known_ms = self.progress_ms - first.progress_ms if stamp_ms < first.wall_ms else 0
            elapsed_ms = min(self.wall_ms - stamp_ms, known_ms)
        return max(0, elapsed_ms)

    def at_most_since(self, stamp_ms: int, *, seen_ms: int | None = None) -> int:
        """Return how long a stamp may be past: for what does no harm when it comes early."""
        since_seen_ms = self.progress_ms - seen_ms if seen_ms is not None else 0
        return max(0, self.wall_ms - stamp_ms, since_seen_ms)


class Timekeeper:
    """Lets progress grow, and takes samples."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progress_ms = 0
        self._history = History()
        self._wall_ms = clock.wall_ms()
        self._monotonic_s = clock.monotonic_s()

    def __repr__(self) -> str:
        return f"<Timekeeper progress_ms={self._progress_ms} {self._history!r}>"

    def begin(self, progress: SchedulerProgress) -> None:
        """Take over from the leaders before; the time since their last checkpoint is lost."""
        self._wall_ms = self._clock.wall_ms()
        self._monotonic_s = self._clock.monotonic_s()
        self._progress_ms = progress.progress_ms
        self._history = History(progress.samples)
        self._sample(self._wall_ms)

    def now(self) -> Now:
        """Let the time go on, and return it."""
        wall_ms, monotonic_s = self._clock.wall_ms(), self._clock.monotonic_s()
        wall_step_ms = wall_ms - self._wall_ms
        monotonic_step_ms = round((monotonic_s - self._monotonic_s) * 1000)
        jumped = abs(wall_step_ms - monotonic_step_ms) > JUMP_MS
        if jumped:
            self._sample(self._wall_ms)
        self._progress_ms += max(0, min(wall_step_ms, monotonic_step_ms))
        # What rounding drops here is kept for the next step.
        self._wall_ms = wall_ms
        self._monotonic_s += monotonic_step_ms / 1000
        samples = self._history.samples
        last_ms = samples[-1].progress_ms if samples else None
        if jumped or last_ms is None or self._progress_ms - last_ms >= SAMPLE_AGAIN_MS:
            self._sample(wall_ms)
        return Now(wall_ms=wall_ms, progress_ms=self._progress_ms, history=self._history)

    def _sample(self, wall_ms: int) -> None:
        samples = [*self._history.samples, ClockSample(wall_ms, self._progress_ms)]
        if len(samples) > SAMPLES_MAX:
            samples = thinned(samples)
        self._history = History(samples)


def thinned(samples: Sequence[ClockSample]) -> list[ClockSample]:
    """Return fewer samples, the further apart the older they are.

    A time is known the less exactly the longer it is past, by one part in ``PARTS``, and always
    to the safe side. Both sides of a step back are kept, and what is too much goes at the old end.
    """
    newest = samples[-1].progress_ms
    kept = [samples[0]]
    for before, one, after in zip(samples, samples[1:], samples[2:], strict=False):
        gap_ms = max(SAMPLE_AGAIN_MS, (newest - after.progress_ms) // PARTS)
        beside_step_back = one.wall_ms < before.wall_ms or after.wall_ms < one.wall_ms
        if beside_step_back or after.progress_ms - kept[-1].progress_ms > gap_ms:
            kept.append(one)
    return [*kept, *samples[1:][-1:]][-SAMPLES_MAX:]
