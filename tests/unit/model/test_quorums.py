"""ADR-0016, "Numbers": 3/3/2 where there are three nodes, and never more copies than nodes."""

import pytest

from tierlog.client import LedgerShape
from tierlog.embedded.nodes import QUORUMS, quorum_environment
from tierlog.model.quorums import quorums_of, stripe_of
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
    for name in ("ensemble_size", "write_quorum", "ack_quorum", "stripe_entries"):
        assert getattr(settings, name) == getattr(shape, name), name


def test_where_every_node_gets_every_entry_no_run_is_cut():
    assert stripe_of(3, 2, 256) == 256
    assert stripe_of(3, 3, 256) > 2**31
