"""ADR-0016, "Numbers": 3/3/2 where there are three nodes, and never more copies than nodes."""

import pytest

from tierlog.client import LedgerShape
from tierlog.embedded.nodes import QUORUMS, quorum_environment
from tierlog.model.quorums import (
    STRIPE_ENTRIES,
    STRIPE_ENTRIES_MAX,
    STRIPE_ENTRIES_MIN,
    quorums_of,
    stripe_entries_of,
    stripe_of,
)
from tierlog.runtime.settings import OwnerSettings


@pytest.mark.parametrize(
    ("nodes", "quorums"),
    [(0, (1, 1, 1)), (1, (1, 1, 1)), (2, (2, 2, 2)), (3, (3, 3, 2)), (9, (3, 3, 2))],
)
def test_quorums_follow_the_count_of_nodes(nodes, quorums):
    assert quorums_of(nodes) == quorums
    shape = LedgerShape.of_cluster(nodes)
    assert (shape.ensemble_size, shape.write_quorum, shape.ack_quorum) == quorums
    assert tuple(quorum_environment(nodes, {})[name] for name in QUORUMS) == tuple(
        map(str, quorums)
    )


def test_streams_and_bare_ledgers_have_the_same_defaults():
    settings, shape = OwnerSettings(), LedgerShape.of_cluster(3)
    for name in ("ensemble_size", "write_quorum", "ack_quorum"):
        assert getattr(settings, name) == getattr(shape, name), name


def test_where_every_node_gets_every_entry_no_run_is_cut():
    assert stripe_of(3, 2, 256) == 256
    assert stripe_of(3, 3, 256) > 2**31


@pytest.mark.parametrize(
    ("entry_len", "entries"),
    [
        (100, 41_943),
        (1000, 4194),
        (10_000, 419),
        (100_000, 41),
        (1, STRIPE_ENTRIES_MAX),
        (10**9, STRIPE_ENTRIES_MIN),
    ],
)
def test_a_stripe_has_so_many_bytes_whatever_the_entries(entry_len, entries):
    assert stripe_entries_of(7 * entry_len, 7, 4 * 1024 * 1024) == entries


def test_where_no_entry_is_known_a_stripe_has_the_usual_count():
    assert stripe_entries_of(0, 0, 4 * 1024 * 1024) == STRIPE_ENTRIES
    assert stripe_entries_of(0, 5, 4 * 1024 * 1024) == STRIPE_ENTRIES_MAX, "all of them empty"
