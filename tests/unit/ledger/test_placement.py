"""Protocols.md section 1, "Create": an ensemble of live nodes, spread over zones."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import pytest

from tierlog.ledger.placement import choose_ensemble
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo


def node(name, zone="", host=None, *, read_only=False):
    host = host or name
    return NodeInfo(
        node_id=NodeId(name),
        wire_address=f"{host}:1",
        grpc_address=f"{host}:2",
        http_address=f"{host}:3",
        zone=zone,
        read_only=read_only,
    )


@pytest.mark.covers("D14")
def test_nodes_are_distinct_and_the_choice_depends_on_the_seed_alone():
    nodes = [node(f"n{i}") for i in range(20)]
    seen = set()
    for seed in range(50):
        chosen = choose_ensemble(nodes, ensemble_size=5, seed=b"%d" % seed)
        again = choose_ensemble(reversed(nodes), ensemble_size=5, seed=b"%d" % seed)
        assert chosen == again
        assert len(set(chosen)) == 5
        seen.update(chosen)
    assert len(seen) == 20


def test_neighbours_lie_in_different_zones_round_the_whole_ring():
    nodes = [node(f"n{i}", zone=f"z{i % 3}") for i in range(9)]
    zone_of = {one.node_id: one.zone for one in nodes}
    for seed in range(30):
        ring = choose_ensemble(nodes, ensemble_size=6, seed=b"%d" % seed)
        for start in range(6):
            window = {zone_of[ring[(start + step) % 6]] for step in range(3)}
            assert len(window) == 3


def test_hosts_are_spread_when_zones_do_not_decide():
    nodes = [node(f"n{i}", host=f"h{i % 2}") for i in range(6)]
    host_of = {one.node_id: one.wire_address for one in nodes}
    for seed in range(20):
        chosen = choose_ensemble(nodes, ensemble_size=2, seed=b"%d" % seed)
        assert {host_of[one] for one in chosen} == {"h0:1", "h1:1"}


def test_the_preferred_node_is_among_them():
    nodes = [node(f"n{i}") for i in range(10)]
    for seed in range(20):
        chosen = choose_ensemble(nodes, ensemble_size=3, seed=b"%d" % seed, preferred=NodeId("n7"))
        assert "n7" in chosen


def test_too_few_nodes_is_unavailable_and_names_what_is_missing():
    nodes = [node("a"), node("b", read_only=True), node("c")]
    with pytest.raises(RetryableError, match="needs 2 more") as caught:
        choose_ensemble(nodes, ensemble_size=3, seed=b"", excluded=frozenset({NodeId("c")}))
    assert caught.value.reason is Reason.UNAVAILABLE
    assert caught.value.details["read_only"] == "b"
    assert caught.value.details["failed"] == "c"
