"""What goes wrong in a memory adapter, and when; decided by one seeded ``random.Random``.

Owns the decision and the delay. Each memory adapter hands every call to ``Faults.call`` as a
function that takes effect at once; ``Faults`` decides whether it runs and whether the caller
hears of it. One ``Faults`` stands for one simulated process.

Invariants:
    * A call takes effect wholly or not at all, at one instant.
    * ``RetryableError`` for a change: it did not take effect. ``IndeterminateError``: either.
    * Each call passes two steps, before and after its effect. A crash can happen at any step;
      from then on no call of this process takes effect or returns.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Never, TypeVar

from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError

T = TypeVar("T")


class Outcome(Enum):
    """What becomes of one call."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """It had no effect, and the caller is told so."""
    REQUEST_LOST = "request lost"
    """It had no effect, but the caller can't know."""
    REPLY_LOST = "reply lost"
    """It took effect, but the caller can't know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """How often, from 0 to 1, each outcome other than ANSWERED is drawn; and the delays."""

    refused: float = 0.0
    request_lost: float = 0.0
    reply_lost: float = 0.0
    delay_s_max: float = 0.0
    """Each step takes up to so long; other tasks run meanwhile, even when it is 0."""

    def __post_init__(self) -> None:
        assert 0 <= self.refused + self.request_lost + self.reply_lost <= 1, "rates sum up to <= 1"
        assert self.delay_s_max >= 0, "a delay is not negative"


NO_FAULTS = FaultRates()


class Faults:
    """The faults of one process. Calls are named ``port.verb``, for example ``metadata.set``."""

    def __init__(
        self,
        rng: random.Random,
        *,
        rates: FaultRates = NO_FAULTS,
        rates_by_prefix: Mapping[str, FaultRates] | None = None,
    ) -> None:
        self._rng = rng
        self.rates = rates
        self.rates_by_prefix = dict(rates_by_prefix or {})
        """Rates for calls whose name begins so; the longest prefix wins."""
        self.outages: set[str] = set()
        """Prefixes of calls that are refused until taken out again (an unreachable server)."""
        self.steps = 0
        """How many steps were passed so far."""
        self.crash_at_step: int | None = None
        self.on_crash: Callable[[], object] | None = None
        """Called once, at the crash; ends the process's tasks and gives up its sessions."""
        self.crashed = False
        self.calls: list[str] | None = None
        """Set to ``[]`` to have the names of all calls noted here."""
        self._script: deque[tuple[str, Outcome]] = deque()

    def __repr__(self) -> str:
        return f"Faults(steps={self.steps}, crashed={self.crashed}, outages={self.outages})"

    def next(self, name: str, outcome: Outcome) -> None:
        """Give the next call whose name begins with ``name`` this outcome (in this order)."""
        self._script.append((name, outcome))

    def crash_after(self, steps: int) -> None:
        """Crash at the ``steps``-th step from now on (1: the next)."""
        assert steps >= 1, "the past can't be changed"
        self.crash_at_step = self.steps + steps

    async def call(self, name: str, effect: Callable[[], T], *, changes: bool) -> T:
        """Run ``effect``, or not, and answer, or not. ``changes``: it is not a mere read."""
        if self.calls is not None:
            self.calls.append(name)
        rates = self._rates_of(name)
        await self._step(rates)
        outcome = self._outcome_of(name, rates)
        if outcome in {Outcome.REFUSED, Outcome.REQUEST_LOST}:
            await self._step(rates)
            raise _unanswered(name, in_doubt=changes and outcome is Outcome.REQUEST_LOST)
        try:
            result = effect()
        except TierlogError:
            await self._step(rates)
            if outcome is Outcome.REPLY_LOST:
                raise _unanswered(name, in_doubt=changes) from None
            raise
        await self._step(rates)
        if outcome is Outcome.REPLY_LOST:
            raise _unanswered(name, in_doubt=changes)
        return result

    async def step(self, name: str) -> None:
        """Pass one step of a call that waits for something (a crash point and a delay)."""
        await self._step(self._rates_of(name))

    async def _step(self, rates: FaultRates) -> None:
        await asyncio.sleep(self._rng.uniform(0, rates.delay_s_max) if rates.delay_s_max else 0)
        self.steps += 1
        if self.crashed or (self.crash_at_step is not None and self.steps >= self.crash_at_step):
            await self._crash()

    async def _crash(self) -> Never:
        if self.crashed:
            # Clean-up code of a cancelled task: a killed process runs none.
            raise asyncio.CancelledError("this process crashed")
        self.crashed = True
        if self.on_crash is not None:
            self.on_crash()
        await asyncio.get_running_loop().create_future()  # until its task is cancelled
        raise AssertionError("a crashed process goes on")

    def _outcome_of(self, name: str, rates: FaultRates) -> Outcome:
        for at, (prefix, outcome) in enumerate(self._script):
            if name.startswith(prefix):
                del self._script[at]
                return outcome
        if any(name.startswith(prefix) for prefix in self.outages):
            return Outcome.REFUSED
        draw = self._rng.random()
        for outcome, rate in (
            (Outcome.REFUSED, rates.refused),
            (Outcome.REQUEST_LOST, rates.request_lost),
            (Outcome.REPLY_LOST, rates.reply_lost),
        ):
            if draw < rate:
                return outcome
            draw -= rate
        return Outcome.ANSWERED

    def _rates_of(self, name: str) -> FaultRates:
        fitting = [prefix for prefix in self.rates_by_prefix if name.startswith(prefix)]
        return self.rates_by_prefix[max(fitting, key=len)] if fitting else self.rates


def _unanswered(name: str, *, in_doubt: bool) -> TierlogError:
    if in_doubt:
        return IndeterminateError(
            f"the answer to {name} was lost", remedy="Read back whether it was done"
        )
    return RetryableError(f"{name} could not reach its server", remedy="Try again later")


def no_faults() -> Faults:
    """Return faults that never happen."""
    return Faults(random.Random(0))  # noqa: S311 - nothing depends on what is drawn
