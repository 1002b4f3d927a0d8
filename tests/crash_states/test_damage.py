"""Damaged files (protocols.md section 2: "a torn or flipped byte is detected, never served").

Small nodes with a known content; every header byte flipped and a seeded share of the others, files
cut at many lengths, every two pages swapped, each file removed. ``tests.crash_states.damage`` has
the table of what a node may make of it. ``make soak`` flips every byte.
"""

from __future__ import annotations

import random

import pytest

from tests.crash_states.damage import (
    Verdict,
    crashed_node,
    flips,
    growing_node,
    judge,
    losses,
    stopped_node,
    swaps,
    truncations,
)

pytestmark = pytest.mark.covers("D03")

FLIPS_OF_A_FILE = 16
CUT_STEP = 512


@pytest.fixture(params=["crashed", "stopped"], scope="module")
def node(request):
    return crashed_node() if request.param == "crashed" else stopped_node()


@pytest.fixture(params=["crashed", "stopped"], scope="module")
def wide_node(request):
    """A node of three directories."""
    make = crashed_node if request.param == "crashed" else stopped_node
    return make(folder_count=3)


def test_nodes_hold_what_the_table_is_about(node, wide_node):
    for one in (node, wide_node):
        assert len(one.expected.stored) >= 20
        assert len({path.split("/")[1] for path in one.files} & {"journal", "logs", "index"}) == 3


def test_flipped_bytes(node):
    report = judge(node, flips(node, random.Random(1), most=FLIPS_OF_A_FILE))
    assert report.failures == []
    assert report.counts.total() > 500
    assert report.counts["log", "flip", Verdict.UNKNOWN] > 30, "they matter"


def test_cut_files(node):
    report = judge(node, truncations(node, step=CUT_STEP))
    assert report.failures == []
    assert report.counts.total() > 400


def test_every_cut_of_a_filled_last_segment_is_noticed():
    node = crashed_node()
    last = max(path for path in node.files if path.endswith(".journal"))
    cuts = [case for case in truncations(node, step=CUT_STEP) if last in case.changes]
    report = judge(node, iter(cuts))
    assert report.failures == []
    assert report.counts["last journal", "cut", Verdict.UNKNOWN] > 50
    assert report.counts["last journal", "cut", Verdict.LOST] == 0


def test_a_growing_last_segment_is_the_exception():
    node = growing_node()
    last = max(path for path in node.files if path.endswith(".journal"))
    cuts = [case for case in truncations(node, step=CUT_STEP) if last in case.changes]
    report = judge(node, iter(cuts))
    assert report.failures == []
    assert report.counts["growing journal", "cut", Verdict.LOST] > 0


def test_swapped_pages(node):
    report = judge(node, swaps(node))
    assert report.failures == []
    assert report.counts.total() > 200


def test_swapped_pages_and_lost_files_of_several_directories(wide_node):
    for cases in (swaps(wide_node), losses(wide_node)):
        assert judge(wide_node, cases).failures == []


def test_lost_files(node):
    report = judge(node, losses(node))
    assert report.failures == []
