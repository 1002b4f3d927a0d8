"""Who is to own a stream: the same answer on every node, and no claim over one who answers."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId, StreamName
from tierlog.model.node import NodeInfo
from tierlog.model.stream import ListedLedger, Owner, Stream, StreamLifecycle
from tierlog_ingest.streams.ownership import (
    Elsewhere,
    HandedOver,
    Mine,
    Nobody,
    by_wish,
    decide,
    is_orphan,
    no_owner_yet,
    not_owner,
)

NAMES = [NodeId(f"n{number}") for number in range(1, 6)]


def info(node_id: NodeId, *, draining: bool = False, read_only: bool = False) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        wire_address=f"{node_id}:1",
        grpc_address=f"{node_id}:2",
        http_address=f"{node_id}:3",
        draining=draining,
        read_only=read_only,
    )


def live(*node_ids: NodeId) -> dict[NodeId, NodeInfo]:
    return {node_id: info(node_id) for node_id in node_ids}


def stream_of(
    owner: NodeId | None = None,
    *,
    name: str = "logs",
    lifecycle: StreamLifecycle = StreamLifecycle.ACTIVE,
    ledgers: tuple[ListedLedger, ...] = (),
) -> Stream:
    return Stream(
        name=StreamName(name),
        incarnation=UUID(int=1),
        created_ms=0,
        owner_epoch=7,
        owner=None if owner is None else Owner(node_id=owner, claim=UUID(int=2)),
        lifecycle=lifecycle,
        ledgers=ledgers,
    )


def ledger(*, closed: bool) -> ListedLedger:
    return ListedLedger(
        ledger_id=LedgerId(1),
        opened_ms=0,
        block_size=1,
        owner_epoch=1,
        closed=closed,
        last_entry_id=EntryId(3) if closed else NO_ENTRY,
    )


nodes_of = st.sets(st.sampled_from(NAMES), min_size=1).map(lambda some: live(*some))
names = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)


@given(names, nodes_of, st.permutations(NAMES))
def test_every_node_wishes_the_same_one_in_whatever_order_it_learnt_of_them(name, nodes, order):
    shuffled = {one: nodes[one] for one in order if one in nodes}
    assert by_wish(StreamName(name), shuffled) == by_wish(StreamName(name), nodes)


@given(names, nodes_of, st.sampled_from(NAMES))
def test_a_node_that_goes_moves_its_own_streams_and_no_others(name, nodes, gone):
    before = by_wish(StreamName(name), nodes)
    left = {key: value for key, value in nodes.items() if key != gone}
    assert by_wish(StreamName(name), left) == [one for one in before if one.node_id != gone]


def test_streams_are_spread_over_the_nodes():
    nodes = live(*NAMES)
    wished = [by_wish(StreamName(f"stream-{i}"), nodes)[0].node_id for i in range(1000)]
    shares = [wished.count(name) for name in NAMES]
    assert sum(shares) == 1000
    assert min(shares) > 140
    assert max(shares) < 260


def test_a_read_only_node_owns_what_nobody_else_can_own():
    nodes = live(*NAMES[:3])
    first = by_wish(StreamName("logs"), nodes)[0].node_id
    nodes[first] = info(first, read_only=True)
    assert by_wish(StreamName("logs"), nodes)[-1].node_id == first
    assert decide(stream_of(), first, {first: nodes[first]}) == Mine()


statuses = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from(["well", "draining", "away"]) for name in NAMES},
)
owners = st.none() | st.sampled_from(NAMES)


@given(names, statuses, owners, st.sampled_from(NAMES), st.booleans())
def test_no_claim_stands_against_an_owner_who_answers(name, statuses, owner, own, draining):
    nodes = {one: info(one, draining=status == "draining") for one, status in statuses.items()}
    away = {one for one, status in statuses.items() if status == "away"}
    verdict = decide(stream_of(owner, name=name), own, nodes, away=away, draining=draining)
    answers = owner in nodes and owner not in away
    if isinstance(verdict, Mine):
        assert not draining
        assert owner in {None, own} or not answers
        # And of two nodes that see the same, at most one may claim what nobody owns.
        if owner != own:
            assert own in nodes
        if owner != own and not nodes[own].draining:
            for other in set(nodes) - away - {own} if own not in away else ():
                seen = decide(stream_of(owner, name=name), other, nodes, away=away)
                assert seen == Elsewhere(nodes[own])
    if isinstance(verdict, Elsewhere):
        assert verdict.info.node_id not in away | {own}
        assert not answers or verdict.info.node_id == owner
        assert not verdict.info.draining or verdict.info.node_id == owner
    if isinstance(verdict, HandedOver):
        assert owner == own
        assert draining
    if isinstance(verdict, Nobody):
        able = {one for one in nodes if not nodes[one].draining} - away
        assert able <= ({own} if draining else set())
        assert draining or own not in nodes


def test_a_claim_of_this_node_stands_after_its_restart():
    assert decide(stream_of(NAMES[0]), NAMES[0], live(*NAMES)) == Mine()


def test_a_stream_that_is_being_deleted_is_nobodys():
    with pytest.raises(RefusedError) as caught:
        decide(stream_of(lifecycle=StreamLifecycle.DELETING), NAMES[0], live(*NAMES))
    assert caught.value.reason is Reason.STREAM_NOT_FOUND


def test_one_that_is_being_deleted_has_its_open_ledger_recovered():
    going = stream_of(lifecycle=StreamLifecycle.DELETING, ledgers=(ledger(closed=False),))
    verdicts = {node_id: decide(going, node_id, live(*NAMES)) for node_id in NAMES}
    assert [type(one) for one in verdicts.values()].count(Mine) == 1
    over = stream_of(lifecycle=StreamLifecycle.DELETING, ledgers=(ledger(closed=True),))
    with pytest.raises(RefusedError):
        decide(over, NAMES[0], live(*NAMES))


def test_an_orphan_has_an_open_ledger_and_no_live_owner():
    one, nodes = NAMES[0], live(*NAMES[1:])
    assert is_orphan(stream_of(one, ledgers=(ledger(closed=False),)), nodes)
    assert is_orphan(stream_of(None, ledgers=(ledger(closed=False),)), nodes)
    assert not is_orphan(stream_of(one, ledgers=(ledger(closed=True),)), nodes)
    assert not is_orphan(stream_of(one), nodes)
    assert not is_orphan(stream_of(NAMES[1], ledgers=(ledger(closed=False),)), nodes)


def test_whoever_is_named_can_be_reached_by_what_the_error_says():
    told = not_owner(stream_of(NAMES[0]), info(NAMES[1]))
    assert told.reason is Reason.NOT_OWNER
    assert told.details == {
        "stream": "logs",
        "owner_epoch": "7",
        "owner": "n2",
        "wire_address": "n2:1",
        "grpc_address": "n2:2",
        "http_address": "n2:3",
    }
    assert "n2 is to own it" in told.message
    assert "owned by n1" in not_owner(stream_of(NAMES[0]), None).message


@pytest.mark.parametrize("verdict", [HandedOver(), Nobody()])
def test_where_nobody_can_be_named_the_caller_is_to_ask_again(verdict):
    error = no_owner_yet(stream_of(), verdict)
    assert error.remedy
    assert error.retry_after_s
