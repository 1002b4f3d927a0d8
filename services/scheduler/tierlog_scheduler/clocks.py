"""How much time has passed: for sure, where something is deleted; at most, where it is kept.

Owns the meaning of two clocks that are both doubted. The wall clock jumps; the monotonic one
knows nothing of the time before its process. ``progress`` grows, step by step, by the smaller of
what the two say, and is checkpointed, so that it goes on under the next leader. Time without a
leader does not count.

``samples`` say what the wall clock showed at which progress: by them a time that another process
noted, by its wall clock, is turned into a progress, the latest that it can stand for.

Invariants:
    * ``surely_since`` never exceeds the true time since a stamp, if the stamp was right; a wall
      clock that jumped, either way and however often, changes that by no more than the step of
      the jump itself.
    * Neither way of a jump stops the time: what was lost is that one step.
    * Losing the samples makes waits longer, never shorter. There are at most ``SAMPLES_MAX``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tierlog.model.offload import ClockSample, SchedulerProgress
from tierlog.ports.clock import Clock

SAMPLE_AGAIN_MS: Final = 10 * 60_000
JUMP_MS: Final = 60_000
SAMPLES_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Two clocks: the wall's, and how long leaders have been at work in all."""

    wall_ms: int
    progress_ms: int
    samples: Sequence[ClockSample] = ()

    def surely_since(self, stamp_ms: int, *, seen_ms: int | None = None) -> int:
        """Return how long a wall clock's stamp is past for sure; never less than 0.

        ``seen_ms``: the progress at which this leader saw that it was so.
        """
        elapsed_ms = self.wall_ms - stamp_ms
        if elapsed_ms > 0:
            elapsed_ms = min(elapsed_ms, self.progress_ms - self._progress_at(stamp_ms))
        if seen_ms is not None:
            elapsed_ms = min(elapsed_ms, self.progress_ms - seen_ms)
        return max(0, elapsed_ms)

    def at_most_since(self, stamp_ms: int, *, seen_ms: int | None = None) -> int:
        """Return how long a stamp may be past: for what does no harm when it comes early."""
        since_seen_ms = self.progress_ms - seen_ms if seen_ms is not None else 0
        return max(0, self.wall_ms - stamp_ms, since_seen_ms)

    def _progress_at(self, stamp_ms: int) -> int:
        """Return the latest progress at which the wall clock can have shown ``stamp_ms``."""
        points = (*self.samples, ClockSample(self.wall_ms, self.progress_ms))
        latest: int | None = None
        for before, after in pairwise(points):
            low, high = sorted((before.wall_ms, after.wall_ms))
            if low <= stamp_ms <= high:
                latest = after.progress_ms
        if latest is not None:
            return latest
        # Before all that is known: at least since then. After it: by another clock, ahead of ours.
        earliest = min(point.wall_ms for point in points)
        return points[0].progress_ms if stamp_ms < earliest else self.progress_ms


class Timekeeper:
    """Lets progress grow, and takes samples."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progress_ms = 0
        self._samples: list[ClockSample] = []
        self._wall_ms = clock.wall_ms()
        self._monotonic_s = clock.monotonic_s()

    def __repr__(self) -> str:
        return f"<Timekeeper progress_ms={self._progress_ms} samples={len(self._samples)}>"

    def begin(self, progress: SchedulerProgress) -> None:
        """Take over from the leaders before; the time since their last checkpoint is lost."""
        self._wall_ms = self._clock.wall_ms()
        self._monotonic_s = self._clock.monotonic_s()
        self._progress_ms = progress.progress_ms
        self._samples = list(progress.samples)
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
        last = self._samples[-1].progress_ms if self._samples else None
        if jumped or last is None or self._progress_ms - last >= SAMPLE_AGAIN_MS:
            self._sample(wall_ms)
        return Now(wall_ms=wall_ms, progress_ms=self._progress_ms, samples=tuple(self._samples))

    @property
    def samples(self) -> tuple[ClockSample, ...]:
        """What was sampled, oldest first."""
        return tuple(self._samples)

    def _sample(self, wall_ms: int) -> None:
        self._samples.append(ClockSample(wall_ms, self._progress_ms))
        if len(self._samples) > SAMPLES_MAX:
            self._samples = list(thinned(self._samples))


def thinned(samples: Sequence[ClockSample]) -> Iterator[ClockSample]:
    """Iterate over every second sample of the older half, and all of the newer one."""
    half = len(samples) // 2
    yield from samples[:half:2]
    yield from samples[half:]
