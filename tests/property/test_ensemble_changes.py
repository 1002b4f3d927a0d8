"""Nodes fail, stall and come back while a ledger is written; then its owner is gone.

Protocols.md section 1: whatever was confirmed lies on an ack quorum of the published ensembles at
that moment, and recovery ends with all of it, though so many nodes are lost as leave one of each
ack quorum. A node never sees two runs under one id: the nodes in memory assert it.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.test_writer_changes import Scene
from tierlog.ledger.replicas import Replica, Sent, late_nodes
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, NodeId

NODES = 6
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(
            st.sampled_from(["down", "up", "deaf", "mute", "full", "slow", "well"]),
            st.integers(0, NODES - 1),
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.01, 1.1, 3.0])),
    ),
    min_size=1,
    max_size=25,
)


def happen(node, kind):
    if kind == "well":
        node.deaf = node.mute = node.read_only = False
        node.delay_s = 0.0
    elif kind == "slow":
        node.delay_s = 2.7
    else:
        name = {"down": "down", "up": "down", "full": "read_only"}.get(kind, kind)
        setattr(node, name, kind != "up")


async def live_through(scene, events):
    nodes, serial = list(scene.cluster.nodes.values()), 0
    for kind, value in events:
        if kind == "append" and not scene.writer.ended.is_set():
            scene.send(*[b"%d" % (serial + step) for step in range(value)])
            serial += value
        elif kind == "wait":
            await asyncio.sleep(value)
        elif kind != "append":
            happen(nodes[value], kind)


@settings(max_examples=150, deadline=None)
@given(
    events=EVENTS,
    shape=st.sampled_from([((3, 3, 2), 2**40), ((4, 3, 2), 2), ((5, 2, 2), 1), ((3, 2, 1), 3)]),
    finishes=st.booleans(),
    lost=st.integers(0, NODES - 1),
)
def test_what_is_confirmed_stays(events, shape, finishes, lost):
    quorums, stripe_entries = shape

    async def main():
        scene = Scene(NODES, quorums, stripe_entries)
        nodes = list(scene.cluster.nodes.values())
        async with scene.writing() as writer:
            await live_through(scene, events)
            if finishes:
                try:
                    await writer.finish()
                except TierlogError:
                    assert writer.failure is not None
        confirmed = writer.last_add_confirmed
        for number, node in enumerate(nodes):
            happen(node, "well")
            node.down = number == lost and quorums == (3, 3, 2)
        catalog = scene.cluster.catalog()
        closed = await scene.cluster.recovery(catalog).recover(scene.claimed, scene.ledger_id)
        if closed is None:
            assert confirmed == -1
        else:
            assert closed.last_entry_id >= confirmed
            if finishes and writer.failure is None:
                assert closed.last_entry_id == confirmed
            entries = await scene.read(closed.last_entry_id)
            assert entries == [b"%d" % number for number in range(closed.last_entry_id + 1)]

    run_virtual(main())


@given(
    ages=st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=5),
    failed=st.integers(0, 31),
    factor=st.sampled_from([1.0, 3.0, 10.0]),
)
def test_only_who_is_far_behind_a_healthy_one_is_late(ages, failed, factor):
    replicas = []
    for number, age in enumerate(ages):
        one = Replica(NodeId(f"n{number}"), None, failed=bool(failed & 1 << number))
        if age is not None:
            one.owe(Sent(None, EntryId(0), EntryId(0), 1, 0.0), None, 100 - age)
        replicas.append(one)
    late = late_nodes(replicas, 100.0, slow_node_s=2.0, factor=factor)
    healthy = [one for one in replicas if not one.failed]
    assert len(late) < max(1, len(healthy)), "one of them sets the measure"
    for one in healthy:
        others = [other.age_s(100.0) for other in healthy if other is not one]
        age = one.age_s(100.0)
        assert (one in late) == (bool(others) and age > 2 and age > factor * max(others))
