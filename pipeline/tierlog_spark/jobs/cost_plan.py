"""What a stream costs as it is, and what it would with other thresholds (pure).

Owns what thresholds make of a stream that goes on as it did. Does not own prices, nor what requests
offloads and reads send (``tierlog.model.prices``).

Invariant: what is predicted is of a stream that is as long as it gets; where nothing is ever
trimmed, of one that is as long as it is now.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierlog.model.policy import CLUSTER_DEFAULT, NEVER, Policy, threshold
from tierlog.model.prices import GB, Prices, Workload, predict, stored_bytes
from tierlog_spark.jobs.usage_plan import DAY_MS, NamedLedger

WINDOW_DAYS: Final = 30.0
"""So many of the last days say how much is appended a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is known of a stream: how much came, in ledgers of which length, and what is kept."""

    bytes_per_day: float
    ledger_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A stream as it will be: bytes in either tier, requests a month, prices a month."""

    tier1_bytes: float
    tier2_bytes: float
    requests: float
    price_of_requests: float
    price_of_bytes: float

    @property
    def price(self) -> float:
        """What a month costs."""
        return self.price_of_requests + self.price_of_bytes


def past_of(
    ledgers: Sequence[NamedLedger], *, created_ms: int, now_ms: int, trimmed: bool = False
) -> Past:
    """Return what the closed ledgers of a stream say of it; ``trimmed``: some are there no more."""
    begin_ms = now_ms - round(WINDOW_DAYS * DAY_MS)
    if trimmed:
        # Of what came before nothing is known any more: it is no time in which nothing came.
        created_ms = min((one.opened_ms for one in ledgers), default=created_ms)
    recent = [one.length for one in ledgers if one.closed_ms >= begin_ms]
    # A stream of this morning is not said to get a month's bytes in a day.
    days = min(WINDOW_DAYS, max(1.0, (now_ms - created_ms) / DAY_MS))
    lengths = recent or [one.length for one in ledgers]
    mean = sum(lengths) // len(lengths) if lengths else 0
    return Past(
        bytes_per_day=sum(recent) / days,
        ledger_bytes=mean or CLUSTER_DEFAULT.ledger_bytes_max or 1,
        kept_bytes=sum(one.length for one in ledgers),
    )


def steady_of(
    past: Past,
    policy: Policy,
    prices: Prices,
    *,
    range_bytes: int,
    reads: float,
    read_back: str = "sample",
) -> Steady:
    """Return what thresholds make of a stream; ``reads``: how often all is read from tier 2.

    ``read_back``: how much of a copy is verified where the policy does not say. Scrubs are of a
    whole bucket, and on no stream's account here.
    """
    kept = _least(past, policy.retention_time_ms, policy.retention_size_bytes, past.kept_bytes)
    if not policy.offloads:
        return Steady(
            tier1_bytes=kept,
            tier2_bytes=0.0,
            requests=0.0,
            price_of_requests=0.0,
            price_of_bytes=0.0,
        )
    behind = min(kept, _least(past, policy.offload_time_ms, policy.offload_size_bytes, kept))
    lag_ms = policy.deletion_lag_ms
    lag = kept if lag_ms in {None, NEVER} else past.bytes_per_day * (lag_ms or 0) / DAY_MS
    rate = past.bytes_per_day
    workload = Workload(
        bytes_per_day=rate,
        ledger_bytes=max(1, min(past.ledger_bytes, policy.ledger_bytes_max or past.ledger_bytes)),
        block_bytes=policy.block_size or CLUSTER_DEFAULT.block_size or 1,
        range_bytes=range_bytes,
        reads=reads,
        kept_days=(kept - behind) / rate if rate else 0.0,
        read_back=policy.read_back or read_back,
    )
    asked = predict(workload)
    stored = stored_bytes(workload) if rate else kept - behind
    return Steady(
        tier1_bytes=min(kept, behind + lag),
        tier2_bytes=stored,
        requests=sum(one.requests for one in asked),
        price_of_requests=sum(
            prices.of_requests(one.operation, one.requests, received=one.received) for one in asked
        ),
        price_of_bytes=price_of_bytes(stored, prices),
    )


def price_of_bytes(stored: float, prices: Prices) -> float:
    """Return what keeping bytes for a month costs."""
    return stored / GB * prices.stored_per_gb_month


def _least(past: Past, time_ms: int | None, size_bytes: int | None, otherwise: float) -> float:
    """Return how many bytes two thresholds let be: the first that is reached wins."""
    time_ms, size_bytes = threshold(time_ms), threshold(size_bytes)
    found = []
    if time_ms is not None:
        found.append(past.bytes_per_day * time_ms / DAY_MS)
    if size_bytes is not None:
        found.append(float(size_bytes))
    return min(found, default=float(otherwise))
