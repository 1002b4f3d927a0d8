"""Options of a write are checked, and what is wrong with one is said with its name."""

import pickle
from uuid import UUID

import pytest

from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import (
    ClientSettings,
    Settings,
    ZooKeeperSettings,
    load_settings,
)
from tierlog_spark.write_options import ENTRY_BYTES_MAX, parse_write_options, writer_of

SETTINGS = Settings.model_construct(
    client=ClientSettings(ingest_address="a:1", batch_bytes=1000),
    zookeeper=ZooKeeperSettings(hosts="z:1"),
)


def parsed(streaming=False, **given):
    return parse_write_options({"stream": "orders", **given}, SETTINGS, streaming=streaming)


def test_what_is_not_said_comes_from_the_settings():
    found = parsed()
    assert (found.stream, found.writer_id, found.number, found.key_id) == (
        "orders",
        None,
        None,
        None,
    )
    assert found.entry_bytes == 1000
    assert found.settings.client.ingest_address == "a:1"


def test_what_is_said_wins_whatever_its_case():
    writer = "0f8fad5b-d9cb-469f-a165-70867728950e"
    found = parsed(
        WRITERID=writer,
        batchid="0",
        EntryBytes="77",
        ingestAddress="b:2",
        zookeeperhosts="z:2/root",
        ledgerKeyId="k1",
        checkpointLocation="/of/spark",
    )
    assert (found.writer_id, found.number, found.entry_bytes) == (UUID(writer), 1, 77)
    assert found.settings.client.ingest_address == "b:2"
    assert found.settings.client.batch_bytes == 1000
    assert found.settings.zookeeper.hosts == "z:2/root"
    assert found.key_id == "k1"
    assert SETTINGS.client.ingest_address == "a:1"


def test_options_go_to_the_tasks_as_they_are():
    """Settings that came from a file are of a class that nobody else has."""
    found = parse_write_options({"stream": "orders"}, load_settings(), streaming=True)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_writers_name_is_always_the_same_writer():
    assert writer_of("nightly") == writer_of("nightly") != writer_of("daily")
    assert parsed(writerId="nightly", batchId="7").writer_id == writer_of("nightly")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strem": "x"}, "no option 'strem'.*Did you mean stream"),
        ({"stream": "a b"}, "stream name"),
        ({"writerId": "w"}, "batchId.*belong together"),
        ({"batchId": "1"}, "batchId.*belong together"),
        ({"writerId": "w", "batchId": "-1"}, "batchId"),
        ({"writerId": "w", "batchId": str(2**63 - 1)}, "batchId"),
        ({"writerId": "", "batchId": "1"}, "writerId"),
        ({"writerId": str(UUID(int=1)), "batchId": "1"}, "writerId.*own attributes"),
        ({"entryBytes": "0"}, "entryBytes"),
        ({"entryBytes": str(ENTRY_BYTES_MAX + 1)}, "entryBytes"),
        ({"entryBytes": "64k"}, "entryBytes"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given, words):
    with pytest.raises(RefusedError, match=words) as caught:
        parsed(**given)
    assert caught.value.remedy


@pytest.mark.parametrize("streaming", [False, True])
def test_a_write_that_names_two_places_is_refused(streaming):
    """Spark hands over as a path what save() and start() are given."""
    assert parsed(streaming, path="orders").stream == "orders"
    with pytest.raises(RefusedError, match="option path: 'payments' is not stream orders"):
        parsed(streaming, path="payments")


def test_a_streaming_query_numbers_its_batches_itself():
    for given in ({"writerId": "w"}, {"batchId": "1"}):
        with pytest.raises(RefusedError, match="numbers its batches"):
            parsed(True, **given)
    with pytest.raises(RefusedError, match="option stream"):
        parse_write_options({}, SETTINGS, streaming=True)
