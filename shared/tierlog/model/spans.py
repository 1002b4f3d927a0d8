"""Sets of entries as ranges, both ends included: what a node holds, lacks or should have. Pure.

Invariant of every result: ranges are in order, and neither overlap nor touch.
"""

from collections.abc import Iterable, Sequence

from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId

Span = tuple[EntryId, EntryId]
"""First and last entry, both included."""

Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Return all entries of any of ``spans``, which may come in any order."""
    merged: Spans = []
    for first, last in sorted(spans):
        assert first <= last, "a range has an entry"
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def without(wanted: Sequence[Span], held: Sequence[Span]) -> Spans:
    """Return the entries of ``wanted`` that ``held`` lacks; both as ``union`` gives them."""
    lacking: Spans = []
    at = 0
    for first, last in wanted:
        position = first
        while at < len(held) and held[at][1] < position:
            at += 1
        look = at
        while look < len(held) and held[look][0] <= last:
            if held[look][0] > position:
                lacking.append((position, EntryId(held[look][0] - 1)))
            position = EntryId(held[look][1] + 1)
            look += 1
        if position <= last:
            lacking.append((position, last))
    return lacking


def common(these: Sequence[Span], those: Sequence[Span]) -> Spans:
    """Return the entries of both; each as ``union`` gives them."""
    return without(these, without(these, those))


def count(spans: Iterable[Span]) -> int:
    """Return how many entries there are; ``spans`` as ``union`` gives them."""
    return sum(last - first + 1 for first, last in spans)


def deltas_of_spans(spans: Iterable[Span]) -> list[int]:
    """Return gap, count, gap, count …: small numbers, as a message packs them best."""
    deltas: list[int] = []
    position = 0
    for first, last in spans:
        deltas += (first - position, last - first + 1)
        position = last + 1
    return deltas


def spans_of_deltas(deltas: Sequence[int]) -> Spans:
    """Invert ``deltas_of_spans``, or raise ``CorruptError``."""
    spans: Spans = []
    position = 0
    for gap, number in zip(deltas[::2], deltas[1::2], strict=False):
        if gap < 0 or number < 1 or (gap == 0 and spans):
            break
        spans.append((EntryId(position + gap), EntryId(position + gap + number - 1)))
        position += gap + number
    if len(deltas) != 2 * len(spans):
        raise CorruptError(
            "ranges of entries that are none", remedy="Check what answers at this address"
        )
    return spans
