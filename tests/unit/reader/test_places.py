"""Protocols section 5: what a position means, and which tier is asked. A table, without I/O."""

from collections.abc import Sequence
from uuid import UUID

import pytest

from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.position import Edge, Position
from tierlog.model.stream import ListedLedger
from tierlog_reader.places import (
    AtEnd,
    BehindLast,
    Spot,
    Tier,
    choose_tier,
    ledger_behind,
    locate,
)

LOGS = StreamName("logs")
EARLIEST, LATEST = Edge.EARLIEST, Edge.LATEST


def closed(ledger_id, entries):
    return ListedLedger(
        ledger_id=LedgerId(ledger_id),
        opened_ms=1,
        block_size=64,
        owner_epoch=1,
        closed=True,
        last_entry_id=EntryId(entries - 1),
        length=entries,
        closed_ms=2,
    )


def opened(ledger_id):
    return ListedLedger(ledger_id=LedgerId(ledger_id), opened_ms=1, block_size=64, owner_epoch=1)


def at(ledger_id, entry_id):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


LIST = (closed(5, 10), closed(7, 3), opened(9))


@pytest.mark.parametrize(
    ("ledgers", "where", "ledger_id", "entry_id", "resume"),
    [
        (LIST, EARLIEST, 5, 0, EARLIEST),
        (LIST, at(5, 0), 5, 0, at(5, 0)),
        (LIST, at(5, 9), 5, 9, at(5, 9)),
        # A ledger's end means the start of the next one.
        (LIST, at(5, 10), 7, 0, at(5, 10)),
        (LIST, at(7, 3), 9, 0, at(7, 3)),
        (LIST, at(9, 4), 9, 4, at(9, 4)),
        # An open ledger without entries may vanish: its start is named by what is before it.
        (LIST, at(9, 0), 9, 0, at(7, 3)),
        ((opened(9),), at(9, 0), 9, 0, EARLIEST),
    ],
)
def test_a_position_means_an_entry(ledgers, where, ledger_id, entry_id, resume):
    place = locate(LOGS, ledgers, where, trimmed_end=None)
    assert isinstance(place, Spot)
    assert (place.ledger.ledger_id, place.entry_id, place.resume) == (ledger_id, entry_id, resume)


@pytest.mark.parametrize(
    ("ledgers", "where", "resume"),
    [
        ((), EARLIEST, EARLIEST),
        ((), LATEST, EARLIEST),
        ((closed(5, 10),), at(5, 10), at(5, 10)),
        ((closed(5, 10),), LATEST, at(5, 10)),
    ],
)
def test_behind_everything_there_is_only_waiting(ledgers, where, resume):
    assert locate(LOGS, ledgers, where, trimmed_end=None) == AtEnd(resume=resume)


def test_latest_of_an_open_ledger_is_behind_its_lac_whichever_that_is():
    place = locate(LOGS, LIST, LATEST, trimmed_end=None)
    assert place == BehindLast(ledger=LIST[2], resume=at(7, 3))


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (at(5, 11), Reason.NO_SUCH_ENTRY),
        (at(7, 400), Reason.NO_SUCH_ENTRY),
        (at(4, 0), Reason.TRIMMED),
        (at(1, 77), Reason.TRIMMED),
        (at(6, 0), Reason.LEDGER_NOT_FOUND),
        (at(8, 1), Reason.LEDGER_NOT_FOUND),
        (at(10, 0), Reason.LEDGER_NOT_FOUND),
    ],
)
def test_what_is_not_there_is_told_by_its_reason_and_with_a_remedy(where, reason):
    with pytest.raises(RefusedError) as caught:
        locate(LOGS, LIST, where, trimmed_end=None)
    assert caught.value.reason is reason
    assert caught.value.remedy
    lost = {"lost_from": str(where), "lost_before": "5:0"}
    named = lost if reason is Reason.TRIMMED else {"position": str(where)}
    assert {"stream": LOGS, **named}.items() <= caught.value.details.items()


TRIMMED_END = at(4, 6)


@pytest.mark.parametrize("trimmed_end", [None, TRIMMED_END])
def test_retention_is_blamed_only_where_it_took_something(trimmed_end):
    """A position of another stream, or of another partition, is before the first ledger, too."""
    with pytest.raises(RefusedError) as caught:
        locate(LOGS, LIST, at(4, 0), trimmed_end=trimmed_end)
    assert caught.value.reason is Reason.TRIMMED
    told = f"{caught.value.message}. {caught.value.remedy}"
    assert ("retention" in told) == (trimmed_end is not None)


@pytest.mark.parametrize(
    ("ledgers", "where", "ledger_id", "resume"),
    [
        (LIST, TRIMMED_END, 5, TRIMMED_END),
        (LIST, EARLIEST, 5, TRIMMED_END),
        ((opened(9),), TRIMMED_END, 9, TRIMMED_END),
        ((opened(9),), at(9, 0), 9, TRIMMED_END),
    ],
)
def test_whoever_read_up_to_the_end_of_a_trimmed_ledger_goes_on(ledgers, where, ledger_id, resume):
    place = locate(LOGS, ledgers, where, trimmed_end=TRIMMED_END)
    assert isinstance(place, Spot)
    assert (place.ledger.ledger_id, place.entry_id, place.resume) == (ledger_id, 0, resume)


@pytest.mark.parametrize("where", [TRIMMED_END, EARLIEST, LATEST])
def test_behind_a_stream_all_of_which_was_trimmed_there_is_waiting(where):
    assert locate(LOGS, (), where, trimmed_end=TRIMMED_END) == AtEnd(resume=TRIMMED_END)


def test_the_start_of_an_open_ledger_is_named_by_what_was_trimmed_before_it():
    behind = locate(LOGS, (opened(9),), LATEST, trimmed_end=TRIMMED_END)
    assert behind == BehindLast(ledger=opened(9), resume=TRIMMED_END)


@pytest.mark.parametrize("ledgers", [LIST, ()])
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        # One entry of the trimmed ledger was missed, or all of it.
        (at(4, 5), Reason.TRIMMED),
        (at(4, 0), Reason.TRIMMED),
        # The end of the ledger before it, and that ledger was trimmed as well.
        (at(3, 9), Reason.TRIMMED),
        (at(4, 7), Reason.NO_SUCH_ENTRY),
        (at(10, 0), Reason.LEDGER_NOT_FOUND),
    ],
)
def test_whoever_missed_an_entry_is_told(ledgers, where, reason):
    with pytest.raises(RefusedError) as caught:
        locate(LOGS, ledgers, where, trimmed_end=TRIMMED_END)
    assert caught.value.reason is reason
    if reason is Reason.TRIMMED:
        before = str(at(5, 0) if ledgers else TRIMMED_END)
        lost = {"lost_from": str(where), "lost_before": before}
        assert caught.value.details == {"stream": LOGS, **lost}


def context(state, **more):
    return OffloadContext(
        stream=LOGS, incarnation=UUID(int=1), ledger_id=LedgerId(5), state=state, **more
    )


S = OffloadState


@pytest.mark.covers("A09", "B11")
@pytest.mark.parametrize(
    ("state", "priority", "tier"),
    [
        (S.LOCAL, "tier2", Tier.TIER1),
        (S.OFFLOADING, "tier2", Tier.TIER1),
        (S.COMPLETE, "tier2", Tier.TIER2),
        (S.COMPLETE, "tier1", Tier.TIER1),
        # Being deleted is gone, whatever the priority.
        (S.TIER1_DELETING, "tier1", Tier.TIER2),
        (S.TIER1_DELETED, "tier1", Tier.TIER2),
        (S.REPAIRING, "tier2", Tier.TIER2),
        (S.REPAIRING, "tier1", Tier.TIER1),
    ],
)
def test_the_tier_follows_the_context_and_the_priority(state, priority, tier):
    gone_locally = state is S.TIER1_DELETED
    found = context(state, bookkeeper_deleted=gone_locally)
    assert choose_tier(LIST[0], found, priority=priority) is tier


def test_what_is_repaired_after_it_went_from_tier_1_is_not_looked_for_there():
    found = context(S.REPAIRING, bookkeeper_deleted=True)
    assert choose_tier(LIST[0], found, priority="tier1") is Tier.TIER2


def test_an_open_ledger_is_only_ever_in_tier_1():
    assert choose_tier(LIST[2], None, priority="tier2") is Tier.TIER1


def test_a_tier_that_turned_out_empty_is_left_for_the_other():
    found = context(S.COMPLETE)
    gone = frozenset({Tier.TIER2})
    assert choose_tier(LIST[0], found, priority="tier2", gone=gone) is Tier.TIER1


def test_no_tier_left_is_unknown_and_never_empty():
    found = context(S.TIER1_DELETED, bookkeeper_deleted=True)
    with pytest.raises(RetryableError) as caught:
        choose_tier(LIST[0], found, priority="tier2", gone=frozenset({Tier.TIER2}))
    assert caught.value.reason is Reason.UNKNOWN
    assert "tierlog scrub --repair" in caught.value.remedy


def test_a_ledger_that_is_being_trimmed_is_trimmed_from_where_it_is_wanted_to_its_end():
    with pytest.raises(RefusedError) as caught:
        choose_tier(LIST[0], context(S.TRIMMING), priority="tier2", entry_id=EntryId(3))
    assert caught.value.reason is Reason.TRIMMED
    lost = {"lost_from": "5:3", "lost_before": "5:10"}
    assert caught.value.details == {"stream": LOGS, **lost}


class Looked(Sequence[ListedLedger]):
    """A list of ledgers that counts how often one of them is looked at."""

    def __init__(self, count):
        self._count = count
        self.looks = 0

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        if not 0 <= index < self._count:
            raise IndexError(index)
        self.looks += 1
        return closed(2 * index, 3)


@pytest.mark.parametrize("index", [0, 1, 50_000, 99_998])
def test_of_a_list_of_any_length_a_few_ledgers_are_looked_at(index):
    ledgers = Looked(100_000)
    place = locate(LOGS, ledgers, at(2 * index, 1), trimmed_end=None)
    assert isinstance(place, Spot)
    assert (place.ledger.ledger_id, place.entry_id) == (2 * index, 1)
    with pytest.raises(RefusedError, match="has no ledger"):
        locate(LOGS, ledgers, at(2 * index + 1, 0), trimmed_end=None)
    for before in (2 * index, 2 * index + 1):
        behind = ledger_behind(ledgers, LedgerId(before))
        assert behind is not None
        assert behind.ledger_id == 2 * (index + 1)
    assert ledger_behind(ledgers, LedgerId(2 * 99_999)) is None
    assert ledgers.looks < 150
