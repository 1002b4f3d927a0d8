"""Auto-recovery's judgements (protocols.md section 1, ADR-0016): whose share an entry is, who is
lost, and what becomes of each copy.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.ledger.shares import share_of
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import KEY_STRIPE_ENTRIES, LedgerMetadata, LedgerState, Segment
from tierlog.model.replication import CopyTrouble, UnderReplicated
from tierlog.model.spans import common, count, deltas_of_spans, spans_of_deltas, union, without
from tierlog_ingest.replication.plan import (
    Absences,
    Fate,
    complaints_of,
    copies_of,
    in_order,
    is_due,
)

A, B, C, D = (NodeId(name) for name in "abcd")

entry_ids = st.integers(0, 40).map(EntryId)
spans = st.lists(
    st.tuples(entry_ids, st.integers(0, 6)).map(lambda one: (one[0], EntryId(sum(one)))),
    max_size=6,
)


def entries(of) -> set[int]:
    return {entry for first, last in of for entry in range(first, last + 1)}


@given(spans, spans)
def test_ranges_are_sets_of_entries(these, those):
    assert entries(union(these)) == entries(these)
    these, those = union(these), union(those)
    for made, wanted in (
        (without(these, those), entries(these) - entries(those)),
        (common(these, those), entries(these) & entries(those)),
    ):
        assert entries(made) == wanted
        assert count(made) == len(wanted)
        assert made == union(made), "in order, and apart"
    assert spans_of_deltas(deltas_of_spans(these)) == these


@pytest.mark.parametrize("deltas", [[1], [0, 0], [-1, 2], [0, 2, 0, 2], [3, -1]])
def test_what_is_no_range_is_refused(deltas):
    with pytest.raises(CorruptError):
        spans_of_deltas(deltas)


@st.composite
def ledgers(draw) -> LedgerMetadata:
    size = draw(st.integers(1, 5))
    write = draw(st.integers(1, size))
    stripe = draw(st.sampled_from([1, 2, 3, 7, 2**40]))
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 30), max_size=3)))]
    names = [NodeId(f"n{number}") for number in range(size)]
    lost = draw(st.sampled_from([b"", b"2-3", b"0-0,9-12"]))
    return LedgerMetadata(
        ensemble_size=size,
        write_quorum=write,
        ack_quorum=draw(st.integers(1, write)),
        segments=tuple(
            Segment(first_entry_id=EntryId(first), ensemble=tuple(draw(st.permutations(names))))
            for first in firsts
        ),
        state=LedgerState.CLOSED,
        last_entry_id=EntryId(draw(st.integers(0, 40))),
        custom={
            KEY_STRIPE_ENTRIES: str(stripe).encode(),
            **({"tierlog/lost": lost} if lost else {}),
        },
    )


@pytest.mark.covers("D15", "D17")
@given(ledgers())
def test_shares_are_what_write_sets_say(metadata: LedgerMetadata):
    """The oracle is the writer's own rule, entry by entry."""
    shares: dict[NodeId, set[int]] = {}
    for at, segment in enumerate(metadata.segments):
        for place, node_id in enumerate(segment.ensemble):
            shares.setdefault(node_id, set()).update(entries(share_of(metadata, at, place)))
    given_up = entries(metadata.lost)
    for entry in range(metadata.last_entry_id + 1):
        wanted = set() if entry in given_up else set(metadata.write_set(EntryId(entry)))
        assert {node for node, held in shares.items() if entry in held} == wanted
    assert all(max(held, default=0) <= metadata.last_entry_id for held in shares.values())


def closed(*, state: LedgerState = LedgerState.CLOSED) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=(A, B, C)),),
        state=state,
        last_entry_id=EntryId(9),
    )


def queued(**reasons: list[NodeId]) -> UnderReplicated:
    one = UnderReplicated(ledger_id=LedgerId(1), since_ms=0)
    for reason, nodes in reasons.items():
        one = one.complained(reason, nodes, None)
    return one


@pytest.mark.parametrize(
    ("reasons", "live", "draining", "wanted"),
    [
        ({}, {A, B, C}, set(), [Fate.COMPARED] * 3),
        ({"lost": [A]}, {A, B, C}, set(), [Fate.COMPARED] * 3),  # it came back
        ({"lost": [A]}, {B, C}, set(), [Fate.MOVED, Fate.COMPARED, Fate.COMPARED]),
        ({"missing": [A]}, {B, C}, set(), [Fate.AWAITED, Fate.COMPARED, Fate.COMPARED]),
        ({"damaged": [B]}, {B, C}, set(), [Fate.AWAITED, Fate.COMPARED, Fate.COMPARED]),
        ({}, {A, B, C}, {C}, [Fate.COMPARED, Fate.COMPARED, Fate.MOVED]),
        ({}, {A, B}, {C}, [Fate.COMPARED, Fate.COMPARED, Fate.MOVED]),
    ],
)
def test_a_copy_moves_off_a_node_that_goes_and_waits_for_one_that_may_come_back(
    reasons, live, draining, wanted
):
    copies = copies_of(closed(), queued(**reasons), live=live, draining=draining)
    assert [one.node_id for one in copies] == [A, B, C]
    assert [one.fate for one in copies] == wanted


def test_what_a_reader_met_is_suspect_within_the_share():
    one = queued().complained(CopyTrouble.DAMAGED, [B], (EntryId(8), EntryId(20)))
    copies = copies_of(closed(), one, live={A, B, C}, draining=set())
    assert [one.suspect for one in copies] == [(), ((8, 9),), ()]


@pytest.mark.parametrize("state", list(LedgerState))
def test_an_open_ledger_is_left_to_its_owner_for_the_grace_time(state):
    metadata = closed(state=state)
    is_closed = state is LedgerState.CLOSED
    soon = complaints_of(metadata, lost={A, D}, lost_long=set(), draining=set())
    assert soon == ({CopyTrouble.LOST: {A}} if is_closed else {})
    later = complaints_of(metadata, lost={A}, lost_long={A}, draining={D, B})
    assert later == {CopyTrouble.LOST: {A}, CopyTrouble.DRAINING: {B}}


def test_a_node_is_lost_after_the_delay_and_not_before():
    absences = Absences()
    absences.note({A, B}, {B}, 100.0)
    assert absences.longer_than(30, 129.9) == frozenset()
    assert absences.next_s((30, 60), 110.0) == 20.0
    assert absences.next_s((30, 60), 140.0) == 20.0
    assert absences.longer_than(30, 130.0) == {A}
    absences.note({A, B}, {A, B}, 140.0)
    absences.note({A, B}, set(), 150.0)
    assert absences.longer_than(30, 170.0) == frozenset(), "it was back meanwhile"
    assert absences.longer_than(30, 180.0) == {A, B}
    absences.note({A, B}, {B}, 181.0)
    assert absences.longer_than(0, 181.0) == {A}
    assert absences.next_s((30,), 200.0) is None
    absences.note({B}, {B}, 182.0)
    assert absences.longer_than(0, 182.0) == frozenset(), "nobody knows it any more"


def test_a_ledger_is_tried_again_after_a_back_off_that_is_bounded():
    def due(tries: int, after_ms: int) -> bool:
        one = queued().begun("w").failed("x", 1000)
        for _ in range(tries - 1):
            one = one.begun("w").failed("x", 1000)
        return is_due(one, 1000 + after_ms, backoff_s_first=2, backoff_s_max=10)

    assert is_due(queued(), 0, backoff_s_first=2, backoff_s_max=10)
    assert not due(1, 1999)
    assert due(1, 2000)
    assert not due(2, 3999)
    assert due(2, 4000)
    assert not due(50, 9999)
    assert due(50, 10_000)
    assert due(50, -1), "a clock that went back holds nothing up"


def test_workers_begin_at_places_of_their_own_and_with_what_was_tried_least():
    ids = [1, 2, 3, 4]
    queue = [UnderReplicated(ledger_id=LedgerId(one), since_ms=0) for one in ids]
    queue[2] = queue[2].begun("w")
    assert [one.ledger_id for one in in_order(queue, LedgerId(2))] == [2, 4, 1, 3]
    assert [one.ledger_id for one in in_order(queue, LedgerId(0))] == [1, 2, 4, 3]
