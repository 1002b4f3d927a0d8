"""The demo of a cluster counts copies and times by itself: those counts are right."""

import asyncio
from dataclasses import replace

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.cli.demo.cluster_job import AnswerWatch, ClusterOutcome, entries_by_node
from tierlog.cli.demo.cluster_report import document_of
from tierlog.model.ids import EntryId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment

A, B, C, D = (NodeId(name) for name in "abcd")
CLOSED = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    segments=(Segment(first_entry_id=EntryId(0), ensemble=(A, B, C)),),
    state=LedgerState.CLOSED,
    last_entry_id=EntryId(5),
)


def test_each_entry_is_wanted_on_its_write_set():
    assert entries_by_node(CLOSED) == {A: [0, 2, 3, 5], B: [0, 1, 3, 4], C: [1, 2, 4, 5]}


def test_a_later_ensemble_has_the_entries_from_there_on():
    second = Segment(first_entry_id=EntryId(3), ensemble=(A, D, C))
    found = entries_by_node(replace(CLOSED, segments=(*CLOSED.segments, second)))
    assert found == {A: [0, 2, 3, 5], B: [0, 1], C: [1, 2, 4, 5], D: [3, 4]}


def test_a_ledger_without_entries_wants_none():
    assert entries_by_node(replace(CLOSED, last_entry_id=EntryId(-1))) == {}


@on_virtual_time
async def test_the_longest_gap_is_that_between_two_answers_not_of_a_pause():
    watch = AnswerWatch()
    for pause_s, done in ((5, 10), (1, 20), (3, 20), (1, 30), (2, 40)):
        await asyncio.sleep(pause_s)
        watch("bytes", done, None)
    assert watch.longest_s == 4
    watch.pause()
    await asyncio.sleep(100)
    watch("bytes", 50, None)
    await asyncio.sleep(1)
    watch("bytes", 60, None)
    assert watch.longest_s == 4


@pytest.mark.parametrize(("acknowledged", "read", "lost"), [(3, 3, 0), (3, 2, 1), (2, 3, 0)])
def test_what_is_lost_is_what_was_acknowledged_and_not_read(acknowledged, read, lost):
    outcome = ClusterOutcome(source="x", acknowledged=acknowledged)
    for _ in range(3):
        outcome.appended.add(b"k", 1, b"p")
    for _ in range(read):
        outcome.read.add(b"k", 1, b"p")
    document = document_of(outcome, elapsed_s=1.0)
    assert (document["events_lost"], document["same"]) == (lost, read == 3)
