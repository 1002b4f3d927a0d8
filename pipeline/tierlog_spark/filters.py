"""Spark's filters as bounds of a read (pure).

Invariants:
    * Bounds are never narrower than what a filter lets through.
    * A filter that is *settled* needs no second look: no row within the bounds fails it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from tierlog_spark.planning import Bounds

_NEVER_NULL: Final = frozenset({"stream", "ledger_id", "entry_id", "event_index"})
_FIELDS: Final = {"ledger_id": "ledger", "entry_id": "entry"}


def push(bounds: Bounds, filters: Iterable[Filter]) -> tuple[Bounds, list[Filter]]:
    """Return narrower bounds, and the filters that Spark must apply all the same."""
    left = []
    for one in filters:
        narrowed = _narrowed(bounds, one)
        if narrowed is None:
            left.append(one)
        else:
            bounds = narrowed
            if _column(one) == "publish_time":
                left.append(one)
    return bounds, left


def _narrowed(bounds: Bounds, one: Filter) -> Bounds | None:
    """Return the bounds that a filter leaves; None: it says nothing about them."""
    name = _column(one)
    if isinstance(one, IsNotNull):
        return bounds if name in _NEVER_NULL else None
    if name == "stream":
        return _of_streams(bounds, one)
    if name in _FIELDS:
        return _of_numbers(bounds, one, _FIELDS[name])
    if name == "publish_time" and type(one) in _TIMES:
        return _of_times(bounds, one)
    return None


def _column(one: Filter) -> str:
    path: Sequence[str] = getattr(one, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _of_streams(bounds: Bounds, one: Filter) -> Bounds | None:
    if isinstance(one, EqualTo):
        names = frozenset({one.value})
    elif isinstance(one, In):
        names = frozenset(one.value)
    else:
        return None
    return replace(bounds, streams=names if bounds.streams is None else bounds.streams & names)


def _of_numbers(bounds: Bounds, one: Filter, field: str) -> Bounds | None:
    if isinstance(one, In):
        if field != "ledger":
            return None
        some = frozenset(one.value)
        return replace(bounds, ledgers=some if bounds.ledgers is None else bounds.ledgers & some)
    low = high = None
    if isinstance(one, EqualTo):
        low = high = one.value
    elif isinstance(one, GreaterThan):
        low = one.value + 1
    elif isinstance(one, GreaterThanOrEqual):
        low = one.value
    elif isinstance(one, LessThan):
        high = one.value - 1
    elif isinstance(one, LessThanOrEqual):
        high = one.value
    else:
        return None
    return _within(bounds, field, low, high)


def _of_times(bounds: Bounds, one: Any) -> Bounds | None:  # noqa: ANN401
    if not isinstance(one.value, datetime) or one.value.tzinfo is None:
        return None
    low, high = _TIMES[type(one)](_microseconds(one.value))
    return _within(bounds, "ms", low, high)


def _within(bounds: Bounds, field: str, low: int | None, high: int | None) -> Bounds:
    least, most = f"{field}_min", f"{field}_max"
    changes: dict[str, Any] = {}
    if low is not None:
        changes[least] = max(low, getattr(bounds, least))
    if high is not None:
        changes[most] = min(high, getattr(bounds, most))
    return replace(bounds, **changes)


def _microseconds(moment: datetime) -> int:
    gap = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (gap.days * 86_400 + gap.seconds) * 1_000_000 + gap.microseconds


# Times of events are whole ms.
_TIMES: Final[Mapping[type[Filter], Callable[[int], tuple[int | None, int | None]]]] = {
    EqualTo: lambda us: (-(-us // 1000), us // 1000),
    GreaterThan: lambda us: (us // 1000 + 1, None),
    GreaterThanOrEqual: lambda us: (-(-us // 1000), None),
    LessThan: lambda us: (None, -(-us // 1000) - 1),
    LessThanOrEqual: lambda us: (None, us // 1000),
}
