"""What of a damaged attribute index can still be read, and between which keys it can't.

Owns the walk. Does not own what becomes of the keys that are lost.

Invariants:
    * A value is given only out of a page that was verified and is the one that its parent has.
    * Every key is given, lies in a lost range, or is not in the index.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from tierlog.attributes.tree import PageRef, child_ref, drive_async, pages_of, root_ref
from tierlog.format.attribute_page import Page
from tierlog.model.attribute_record import KeyRange
from tierlog.model.attributes import KEY_LEN, AttributeKey, IndexRoot
from tierlog.model.errors import CorruptError
from tierlog.ports.attributes import Salvage
from tierlog.ports.streams import FIRST_KEY, LAST_KEY

LOST_RANGES_MAX: Final = 64
"""They are put on record: beyond that the nearest ones are told as one, with all between them."""

Read = Callable[[Sequence[PageRef]], Awaitable[Sequence[Page]]]


async def salvage(root: IndexRoot, read: Read) -> Salvage:
    """Read every page of a version that can be read, one after the other, ascending."""
    values: dict[AttributeKey, int] = {}
    lost: list[KeyRange] = []
    waiting = [(root_ref(root), KeyRange(FIRST_KEY, LAST_KEY))] if root.root_length else []
    while waiting:
        ref, keys = waiting.pop()
        try:
            (page,) = await drive_async(pages_of([ref]), read)
        except CorruptError:
            _add(lost, keys)
            continue
        if page.level:
            waiting += reversed(list(_children(page, keys)))
        else:
            values |= {AttributeKey(page.key(at)): page.value(at) for at in range(page.count)}
    return Salvage(values, tuple(lost))


def _children(page: Page, keys: KeyRange) -> Iterator[tuple[PageRef, KeyRange]]:
    """Give the children of an index page, each with the keys that are its own."""
    firsts = [keys.first, *(AttributeKey(page.key(slot)) for slot in range(1, page.count))]
    lasts = [*(_before(second) for _, second in pairwise(firsts)), keys.last]
    for slot, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        yield child_ref(page, slot), KeyRange(first, last)


def _add(lost: list[KeyRange], keys: KeyRange) -> None:
    if lost and _before(keys.first) == lost[-1].last:
        lost[-1] = KeyRange(lost[-1].first, keys.last)
        return
    lost.append(keys)
    if len(lost) > LOST_RANGES_MAX:
        at = min(range(len(lost) - 1), key=lambda one: _gap(lost[one], lost[one + 1]))
        lost[at : at + 2] = [KeyRange(lost[at].first, lost[at + 1].last)]


def _gap(low: KeyRange, high: KeyRange) -> int:
    return int.from_bytes(high.first) - int.from_bytes(low.last)


def _before(key: AttributeKey) -> AttributeKey:
    return AttributeKey((int.from_bytes(key) - 1).to_bytes(KEY_LEN))
