"""The vocabulary refuses what it can't mean: names, positions, thresholds, states, errors."""

import itertools
import re
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model import errors
from tierlog.model.errors import (
    KINDS,
    SURFACES,
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    from_reason,
)
from tierlog.model.ids import (
    EntryId,
    LedgerId,
    NodeId,
    StreamName,
    namespace_of,
    node_id,
    stream_name,
)
from tierlog.model.ledger import LEDGER_TRANSITIONS, LedgerMetadata, LedgerState, Segment
from tierlog.model.offload import (
    GONE_FROM_TIER1,
    READABLE_IN_TIER2,
    TRANSITIONS,
    OffloadContext,
    OffloadState,
)
from tierlog.model.policy import BLOCK_SIZE_MIN, CLUSTER_DEFAULT, MIB, Policy
from tierlog.model.position import AppendedRange, Edge, Position, parse_position
from tierlog.model.stream import ListedLedger, Stream

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@given(st.one_of(st.text(max_size=140), st.from_regex(r"[A-Za-z0-9._-]{0,130}", fullmatch=True)))
def test_a_streams_name_is_what_the_pattern_allows_and_nothing_else(text):
    if NAME.match(text):
        assert stream_name(text) == text
    else:
        with pytest.raises(RefusedError, match="Use 1 to 128") as caught:
            stream_name(text)
        assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["", ".", "-a", "a/b", "a b", "a\n", "ä", "a" * 129, "../x"])
def test_names_that_would_mean_something_elsewhere_are_refused(text):
    with pytest.raises(RefusedError):
        stream_name(text)


@pytest.mark.parametrize("text", ["", "a/b", "readonly"])
def test_a_node_has_no_name_that_means_a_folder(text):
    with pytest.raises(RefusedError, match="folder's name"):
        node_id(text)
    assert node_id("readonly-1") == "readonly-1"


def test_a_namespace_is_what_comes_before_the_first_dot():
    assert namespace_of(StreamName("shop.orders.eu")) == "shop"
    assert namespace_of(StreamName("orders")) == ""


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_position_is_read_as_it_was_printed(ledger_id, entry_id):
    position = Position(LedgerId(ledger_id), EntryId(entry_id))
    assert parse_position(str(position)) == position


@pytest.mark.parametrize(
    "text",
    ["", "1", "1:", ":1", "-1:0", "1:-1", "1:2:3", "a:b", "1 :2", "٣:٤", f"{2**63}:0", "Latest"],
)
def test_what_is_no_position_is_refused_with_a_remedy(text):
    with pytest.raises(RefusedError, match="earliest or latest"):
        parse_position(text)


def test_positions_have_an_order_and_two_have_names():
    one, two, three = (Position(LedgerId(a), EntryId(b)) for a, b in ((1, 9), (2, 0), (2, 1)))
    assert one < two < three
    assert parse_position("earliest") is Edge.EARLIEST
    with pytest.raises(AssertionError):
        AppendedRange(ledger_id=LedgerId(1), first_entry_id=EntryId(2), last_entry_id=EntryId(1))


# ------------------------------------------------------------------------------------ thresholds


@pytest.mark.covers("A36", "A38")
@pytest.mark.parametrize("what", ["time_ms", "size_bytes"])
@given(offload=st.integers(0, 10**6), retention=st.integers(0, 10**6))
def test_offloading_comes_before_trimming_or_the_policy_is_refused(what, offload, retention):
    def make() -> Policy:
        return Policy(**{f"offload_{what}": offload, f"retention_{what}": retention})

    if offload < retention:
        make()
    else:
        with pytest.raises(RefusedError, match=f"offload_{what}") as caught:
            make()
        assert caught.value.reason is Reason.POLICY_INVALID


def test_a_level_is_checked_together_with_the_levels_above_it():
    cluster = Policy(retention_time_ms=1000)
    assert Policy(offload_time_ms=999).over(cluster).retention_time_ms == 1000
    with pytest.raises(RefusedError):
        Policy(offload_time_ms=1000).over(cluster)


@pytest.mark.parametrize(
    "values",
    [
        {"offload_time_ms": -2},
        {"retention_size_bytes": 2**63},
        {"ledger_entries_max": 0},
        {"deletion_lag_ms": -2},
        {"block_size": BLOCK_SIZE_MIN - 1},
        {"block_size": 2**31},
        {"offloaded_read_priority": "tier3"},
        {"read_back": "most"},
        {"read_back": "none"},
    ],
)
def test_values_out_of_bounds_are_refused_by_name(values):
    with pytest.raises(RefusedError) as caught:
        Policy(**values)
    assert caught.value.details["bound"] == next(iter(values))


LOWEST: dict[str, Any] = {
    **dict.fromkeys(("offload_time_ms", "offload_size_bytes"), -1),
    **dict.fromkeys(("retention_time_ms", "retention_size_bytes", "deletion_lag_ms"), -1),
    **dict.fromkeys(("ledger_bytes_max", "ledger_entries_max", "ledger_age_ms_max"), 1),
}


@pytest.mark.parametrize(("name", "lowest"), LOWEST.items())
def test_each_number_has_a_lowest_and_a_highest_value(name, lowest):
    given: dict[str, Any]
    for value in (lowest, 2**63 - 1):
        given = {name: value}
        assert getattr(Policy(**given), name) == value
    for value in (lowest - 1, 2**63):
        given = {name: value}
        with pytest.raises(RefusedError) as caught:
            Policy(**given)
        assert caught.value.details["bound"] == name


@pytest.mark.covers("A42")
def test_a_block_is_64_mebibytes_unless_someone_says_otherwise():
    assert CLUSTER_DEFAULT.block_size == 64 * MIB == 67_108_864
    assert None not in (CLUSTER_DEFAULT.ledger_bytes_max, CLUSTER_DEFAULT.ledger_age_ms_max)


# ---------------------------------------------------------------------------------------- states


def _context(state: OffloadState) -> OffloadContext:
    return OffloadContext(
        stream=StreamName("s"), incarnation=UUID(int=1), ledger_id=LedgerId(1), state=state
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(OffloadState, repeat=2)))
def test_a_step_of_an_offload_is_legal_only_if_the_table_says_so(before, after):
    if after in TRANSITIONS[before]:
        assert _context(before).moved_to(after).state is after
    else:
        with pytest.raises(RefusedError, match=f"{before.name} to {after.name}"):
            _context(before).moved_to(after)


def test_repeating_a_step_is_legal_and_no_way_leads_back_from_trimming():
    assert all(state in TRANSITIONS[state] for state in OffloadState)
    assert TRANSITIONS[OffloadState.TRIMMING] == {OffloadState.TRIMMING}


@pytest.mark.covers("A08")
def test_the_local_copy_goes_only_by_way_of_a_complete_one():
    into = {state for state in OffloadState if OffloadState.TIER1_DELETING in TRANSITIONS[state]}
    assert into == {OffloadState.COMPLETE, OffloadState.TIER1_DELETING}
    assert GONE_FROM_TIER1 <= READABLE_IN_TIER2


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LedgerState, repeat=2)))
def test_a_step_of_a_ledger_is_legal_only_if_the_table_says_so(before, after):
    ledger = _ledger(3, 2, 2, state=before)
    if after in LEDGER_TRANSITIONS[before]:
        assert ledger.moved_to(after, last_entry_id=EntryId(4), length=9).state is after
    else:
        with pytest.raises(RefusedError):
            ledger.moved_to(after)


@pytest.mark.covers("A03", "B01")
def test_a_closed_ledger_never_changes_again():
    closed = _ledger(1, 1, 1).moved_to(LedgerState.CLOSED, last_entry_id=EntryId(4), length=9)
    assert closed.moved_to(LedgerState.CLOSED, last_entry_id=EntryId(7), length=1) is closed


def _ledger(ensemble: int, write: int, ack: int, **more) -> LedgerMetadata:
    nodes = tuple(NodeId(f"n{i}") for i in range(ensemble))
    segment = Segment(first_entry_id=EntryId(0), ensemble=nodes)
    return LedgerMetadata(
        ensemble_size=ensemble, write_quorum=write, ack_quorum=ack, segments=(segment,), **more
    )


@pytest.mark.parametrize("quorums", [(1, 2, 1), (3, 2, 3), (3, 3, 0), (0, 0, 0)])
def test_quorums_that_do_not_fit_are_refused(quorums):
    with pytest.raises(RefusedError, match="ack <= write <= ensemble"):
        _ledger(*quorums)


@pytest.mark.covers("D14", "D15")
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6))
def test_entries_are_striped_over_the_ensemble(ensemble, write, stripe, entry_id):
    """Entry e lies in stripe e div n, which goes to nodes s mod E up to s+W-1 mod E."""
    write = min(write, ensemble)
    ledger = _ledger(ensemble, write, write, custom={"tierlog/stripe-entries": b"%d" % stripe})
    first = entry_id // stripe
    expected = [f"n{(first + step) % ensemble}" for step in range(write)]
    assert list(ledger.write_set(EntryId(entry_id))) == expected


def test_later_ensembles_hold_later_entries():
    segments = tuple(
        Segment(first_entry_id=EntryId(first), ensemble=(NodeId(name),))
        for first, name in ((0, "a"), (10, "b"))
    )
    ledger = LedgerMetadata(ensemble_size=1, write_quorum=1, ack_quorum=1, segments=segments)
    assert [ledger.write_set(EntryId(e)) for e in (0, 9, 10, 99)] == [
        ("a",), ("a",), ("b",), ("b",),
    ]  # fmt: skip


@pytest.mark.covers("A06")
def test_a_list_of_ledgers_that_is_out_of_order_or_has_two_open_ones_can_not_be_made():
    def listed(ledger_id: int, *, closed: bool) -> ListedLedger:
        return ListedLedger(
            ledger_id=LedgerId(ledger_id), opened_ms=0, block_size=1, owner_epoch=1, closed=closed
        )

    def make(*ledgers: ListedLedger) -> Stream:
        return Stream(name=StreamName("s"), incarnation=UUID(int=1), created_ms=0, ledgers=ledgers)

    make(listed(1, closed=True), listed(2, closed=False))
    for wrong in (
        (listed(2, closed=True), listed(1, closed=True)),
        (listed(1, closed=True), listed(1, closed=True)),
        (listed(1, closed=False), listed(2, closed=False)),
    ):
        with pytest.raises(AssertionError):
            make(*wrong)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_has_one_kind_and_one_face_in_each_protocol(reason):
    kinds = [kind for kind, reasons in KINDS.items() if reason in reasons]
    assert len(kinds) == 1
    error = from_reason(reason, "what happened", remedy="do this")
    assert type(error) is kinds[0]
    assert str(error) == "what happened. do this"
    surface = SURFACES[reason]
    assert 400 <= surface.http_status < 600
    assert surface.exit_code in range(1, 7)


def test_the_list_is_closed_and_a_reason_of_another_kind_can_not_be_given():
    assert len(Reason) == 20
    for kind in (CorruptError, RetryableError, IndeterminateError, RefusedError):
        for reason in set(Reason) - KINDS[kind]:
            with pytest.raises(AssertionError):
                kind("x", reason=reason)


def test_no_other_kind_of_error_exists():
    own = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.TierlogError)
    ]
    assert set(own) == {errors.TierlogError, *KINDS}
