"""Where a client finds the services: settings first, then what ``up`` wrote, or a remedy."""

import pytest

from tierlog.client.endpoints import FILE_NAME, EndpointsFile, find_endpoints, with_zookeeper
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.runtime.settings import ClientSettings, Settings, ZooKeeperSettings

WRITTEN = EndpointsFile(
    pid=1,
    state_dir="/s",
    services={
        "ingest": {"grpc": "i:1"},
        "reader": {"http": "r:1"},
        "scheduler": {"http": "s:1"},
    },
)


def test_what_up_wrote_is_found(tmp_path):
    (tmp_path / FILE_NAME).write_text(WRITTEN.model_dump_json())
    found = find_endpoints(ClientSettings(), tmp_path)
    assert (found.ingest_grpc, found.reader_http, found.scheduler_http) == ("i:1", "r:1", "s:1")


def test_settings_win_one_by_one(tmp_path):
    (tmp_path / FILE_NAME).write_text(WRITTEN.model_dump_json())
    found = find_endpoints(ClientSettings(reader_http_address="other:2"), tmp_path)
    assert (found.ingest_grpc, found.reader_http) == ("i:1", "other:2")


def test_nothing_known_names_the_remedy(tmp_path):
    with pytest.raises(RetryableError, match="tierlog up"):
        find_endpoints(ClientSettings(), tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2}', "\x00"])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RefusedError, match="tierlog up"):
        find_endpoints(ClientSettings(), tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(RefusedError, match="is not what tierlog up writes"):
        find_endpoints(ClientSettings(), tmp_path)


def test_all_ingest_nodes_are_found_the_first_one_first(tmp_path):
    services = WRITTEN.services | {"ingest-1": {"grpc": "i:1"}, "ingest-2": {"grpc": "i:2"}}
    several = WRITTEN.model_copy(update={"services": services})
    (tmp_path / FILE_NAME).write_text(several.model_dump_json())
    assert find_endpoints(ClientSettings(), tmp_path).ingest_grpc == "i:1,i:2"
    given = ClientSettings(ingest_address="a:1,b:2")
    assert find_endpoints(given, tmp_path).ingest_grpc == "a:1,b:2"


def test_zookeeper_is_the_one_of_the_settings_or_of_up_or_there_is_a_remedy(tmp_path):
    nowhere = Settings(state_dir=tmp_path)
    with pytest.raises(RetryableError, match="no cluster is known") as caught:
        with_zookeeper(nowhere)
    assert "tierlog up" in caught.value.remedy
    assert "TIERLOG_ZOOKEEPER__HOSTS" in caught.value.remedy
    given = Settings(state_dir=tmp_path, zookeeper=ZooKeeperSettings(hosts="z:1"))
    assert with_zookeeper(given).zookeeper.hosts == "z:1"
    written = WRITTEN.model_copy(update={"servers": {"zookeeper": "z:2"}})
    (tmp_path / FILE_NAME).write_text(written.model_dump_json())
    assert with_zookeeper(nowhere).zookeeper.hosts == "z:2"
    assert with_zookeeper(given).zookeeper.hosts == "z:1"
