"""How much time has passed: for sure, where something is deleted; at most, where it is kept.

Owns the meaning of two clocks that are both doubted. The wall clock jumps, here and on every
host that notes a time by it; the monotonic one knows nothing of the time before its process.
``progress`` grows, step by step, by the smaller of what the two say, and is checkpointed, so
that it goes on under the next leader. Time without a leader does not count.

Deletions count in progress alone: from when a leader saw that it was so, or, for ledgers that
were closed while nobody remembered, from when a later ledger id was seen. A stream's next ledger
gets its id only after the one before it was closed (for those that are attached one is drawn
then, see ``retention.successors``), and ids only grow: by a few samples of the newest id, each
with its progress, every ledger that has a successor has a time that no clock noted.

Invariants:
    * Nothing is taken for older than it is, whatever any wall clock does or did.
    * A jump costs the one step that it happens in.
    * Losing the samples makes waits longer, never shorter. There are at most ``SAMPLES_MAX``, and
      what they say comes late by one part in ``PARTS`` of the time, or by ``SAMPLE_AGAIN_MS``.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from tierlog.model.ids import LedgerId
from tierlog.model.offload import LedgerSample, SchedulerProgress
from tierlog.ports.clock import Clock

SAMPLE_AGAIN_MS: Final = 10 * 60_000
SAMPLES_MAX: Final = 600
PARTS: Final = 64


class History:
    """Which ledger id was the newest at which progress, oldest first. Never changed once made."""

    def __init__(self, samples: Sequence[LedgerSample] = ()) -> None:
        self.samples = tuple(samples)
        self._ids = [one.ledger_id for one in self.samples]

    def __repr__(self) -> str:
        return f"<History of {len(self.samples)} samples>"

    def given_by(self, ledger_id: LedgerId) -> int | None:
        """Return a progress by which an id had surely been given; None: not known."""
        at = bisect_left(self._ids, ledger_id)
        return self.samples[at].progress_ms if at < len(self.samples) else None

    def with_newest(self, ledger_id: LedgerId, progress_ms: int) -> "History":
        """Return the history with one more sample, if it is time for one."""
        last = self.samples[-1] if self.samples else None
        if last is not None:
            if progress_ms - last.progress_ms < SAMPLE_AGAIN_MS:
                return self
            ledger_id = max(ledger_id, last.ledger_id)
        samples = [*self.samples, LedgerSample(ledger_id, progress_ms)]
        return History(thinned(samples) if len(samples) > SAMPLES_MAX else samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Two clocks: the wall's, and how long leaders have been at work in all."""

    wall_ms: int
    progress_ms: int
    history: History = field(default_factory=History)

    def closed_since(self, seen_ms: int | None, successor: LedgerId | None) -> int:
        """Return how long a ledger has surely been closed.

        ``seen_ms``: the progress at which a leader saw it closed. ``successor``: an id that was
        given after that, mostly of its stream's next ledger.
        """
        given_ms = None if successor is None else self.history.given_by(successor)
        known = [one for one in (seen_ms, given_ms) if one is not None]
        return max(0, self.progress_ms - min(known)) if known else 0

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

    def now(self) -> Now:
        """Let the time go on, and return it."""
        wall_ms, monotonic_s = self._clock.wall_ms(), self._clock.monotonic_s()
        monotonic_step_ms = round((monotonic_s - self._monotonic_s) * 1000)
        self._progress_ms += max(0, min(wall_ms - self._wall_ms, monotonic_step_ms))
        # What rounding drops here is kept for the next step.
        self._wall_ms = wall_ms
        self._monotonic_s += monotonic_step_ms / 1000
        return Now(wall_ms=wall_ms, progress_ms=self._progress_ms, history=self._history)

    def note_newest(self, ledger_id: LedgerId) -> None:
        """Note the newest ledger id that the leader sees now, after ``now``."""
        self._history = self._history.with_newest(ledger_id, self.now().progress_ms)


def thinned(samples: Sequence[LedgerSample]) -> list[LedgerSample]:
    """Return fewer samples, the further apart the older they are."""
    newest_ms = samples[-1].progress_ms
    kept = [samples[0]]
    for one, after in pairwise(samples[1:]):
        gap_ms = max(SAMPLE_AGAIN_MS, (newest_ms - after.progress_ms) // PARTS)
        if after.progress_ms - kept[-1].progress_ms > gap_ms:
            kept.append(one)
    return [*kept, samples[-1]][-SAMPLES_MAX:]
