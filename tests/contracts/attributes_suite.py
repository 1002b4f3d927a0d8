"""What every attribute index must do (ports/attributes.py), whoever keeps it.

A module that runs the suite subclasses ``AttributesContract`` and gives a fixture ``site``: streams
that are owned, and indexes over one and the same store, as processes have them.
"""

from typing import Protocol

import pytest

from tierlog.model.attributes import EVENT_COUNT, VALUE_MAX, VALUE_MIN, AttributeKey, Checkpoint
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.ports.attributes import AttributeIndex

FIRST = AttributeKey(bytes(16))
LAST = AttributeKey(b"\xff" * 16)


class Site(Protocol):
    """Where the suite runs."""

    async def stream(self) -> Stream:
        """Make a stream and own it."""
        ...

    async def claim(self, stream: Stream) -> Stream:
        """Become its owner in the place of whoever is."""
        ...

    def index(self) -> AttributeIndex:
        """Return the index as another process has it."""
        ...


def key_of(number: int) -> AttributeKey:
    return AttributeKey((number + 2**64).to_bytes(16, "big"))


def at(ledger_id: int, entry_id: int) -> Position:
    return Position(LedgerId(ledger_id), EntryId(entry_id))


async def all_of(index: AttributeIndex, checkpoint: Checkpoint) -> dict[AttributeKey, int]:
    found: list[tuple[AttributeKey, int]] = []
    async for run in index.iterate(checkpoint, FIRST, LAST):
        found += run
    assert [key for key, _ in found] == sorted({key for key, _ in found})
    return dict(found)


@pytest.mark.covers("E24", "E38")
class AttributesContract:
    async def test_a_stream_without_any_has_a_checkpoint_of_nothing(self, site: Site):
        stream, index = await site.stream(), site.index()
        found = await index.load(stream)
        assert (found.through, found.root.count, dict(found.core)) == (None, 0, {})
        assert await index.get(found, [key_of(1)]) == {}
        assert await all_of(index, found) == {}

    async def test_what_is_flushed_is_there_for_every_process(self, site: Site):
        stream, index = await site.stream(), site.index()
        values = {key_of(1): 7, key_of(2): VALUE_MIN, key_of(3): VALUE_MAX}
        base = await index.load(stream)
        made = await index.flush(
            stream, base, changes=values, core={EVENT_COUNT: 12}, through=at(1, 4)
        )
        for other in (index, site.index()):
            found = await other.load(stream)
            assert found.through == made.through == at(1, 4)
            assert dict(found.core) == {EVENT_COUNT: 12}
            assert found.root.count == 3
            keys = [key_of(number) for number in range(5)]
            assert await other.get(found, keys) == values
            assert await all_of(other, found) == values

    async def test_core_attributes_alone_move_on(self, site: Site):
        stream, index = await site.stream(), site.index()
        base = await index.load(stream)
        for entry in range(3):
            base = await index.flush(
                stream, base, changes={}, core={EVENT_COUNT: entry}, through=at(0, entry)
            )
        found = await site.index().load(stream)
        assert (found.through, dict(found.core)) == (at(0, 2), {EVENT_COUNT: 2})

    async def test_an_older_checkpoint_reads_as_it_was(self, site: Site):
        stream, index = await site.stream(), site.index()
        first = await index.flush(
            stream, await index.load(stream), changes={key_of(1): 1}, core={}, through=at(0, 0)
        )
        second = await index.flush(
            stream, first, changes={key_of(1): 2, key_of(2): 2}, core={}, through=at(0, 1)
        )
        assert await index.get(first, [key_of(1), key_of(2)]) == {key_of(1): 1}
        assert await all_of(index, first) == {key_of(1): 1}
        assert await all_of(index, second) == {key_of(1): 2, key_of(2): 2}

    async def test_many_are_given_in_runs_within_bounds(self, site: Site):
        stream, index = await site.stream(), site.index()
        values = {key_of(number): number * 3 for number in range(3000)}
        made = await index.flush(
            stream, await index.load(stream), changes=values, core={}, through=at(2, 9)
        )
        found: list[tuple[AttributeKey, int]] = []
        async for run in index.iterate(made, key_of(100), key_of(2_899)):
            assert run
            found += run
        assert found == [(key_of(number), number * 3) for number in range(100, 2_900)]
        some = [key_of(number) for number in range(0, 4000, 7)]
        assert await index.get(made, some) == {key: values[key] for key in some if key in values}

    async def test_a_deposed_owner_publishes_nothing(self, site: Site):
        stream, index = await site.stream(), site.index()
        base = await index.flush(
            stream, await index.load(stream), changes={key_of(1): 1}, core={}, through=at(0, 0)
        )
        claimed, other = await site.claim(stream), site.index()
        # The other one has not written anything yet: the claim is enough.
        newest = await other.load(claimed)
        with pytest.raises(RefusedError) as refused:
            await index.flush(stream, base, changes={key_of(1): 9}, core={}, through=at(0, 1))
        assert refused.value.reason is Reason.FENCED
        made = await other.flush(claimed, newest, changes={key_of(2): 2}, core={}, through=at(1, 0))
        with pytest.raises(RefusedError) as refused:
            await index.flush(stream, base, changes={key_of(1): 9}, core={}, through=at(0, 1))
        assert refused.value.reason is Reason.FENCED
        assert await site.index().load(claimed) == made
        assert await all_of(other, made) == {key_of(1): 1, key_of(2): 2}

    async def test_another_index_takes_the_place_of_one_as_of_the_same_entry(self, site: Site):
        stream, index = await site.stream(), site.index()
        base = await index.flush(
            stream,
            await index.load(stream),
            changes={key_of(number): number for number in range(100)},
            core={EVENT_COUNT: 100},
            through=at(0, 4),
        )
        found = await index.salvage(base)
        assert (len(found.values), found.lost) == (100, ())
        assert list(await index.former(stream)) == []
        values = {key_of(number): -number for number in range(50, 130)}
        made = await index.make_anew(stream, base, values=values, good=None)
        assert (made.through, made.core) == (base.through, base.core)
        assert await all_of(site.index(), made) == values
        # A lost answer: the same again changes nothing, and it goes on from there.
        assert await index.make_anew(stream, base, values=values, good=None) == made
        after = await index.flush(stream, made, changes={key_of(1): 1}, core={}, through=at(0, 5))
        assert await all_of(site.index(), after) == {key_of(1): 1, **values}
        claimed = await site.claim(stream)
        await site.index().load(claimed)
        for owned, one in ((stream, after), (claimed, made)):
            with pytest.raises(RefusedError) as refused:
                await index.make_anew(owned, one, values=values, good=None)
            assert refused.value.reason is Reason.FENCED

    async def test_a_base_that_is_not_the_newest_is_refused(self, site: Site):
        stream, index = await site.stream(), site.index()
        base = await index.load(stream)
        made = await index.flush(stream, base, changes={key_of(1): 1}, core={}, through=at(0, 0))
        with pytest.raises(RefusedError) as refused:
            await index.flush(stream, base, changes={key_of(1): 5}, core={}, through=at(0, 1))
        assert refused.value.reason is Reason.FENCED
        assert await site.index().load(stream) == made

    async def test_the_same_flush_again_changes_nothing(self, site: Site):
        stream, index = await site.stream(), site.index()
        base = await index.load(stream)
        flush = {"changes": {key_of(1): 1}, "core": {EVENT_COUNT: 3}, "through": at(0, 0)}
        made = await index.flush(stream, base, **flush)  # type: ignore[arg-type]
        assert await index.flush(stream, base, **flush) == made  # type: ignore[arg-type]
        assert await site.index().load(stream) == made
