"""The record of checkpoints as a value: what it keeps, and for how long."""

import itertools
import random
from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.attribute_record import (
    ENDS_MAX,
    AttributesRecord,
    GivenUp,
    KeptRoot,
    KeyRange,
    LostKeys,
    covered,
    holds_back,
    losses_of,
    record_of,
    thinned,
)
from tierlog.model.attributes import AttributeKey, IndexChunk, IndexObject, IndexRoot
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import ManifestHead, attributes_to_name
from tierlog.model.position import Position

STREAM = StreamName("s")
EMPTY = AttributesRecord(incarnation=UUID(int=1))


def at(ledger_id: int, entry_id: int = 0) -> Position:
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def root_at(ledger_id: int, entry_id: int = 0, *, start: int = 0, end: int = 0) -> KeptRoot:
    length = 1 if end else 0
    root = IndexRoot(root_offset=end - length, root_length=length, start=start, end=end)
    return KeptRoot(through=at(ledger_id, entry_id), root=root)


def object_at(key: str, start: int, length: int) -> IndexObject:
    return IndexObject(key=key, start=start, length=length, sha256=b"")


@given(st.lists(st.integers(min_value=0, max_value=10_000), unique=True, max_size=60))
def test_what_is_kept_is_bounded_and_has_both_ends(ledgers: list[int]) -> None:
    ends = [root_at(one) for one in sorted(ledgers)]
    kept = thinned(ends)
    assert len(kept) == min(len(ends), ENDS_MAX)
    assert [one for one in ends if one in kept] == list(kept)
    if ends:
        assert (kept[0], kept[-1]) == (ends[0], ends[-1])


@given(st.integers(), st.integers(min_value=1, max_value=6))
def test_whatever_happens_every_root_finds_its_bytes(seed: int, chunk_objects: int) -> None:
    rng = random.Random(seed)
    record, lists, ledger_id, start, named = EMPTY, dict[str, list[IndexObject]](), 0, 0, 0
    for number in range(rng.randrange(60)):
        ledger_id += rng.random() < 0.2
        end = record.end
        made = IndexObject(key=str(number), start=end, length=rng.randrange(1, 9), sha256=b"")
        start = rng.randrange(start, made.end)
        after = root_at(ledger_id, number, start=start, end=made.end)
        record = record.published(after, made, keep_ends=True)
        if record.chunk_is_due(chunk_bytes=1 << 30, chunk_objects=chunk_objects):
            first, last = record.objects[0], record.objects[-1]
            lists[f"list-{number}"] = list(record.objects)
            chunk = IndexChunk(
                key=f"list-{number}",
                sha256=b"",
                start=first.start,
                end=last.end,
                object_count=len(record.objects),
            )
            record = record.closed(chunk)
        if rng.random() < 0.1:
            named = rng.randrange(named, ledger_id + 1)
            record = record.without_ends(at(named))
        assert len(record.objects) < chunk_objects + 1
        for kept in record.roots:
            assert _bytes_of(record, lists, kept) >= set(range(kept.root.start, kept.root.end))
            assert kept is record.newest or (kept.through and kept.through.ledger_id >= named)


def _bytes_of(
    record: AttributesRecord, lists: dict[str, list[IndexObject]], kept: KeptRoot
) -> set[int]:
    checkpoint = record.checkpoint_of(kept)
    every = list(checkpoint.objects)
    for chunk in checkpoint.chunks:
        every += lists[chunk.key]
    return {offset for one in every for offset in range(one.start, one.end)}


def test_the_newest_checkpoint_of_a_ledger_is_what_is_kept_of_it() -> None:
    record = EMPTY
    for place in ((1, 0), (1, 5), (2, 3), (4, 0), (4, 7)):
        record = record.published(root_at(*place), None, keep_ends=True)
    assert [one.through for one in record.roots] == [at(1, 5), at(2, 3), at(4, 7)]
    through = {last: record.within(LedgerId(last)) for last in range(6)}
    assert [one.through if one else None for one in through.values()] == [
        None,
        at(1, 5),
        at(2, 3),
        at(2, 3),
        at(4, 7),
        at(4, 7),
    ]
    alone = record.published(root_at(5), None, keep_ends=False)
    assert [one.through for one in alone.roots] == [at(5)]


def test_only_ledgers_up_to_the_first_without_a_copy_cover() -> None:
    one, two, three = LedgerId(1), LedgerId(2), LedgerId(3)
    assert covered([]) is None
    assert covered([(one, False), (two, True)]) is None
    assert covered([(one, True), (two, False), (three, True)]) == one
    assert covered([(one, True), (two, True)]) == two


def test_a_manifest_names_nothing_behind_a_ledger_without_a_copy_and_never_goes_back() -> None:
    record = EMPTY
    for ledger_id in (1, 2, 3):
        record = record.published(root_at(ledger_id), None, keep_ends=True)
    ledgers = [(LedgerId(one), one != 2) for one in (1, 2, 3)]
    head = ManifestHead(stream=STREAM, incarnation=UUID(int=1), created_ms=0)
    found = attributes_to_name(record, ledgers, head)
    assert found is not None
    assert found.newest.through == at(1)
    assert found.ends == ()
    assert attributes_to_name(None, ledgers, head) is None
    newer = AttributesRecord(incarnation=UUID(int=1), newest=root_at(2, 7))
    head = ManifestHead(stream=STREAM, incarnation=UUID(int=1), created_ms=0, attributes=newer)
    assert attributes_to_name(record, ledgers, head) is newer
    trimmed = ManifestHead(
        stream=STREAM, incarnation=UUID(int=1), created_ms=0, trimmed_through=LedgerId(3)
    )
    found = attributes_to_name(record, [], trimmed)
    assert found is not None
    assert found.newest.through == at(3)


def test_a_manifest_names_what_was_rebuilt_as_of_the_same_entry() -> None:
    damaged = AttributesRecord(
        incarnation=UUID(int=1), newest=root_at(1, end=9), objects=(object_at("lost", 0, 9),)
    )
    head = ManifestHead(stream=STREAM, incarnation=UUID(int=1), created_ms=0, attributes=damaged)
    ledgers = [(LedgerId(1), True)]
    assert attributes_to_name(damaged.raised(), ledgers, head) is damaged, "nothing is new"
    rebuilt = EMPTY.published(root_at(1, end=7), object_at("anew", 0, 7), keep_ends=True)
    assert attributes_to_name(rebuilt, ledgers, head) == rebuilt
    same_root = EMPTY.published(root_at(1, end=9), object_at("anew", 0, 9), keep_ends=True)
    assert attributes_to_name(same_root, ledgers, head) == same_root
    older = EMPTY.published(root_at(0, end=7), object_at("anew", 0, 7), keep_ends=True)
    assert attributes_to_name(older, ledgers, head) is damaged


def test_a_manifest_tells_what_was_given_up_with_or_without_a_checkpoint() -> None:
    head = ManifestHead(stream=STREAM, incarnation=UUID(int=1), created_ms=0)
    lost = EMPTY.without_entries(GivenUp(LedgerId(1), EntryId(2), EntryId(3)))
    named = attributes_to_name(lost, [], head)
    assert named is not None
    assert (named.newest, named.given_up) == (KeptRoot(), lost.given_up)
    assert attributes_to_name(lost, [], replace(head, attributes=named)) is named
    ledgers = [(LedgerId(1), True)]
    record = lost.published(root_at(1), None, keep_ends=True)
    named = attributes_to_name(record, ledgers, replace(head, attributes=named))
    assert named is not None
    assert (named.newest.through, named.given_up) == (at(1), lost.given_up)
    # Also one of the very first entry there can be, and of the ledger with the number 0.
    first = lost.published(KeptRoot(through=at(0, 0)), None, keep_ends=True)
    bare = attributes_to_name(lost, [], head)
    at_once = attributes_to_name(first, [(LedgerId(0), True)], replace(head, attributes=bare))
    assert at_once is not None
    assert at_once.newest.through == at(0, 0)
    # The same checkpoint, and more that was given up since.
    more = record.without_entries(GivenUp(LedgerId(2), EntryId(0), EntryId(0)))
    keys = LostKeys(at(1), KeyRange(AttributeKey(bytes(16)), AttributeKey(b"\xff" * 16)))
    more = replace(more, lost_keys=(keys,))
    named = attributes_to_name(more, ledgers, replace(head, attributes=named))
    assert named is not None
    assert (named.newest.through, named.given_up) == (at(1), more.given_up)
    assert named.lost_keys == (keys,)
    assert losses_of(named) == AttributesRecord(
        incarnation=named.incarnation, generation=1, given_up=more.given_up, lost_keys=(keys,)
    )
    assert losses_of(record_of(named.incarnation, record.checkpoint, generation=1)) is None


def test_why_a_ledger_stays() -> None:
    record = AttributesRecord(incarnation=UUID(int=1), newest=root_at(2, 9))
    assert holds_back(None, None, at(1, 0), is_copied=True) is None
    assert holds_back(record, None, at(2, 9), is_copied=False) is None
    assert "newest checkpoint" in (holds_back(record, at(9), at(2, 10), is_copied=False) or "")
    assert "manifest names" in (holds_back(record, at(2, 8), at(2, 9), is_copied=True) or "")
    assert holds_back(record, at(2, 9), at(2, 9), is_copied=True) is None
    assert "none" in (holds_back(EMPTY, None, at(0, 0), is_copied=False) or "")


def lost(ledger_id: int, first: int, last: int) -> GivenUp:
    return GivenUp(LedgerId(ledger_id), EntryId(first), EntryId(last))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_what_was_given_up_is_kept_as_ranges_that_do_not_touch(
    ranges: list[tuple[int, int, int]],
) -> None:
    record, wanted = EMPTY, set[tuple[int, int]]()
    for ledger_id, first, more in ranges:
        record = record.without_entries(lost(ledger_id, first, first + more))
        assert record.without_entries(lost(ledger_id, first, first + more)) == record
        wanted |= {(ledger_id, one) for one in range(first, first + more + 1)}
    kept = record.given_up
    assert {(one.ledger_id, e) for one in kept for e in range(one.first, one.last + 1)} == wanted
    for one, other in itertools.pairwise(kept):
        assert (one.ledger_id, one.last + 1) < (other.ledger_id, other.first)


def test_a_checkpoint_takes_a_consent_back_and_keeps_what_was_given_up() -> None:
    record = replace(EMPTY, loss_accepted="1 admin").without_entries(lost(2, 3, 4))
    after = record.published(root_at(3), None, keep_ends=False)
    assert (after.loss_accepted, after.given_up) == ("", (lost(2, 3, 4),))
    assert after.given_up_of(LedgerId(2)) == ((3, 4),)
    assert after.given_up_of(LedgerId(3)) == ()
