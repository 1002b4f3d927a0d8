"""Several ingest nodes on one machine: numbers stay with their folders, and copies with nodes."""

import pytest

from tierlog.client.endpoints import EndpointsFile
from tierlog.embedded.cluster import EmbeddedCluster
from tierlog.embedded.nodes import (
    NodePlace,
    give_number,
    last_number,
    numbers_in,
    places_of,
    quorum_environment,
)
from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import OwnerSettings


def described(count, known=()):
    return [(one.process, one.folder, one.env) for one in places_of(count, known)]


def test_one_node_keeps_its_short_name_and_may_be_named_by_a_setting():
    assert described(1) == described(None) == described(None, [1]) == [("ingest", "ingest", {})]


def test_of_several_nodes_each_has_its_number():
    node_id = "TIERLOG_INGEST__NODE_ID"
    assert described(3, [1]) == [
        ("ingest-1", "ingest", {node_id: "node-1"}),
        ("ingest-2", "ingest-2", {node_id: "node-2"}),
        ("ingest-3", "ingest-3", {node_id: "node-3"}),
    ]


@pytest.mark.parametrize(
    ("count", "known", "numbers"),
    [(None, [1, 3], [1, 3]), (3, [1, 3], [1, 3, 4]), (2, [4], [4, 5]), (1, [2], [2])],
)
def test_the_nodes_of_the_state_directory_come_first(count, known, numbers):
    assert [one.number for one in places_of(count, known)] == numbers


def test_the_number_of_a_disk_that_is_gone_is_not_given_again(tmp_path):
    for name in ("ingest", "ingest-2"):
        (tmp_path / "data" / name).mkdir(parents=True)
    assert last_number(tmp_path) == 2
    for number in (5, 3):
        give_number(tmp_path, NodePlace(number=number))
        (tmp_path / "data" / f"ingest-{number}").rmdir()
    assert last_number(tmp_path) == 5
    assert EmbeddedCluster(tmp_path, nodes=3, environ={}).nodes == [
        "ingest-1",
        "ingest-2",
        "ingest-6",
    ]
    (tmp_path / "nodes.json").write_text("{")
    assert last_number(tmp_path) == 2


def test_no_node_of_the_state_directory_is_left_out():
    with pytest.raises(RefusedError, match="has 3 nodes") as caught:
        places_of(1, [1, 2, 3])
    assert "decommission" in caught.value.remedy


@pytest.mark.parametrize("count", [0, -1, 33])
def test_a_count_out_of_bounds_is_refused(count):
    with pytest.raises(RefusedError, match="1 to 32"):
        places_of(count, ())


def test_a_start_that_is_cut_short_leaves_the_same_numbers(tmp_path):
    for place in places_of(3, ()):
        give_number(tmp_path, place)
    again = EmbeddedCluster(tmp_path, nodes=None, environ={})
    assert again.nodes == ["ingest-1", "ingest-2", "ingest-3"]


def test_folders_that_are_no_nodes_do_not_count(tmp_path):
    for name in ("ingest", "ingest-12", "ingest-0", "ingest-x", "kafka", "ingest-3.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "ingest-4").touch()
    assert numbers_in(tmp_path) == [1, 12]
    assert numbers_in(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("count", "quorums"), [(1, (1, 1, 1)), (2, (2, 2, 2)), (3, (3, 3, 2)), (5, (3, 3, 2))]
)
def test_as_many_copies_as_nodes_and_three_at_most(count, quorums):
    given = quorum_environment(count, {})
    prefix = "TIERLOG_INGEST__OWNER__"
    values = {name.removeprefix(prefix).lower(): value for name, value in given.items()}
    found = OwnerSettings.model_validate(values)
    assert (found.ensemble_size, found.write_quorum, found.ack_quorum) == quorums


def test_quorums_that_somebody_chose_stay(tmp_path):
    name = "TIERLOG_INGEST__OWNER__ENSEMBLE_SIZE"
    assert quorum_environment(3, {name: "5"}) == {}
    cluster = EmbeddedCluster(tmp_path, nodes=5, environ={}, settings={name: "5"})
    assert cluster.nodes == ["ingest-1", "ingest-2", "ingest-3", "ingest-4", "ingest-5"]
    assert cluster.data_dir("ingest-1") == tmp_path / "data" / "ingest"
    assert cluster.data_dir("ingest-2") == tmp_path / "data" / "ingest-2"


def test_the_endpoints_file_names_all_nodes_the_first_one_first():
    services = {
        "ingest": {"grpc": "h:1"},
        "ingest-1": {"grpc": "h:1"},
        "ingest-2": {"grpc": "h:2"},
        "reader": {"grpc": "h:9"},
    }
    written = EndpointsFile(pid=1, state_dir="/s", services=services)
    assert written.ingest_addresses("grpc") == ["h:1", "h:2"]
