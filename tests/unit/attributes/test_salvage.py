"""What of a damaged index can be read, and the index that takes its place.

Must hold: no key is passed over in silence, nothing damaged is believed, and what was lost is on
record.
"""

import random

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.unit.attributes.world import SAFETY_MS, IndexWorld
from tierlog.attributes.salvage import LOST_RANGES_MAX
from tierlog.catalog.attributes import Anew, Publication
from tierlog.model.attribute_record import AttributesRecord, KeyRange, LostKeys, kept_of
from tierlog.model.attributes import EVENT_COUNT, AttributeKey, Checkpoint
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream

PAGE_BYTES = 256


async def filled(world: IndexWorld, count: int) -> tuple[Stream, Checkpoint]:
    """Write keys in three flushes, as of the ends of three ledgers."""
    stream, index = await world.stream(policy=Policy(offload_time_ms=1000)), world.index()
    base = await index.load(stream)
    for part in range(3):
        changes = {key_of(number): number for number in range(part, count, 3)}
        core = {EVENT_COUNT: part}
        base = await index.flush(stream, base, changes=changes, core=core, through=at(part, 9))
    return stream, base


async def record_of(world: IndexWorld, stream: Stream) -> AttributesRecord:
    record = await world.process().catalog.attributes.get(stream.name)
    assert record is not None
    return record


@pytest.mark.parametrize("seed", range(20))
async def test_every_key_is_read_or_told_as_lost(seed: int) -> None:
    rng = random.Random(seed)
    world = IndexWorld(page_bytes=PAGE_BYTES)
    _, made = await filled(world, 900)
    for _ in range(rng.randrange(1, 6)):
        one = rng.choice(made.objects)
        if rng.random() < 0.1:
            world.bucket.objects.pop(one.key, None)
        elif one.key in world.bucket.objects:
            world.bucket.damage(one.key, rng.randrange(one.length))
    values, lost = await world.index().salvage(made)
    assert list(lost) == sorted(lost)
    for number in range(900):
        key = key_of(number)
        is_lost = any(first <= key <= last for first, last in lost)
        assert (key in values) != is_lost
        assert is_lost or values[key] == number


async def test_all_is_lost_without_the_root_and_nothing_of_a_whole_index() -> None:
    world = IndexWorld(page_bytes=PAGE_BYTES)
    _, made = await filled(world, 300)
    found = await world.index().salvage(made)
    assert (dict(found.values), found.lost) == ({key_of(one): one for one in range(300)}, ())
    assert await world.index().salvage(Checkpoint()) == ({}, ())
    world.bucket.damage(made.objects[-1].key, made.root.root_offset - made.objects[-1].start)
    found = await world.index().salvage(made)
    assert (found.values, found.lost) == ({}, ((bytes(16), b"\xff" * 16),))


async def test_ranges_that_are_told_stay_few() -> None:
    world = IndexWorld(page_bytes=PAGE_BYTES)
    stream, index = await world.stream(), world.index()
    values = {key_of(number): number for number in range(4000)}
    base = await index.load(stream)
    made = await index.flush(stream, base, changes=values, core={}, through=at(0, 0))
    (one,) = made.objects
    # Every other leaf, of 10 keys each.
    for offset in range(40, 4000 * 24, 2 * 256):
        world.bucket.damage(one.key, offset)
    found = await world.index().salvage(made)
    assert 1 < len(found.lost) <= LOST_RANGES_MAX
    for key in values:
        assert key in found.values or any(first <= key <= last for first, last in found.lost)


async def test_an_index_that_is_made_anew_needs_nothing_of_the_damaged_one() -> None:
    world = IndexWorld(page_bytes=PAGE_BYTES)
    stream, made = await filled(world, 300)
    former = await world.index().former(stream)
    assert [one.through for one in former] == [at(1, 9), at(0, 9)]
    lost = KeyRange(key_of(7), key_of(9))
    values = {key_of(number): number for number in range(300) if not 7 <= number <= 9}
    index = world.index()
    anew = await index.make_anew(stream, made, values=values, good=at(0, 9), lost=(lost,))
    assert (anew.through, anew.core, anew.root.count) == (made.through, made.core, 297)
    record = await record_of(world, stream)
    assert record.checkpoint == anew
    assert [one.through for one in record.ends] == [at(0, 9)], "the other one may be damaged"
    assert record.lost_keys == (LostKeys(at(2, 9), lost),)
    # A lost answer: the same again changes nothing.
    again = await index.make_anew(stream, made, values=values, good=at(0, 9), lost=(lost,))
    assert again == anew
    assert await record_of(world, stream) == record
    # Nothing is read of what was before, and the sweep takes it.
    await world.process().catalog.attributes.drop_ends(
        stream.name, stream.incarnation, before=at(2, 9)
    )
    world.clock.advance(2 * SAFETY_MS)

    async def pay(size: int) -> None:
        assert size >= 0

    await world.process().sweeper.run(stream.name, stream.incarnation, delete=True, pay=pay)
    assert world.keys_in_bucket() == [one.key for one in anew.objects]
    newest = await world.index().load(stream)
    assert await all_of(world.index(), newest) == values
    made = await index.flush(stream, newest, changes={key_of(8): 1}, core={}, through=at(2, 10))
    assert await all_of(world.index(), made) == values | {key_of(8): 1}


async def test_an_admins_consent_outlives_what_was_made_anew_without_it() -> None:
    world = IndexWorld()
    stream, made = await filled(world, 3)
    catalog = world.process().catalog.attributes
    await catalog.accept_loss(stream, by="admin")
    anew = await world.index().make_anew(stream, made, values={key_of(1): 1}, good=None)
    record = await record_of(world, stream)
    assert record.loss_accepted
    assert record.ends == ()
    publication = Publication(
        base=kept_of(anew), generation=0, after=kept_of(made), anew=Anew(None, ())
    )
    assert publication.of(record, keep_ends=True).newest == kept_of(made)


async def test_an_index_of_nothing_can_be_made_anew() -> None:
    world = IndexWorld(page_bytes=PAGE_BYTES)
    stream, made = await filled(world, 30)
    none: dict[AttributeKey, int] = {}
    anew = await world.index().make_anew(stream, made, values=none, good=None)
    assert (anew.root.count, anew.objects) == (0, ())
    found = await world.index().load(stream)
    assert await all_of(world.index(), found) == {}
    more = {key_of(number): 1 for number in range(50)}
    made = await world.index().flush(stream, found, changes=more, core={}, through=at(3, 0))
    assert await all_of(world.index(), made) == more
