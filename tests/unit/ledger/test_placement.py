"""Protocols.md section 1, "Create": an ensemble of live nodes, spread over hosts and zones."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment,list-item"

import pytest

from tierlog.ledger.placement import choose_ensemble, choose_replacement
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo


def node(name, zone="", host=None, *, read_only=False, draining=False, free_bytes=0):
    host = host or name
    return NodeInfo(
        node_id=NodeId(name),
        wire_address=f"{host}:1",
        grpc_address=f"{host}:2",
        http_address=f"{host}:3",
        zone=zone,
        read_only=read_only,
        draining=draining,
        free_bytes=free_bytes,
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


def test_hosts_are_distinct_while_they_suffice_whatever_the_zones():
    nodes = [node("a1", "z1", "h1"), node("a2", "z1", "h1")]
    nodes += [node(f"b{i}", "z2", f"h{i + 2}") for i in range(3)]
    host_of = {one.node_id: one.wire_address for one in nodes}
    for seed in range(30):
        chosen = choose_ensemble(nodes, ensemble_size=4, seed=b"%d" % seed)
        assert len({host_of[one] for one in chosen}) == 4


def test_nodes_that_drain_or_take_nothing_are_left_out():
    nodes = [node("a"), node("b", draining=True), node("c", read_only=True), node("d"), node("e")]
    for seed in range(20):
        chosen = choose_ensemble(nodes, ensemble_size=3, seed=b"%d" % seed)
        assert set(chosen) == {"a", "d", "e"}


def test_a_node_with_far_less_space_than_usual_comes_last_the_preferred_one_too():
    nodes = [node(f"n{i}", free_bytes=100) for i in range(4)]
    nodes += [node("full", free_bytes=49), node("untold")]
    for seed in range(30):
        chosen = choose_ensemble(nodes, ensemble_size=5, seed=b"%d" % seed, preferred="full")
        assert "full" not in chosen
        assert "full" in choose_ensemble(nodes, ensemble_size=6, seed=b"%d" % seed)
    roomy = [*nodes[:4], node("half", free_bytes=50)]
    seen = {
        one for i in range(30) for one in choose_ensemble(roomy, ensemble_size=2, seed=b"%d" % i)
    }
    assert "half" in seen


def test_known_nodes_stand_in_for_missing_ones_while_an_ack_quorum_is_left():
    live = [node("a"), node("c")]
    chosen = choose_ensemble(
        live, ensemble_size=3, seed=b"", known=["a", "b", "c"], placeholders_max=1
    )
    assert set(chosen) == {"a", "b", "c"}
    for more in ({"known": ["a", "b", "c"]}, {"placeholders_max": 1}):
        with pytest.raises(RetryableError, match="needs 1 more"):
            choose_ensemble(live, ensemble_size=3, seed=b"", **more)
    with pytest.raises(RetryableError, match="needs 2 more"):
        choose_ensemble(
            live[:1], ensemble_size=3, seed=b"", known=["a", "b", "c"], placeholders_max=1
        )


def test_who_stands_in_is_rather_away_than_unable_and_draining_last():
    live = [node("a"), node("b"), node("drains", draining=True), node("full", read_only=True)]

    def third(known, excluded=frozenset(), nodes=live):
        chosen = choose_ensemble(
            nodes, ensemble_size=3, seed=b"1", known=known, placeholders_max=1, excluded=excluded
        )
        (one,) = set(chosen) - {"a", "b"}
        return one

    assert third(["gone"]) == "gone"
    assert third([]) == "full"
    assert third([], nodes=live[:3]) == "drains"
    failed = [*live, node("failed")]
    assert third([], frozenset({"failed"}), failed) == "failed"
    assert third(["gone"], frozenset({"failed"}), failed) == "gone"


def test_a_replacement_lies_in_the_zone_of_the_one_that_failed_where_others_are_taken():
    nodes = [node(f"n{i}", zone=f"z{i % 3}") for i in range(9)]
    zone_of = {one.node_id: one.zone for one in nodes}
    for seed in range(30):
        ring = choose_ensemble(nodes, ensemble_size=6, seed=b"%d" % seed)
        for at in range(6):
            left = [one for one in nodes if one.node_id != ring[at]]
            new = choose_replacement(left, ring, at, write_quorum=3, seed=b"%d" % seed)
            assert new not in ring
            assert zone_of[new] == zone_of[ring[at]]


def test_a_replacement_is_none_of_the_ensemble_nor_of_those_that_failed():
    nodes = [node(name) for name in "abcdef"]
    nodes[5] = node("f", draining=True)
    ring = ("a", "b", "c")
    seen = {
        choose_replacement(nodes, ring, 1, write_quorum=3, seed=b"%d" % seed, excluded={"d"})
        for seed in range(20)
    }
    assert seen == {"e"}
    assert choose_replacement(nodes[:4], ring, 1, write_quorum=3, seed=b"", excluded={"d"}) is None


def test_a_replacement_comes_from_another_host_if_there_is_one():
    nodes = [node("a", host="h1"), node("b", host="h2"), node("c", host="h3")]
    spare = [node("d", host="h1"), node("e", host="h4")]
    for seed in range(20):
        new = choose_replacement(
            [*nodes, *spare], ("a", "b", "c"), 1, write_quorum=2, seed=b"%d" % seed
        )
        assert new == "e"
