"""The blocking client: the same calls, for programs without an event loop, several at once."""

import threading

import pytest

from tierlog.client import Edge, StructuredEvent, SyncClient
from tierlog.model.errors import Reason, RefusedError

pytestmark = [pytest.mark.integration]


def test_append_and_read(cluster):
    with SyncClient(cluster.settings) as client:
        with client.writer("sync") as writer:
            writer.send_all(b"%d" % number for number in range(1000))
            writer.send(b"last")
            assert writer.flush() is not None
            assert (writer.acked_events, writer.acked_bytes) == (1001, 2890 + 4)
        assert client.seal("sync") is not None
        found = [event.payload for event in client.events("sync")]
        assert found == [b"%d" % number for number in range(1000)] + [b"last"]
        assert len(list(client.entries("sync", limit=1))) == 1
        first, end = client.bounds("sync")
        assert str(first) != str(end)
        assert list(client.events("sync", start=Edge.LATEST)) == []
        assert "sync" in [one["stream"] for one in client.streams()]
        ledger_id = client.stream("sync")["ledgers"][0]["ledger_id"]
        assert client.ledger(ledger_id)["stream"] == "sync"
        assert client.policy("sync")["effective"]["deletion_lag_ms"] == 4 * 3600 * 1000


def test_events_with_key_time_and_properties_come_back_whole(cluster):
    sent = StructuredEvent(payload=b"p", key=b"k", event_time_ms=7, properties={"a": "b"})
    with SyncClient(cluster.settings) as client:
        with client.writer("sync-structured") as writer:
            writer.send(sent)
        client.seal("sync-structured")
        (event,) = client.events("sync-structured")
    assert (event.payload, event.key, event.event_time_ms) == (b"p", b"k", 7)
    assert event.properties == {"a": "b"}
    assert event.publish_time_ms is not None


def test_errors_are_the_librarys_own(cluster):
    with SyncClient(cluster.settings) as client:
        with pytest.raises(RefusedError) as caught:
            list(client.events("sync-nowhere"))
        assert caught.value.reason is Reason.STREAM_NOT_FOUND


def test_several_threads_share_one_loop(cluster):
    def work(number):
        with SyncClient(cluster.settings) as client, client.writer("sync-threads") as writer:
            writer.send_all(b"%d" % number for _ in range(100))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    with SyncClient(cluster.settings) as client:
        client.seal("sync-threads")
        found = sorted(event.payload for event in client.events("sync-threads"))
    assert found == sorted([b"0", b"1", b"2", b"3"] * 100)
