"""Ledgers lie where BookKeeper's hierarchical manager puts them (seeds/003)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format import paths
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, LedgerId, NodeId, StreamName

ledger_ids = st.integers(0, LEDGER_ID_MAX) | st.sampled_from(
    [0, 1, 9_999, 10_000, 99_999_999, 100_000_000, LEDGER_ID_MAX]
)


@pytest.mark.covers("D53", "D54", "D55")
def test_the_golden_path() -> None:
    assert paths.ledger_path(1) == "/ledgers/00/0000/L0001"


@pytest.mark.covers("D53", "D54")
@pytest.mark.parametrize(
    ("ledger_id", "path"),
    [
        (0, "/ledgers/00/0000/L0000"),
        (9_999, "/ledgers/00/0000/L9999"),
        (10_000, "/ledgers/00/0001/L0000"),
        (100_000_000, "/ledgers/01/0000/L0000"),
        (1_234_567_890, "/ledgers/12/3456/L7890"),
        (9_999_999_999, "/ledgers/99/9999/L9999"),
    ],
)
def test_ten_digits_split_into_two_four_and_four(ledger_id: int, path: str) -> None:
    assert paths.ledger_path(ledger_id) == path
    assert paths.ledger_id_of(path) == ledger_id


@given(ledger_ids)
def test_paths_and_back(ledger_id: int) -> None:
    path = paths.ledger_path(ledger_id)
    assert paths.ledger_id_of(path) == ledger_id
    assert paths.context_ledger_id_of(paths.context_path(ledger_id)) == ledger_id
    _, _, first, second, third = path.split("/")
    for level, name in enumerate((first, second, third), 1):
        assert paths.is_hierarchy_name(name, level=level)


@pytest.mark.parametrize("ledger_id", [-1, 10**10, 2**63 - 1])
def test_an_id_of_more_than_ten_digits_is_refused(ledger_id: int) -> None:
    for path in (paths.ledger_path, paths.context_path, paths.ledger_lock_path):
        with pytest.raises(RefusedError, match="has no place"):
            path(ledger_id)


@pytest.mark.parametrize(
    "path",
    [
        "/ledgers/available",
        "/ledgers/00/0000",
        "/ledgers/00/0000/L00001",
        "/ledgers/00/0000/L0001/x",
        "/ledgers/0/0000/L0001",
        "/other/00/0000/L0001",
        "/ledgers/\u0660\u0660/0000/L0001",
        "/ledgers/00/0000/L0001\n",
    ],
)
def test_other_paths_are_not_taken_for_ledgers(path: str) -> None:
    with pytest.raises(CorruptError, match="not the path of a ledger"):
        paths.ledger_id_of(path)


def test_neighbours_of_the_hierarchy_are_told_apart() -> None:
    names = ["00", "LAYOUT", "available", "cookies", "idgen", "INSTANCEID", "underreplication"]
    assert [name for name in names if paths.is_hierarchy_name(name, level=1)] == ["00"]


@pytest.mark.covers("D56")
def test_no_folder_gets_more_than_ten_thousand_children() -> None:
    """At the last level 10,000 ids; above it 10,000 folders, and 100 above those."""
    base = paths.ledger_path(120_000)[: -len("L0000")]
    inside = [paths.ledger_path(ledger_id) for ledger_id in range(120_000, 130_000)]
    assert all(path.startswith(base) for path in inside)
    assert len(set(inside)) == paths.CHILDREN_MAX == 10_000
    assert not paths.ledger_path(130_000).startswith(base)
    assert not paths.ledger_path(119_999).startswith(base)


@pytest.mark.covers("D52")
def test_an_id_is_the_number_of_a_sequential_node_and_the_base() -> None:
    made = paths.IDGEN_PREFIX + "0000000001"
    assert made == "/ledgers/idgen/ID-0000000001"
    assert paths.ledger_id_from_sequence(made, base=0) == 1
    assert paths.ledger_id_from_sequence(made, base=5_000_000_000) == 5_000_000_001


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/ledgers/idgen/ID-0000000001", LEDGER_ID_MAX),
        # Where ZooKeeper's counter goes past 2**31 - 1.
        ("/ledgers/idgen/ID--2147483648", 0),
        ("/ledgers/idgen/ID--000000001", 10**6),
    ],
)
def test_ids_that_are_used_up_are_refused(path: str, base: int) -> None:
    with pytest.raises(RefusedError, match="used up") as refused:
        paths.ledger_id_from_sequence(path, base=base)
    assert "base" in refused.value.remedy


@pytest.mark.parametrize(
    "path", ["/ledgers/idgen/ID-", "/ledgers/idgen", "", "ID-12", "x0000000001"]
)
def test_a_node_without_a_number_is_refused(path: str) -> None:
    with pytest.raises(CorruptError, match="sequence number"):
        paths.sequence_of(path)


@pytest.mark.covers("D57")
def test_the_flat_layout_is_recognised_and_refused() -> None:
    paths.check_layout(paths.LAYOUT_DATA)
    paths.check_layout(paths.LAYOUT_DATA + b"\n")
    with pytest.raises(RefusedError, match=r"flat layout, deprecated since BookKeeper 4\.7\.0"):
        paths.check_layout(b"2\norg.apache.bookkeeper.meta.FlatLedgerManagerFactory:1")
    for other in (b"", b"2\norg.apache.bookkeeper.meta.LongHierarchicalLedgerManagerFactory:1"):
        with pytest.raises(RefusedError, match="unknown layout"):
            paths.check_layout(other)


def test_every_other_path() -> None:
    name, node, ledger_id = StreamName("orders.eu"), NodeId("node-1"), LedgerId(12)
    assert paths.stream_path(name) == "/tierlog/streams/orders.eu"
    assert paths.page_path(name, 3) == "/tierlog/streams/orders.eu/pages/0000000003"
    assert paths.context_path(ledger_id) == "/tierlog/contexts/00/0000/L0012"
    assert paths.ledger_lock_path(ledger_id) == "/tierlog/locks/ledgers/L0000000012"
    assert paths.available_path(node) == "/ledgers/available/node-1"
    read_only = paths.available_path(node, read_only=True)
    assert read_only == "/ledgers/available/readonly/node-1"
    assert paths.cookie_path(node) == "/ledgers/cookies/node-1"
    assert paths.CLUSTER == "/tierlog/cluster"
