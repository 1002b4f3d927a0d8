"""Appends over HTTP: what an Idempotency-Key makes of a repeat, and of a gap."""

# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import contextlib
import io

import aiohttp
import pytest

from tests.unit.ledger.small_cluster import STREAM
from tests.unit.streams.attribute_world import W1, AttributeCluster, send
from tests.unit.streams.test_owners import read_stream, running
from tierlog.adapters.memory.clock import SimClock
from tierlog.format.entry import decode_entry
from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName
from tierlog.runtime.http import build_http_app, serve_http
from tierlog_ingest import http_appends
from tierlog_ingest.http_appends import (
    IdempotencyKey,
    brought,
    is_other,
    parse_idempotency_key,
)

PATH = f"/v1/streams/{STREAM}/events"


@contextlib.asynccontextmanager
async def client_of(cluster, owners, catalog):
    """Give a function that posts, and returns the status, the body and its type."""
    app = build_http_app("test", checks={})
    http_appends.add_routes(app, owners=owners, find=catalog.streams.get, clock=SimClock())
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):

        async def post(path, data, headers=None):
            async with session.post(path, data=io.BytesIO(data), headers=headers) as answer:
                return answer.status, await answer.json(content_type=None), answer.content_type

        yield post


def key(number):
    return {"Idempotency-Key": f"{W1}:{number}"}


@pytest.mark.covers("E03", "E04")
async def test_a_repeat_is_answered_like_the_first_and_a_gap_is_a_conflict():
    cluster = AttributeCluster()
    catalog = await cluster.start()
    await catalog.streams.create(StreamName("raw"), raw=True)
    owners = cluster.owners()
    async with running(owners), client_of(cluster, owners, catalog) as post:
        status, body, _ = await post(PATH, b"one", key(1))
        assert (status, body["repeated"]) == (200, False)
        assert body["places"] == [{"ledger_id": 0, "first_entry_id": 0, "last_entry_id": 0}]
        status, body, _ = await post(PATH, b"one", key(1))
        assert (status, body["repeated"]) == (200, True)
        status, body, content_type = await post(PATH, b"three", key(3))
        assert (status, content_type) == (409, "application/problem+json")
        assert body["reason"] == "CONDITIONAL_APPEND_FAILED"
        assert body["details"]["event_number"] == "1"
        lines = {**key(3), "Content-Type": "application/x-ndjson"}
        status, body, _ = await post(PATH, b'{"a":2}\n{"a":3}\n', lines)
        assert (status, body["events"]) == (200, 2)
        assert (await post(PATH, b"plain"))[0] == 200
        assert (await post("/v1/streams/raw/events", b"bytes"))[0] == 200
        for path, headers in (
            (PATH, {"Idempotency-Key": "x"}),
            (PATH, key(0)),
            ("/v1/streams/raw/events", key(1)),
        ):
            status, body, _ = await post(path, b"x", headers)
            assert status == 400, body
            assert body["remedy"]
        assert (await post("/v1/streams/none/events", b"x"))[0] == 404
        assert (await post(PATH, bytes(http_appends.BODY_BYTES_MAX + 1)))[0] == 413
    events = [
        bytes(event)
        for entry in await read_stream(cluster)
        for event in decode_entry(entry).events()
    ]
    assert events == [b"one", b'{"a":2}', b'{"a":3}', b"plain"]
    assert await read_stream(cluster, StreamName("raw")) == [b"bytes"]


async def test_a_repeat_with_other_events_is_a_conflict_as_long_as_that_is_known():
    cluster = AttributeCluster()
    catalog = await cluster.start()
    owners = cluster.owners()
    async with running(owners), client_of(cluster, owners, catalog) as post:
        assert (await post(PATH, b"one", key(1)))[0] == 200
        status, body, _ = await post(PATH, b"another", key(1))
        assert (status, body["reason"]) == (409, "CONDITIONAL_APPEND_FAILED")
        assert "is another one" in body["detail"]
        lines = {**key(3), "Content-Type": "application/x-ndjson"}
        assert (await post(PATH, b"2\n3\n", lines))[0] == 200
        assert (await post(PATH, b"2\n3\n", lines))[1]["repeated"]
        # The same bytes, cut into other events.
        for other in (b"23\n4\n", b"2\n33\n"):
            assert (await post(PATH, other, lines))[0] == 409
        # Of requests before the last one only the numbers are known.
        assert (await post(PATH, b"another", key(1)))[1]["repeated"]
        # Numbers that came by another way tell nothing of what they brought.
        await send(owners, STREAM, W1, 4)
        assert (await post(PATH, b"any", key(4)))[1]["repeated"]
    assert len(await read_stream(cluster)) == 3


def test_what_a_request_brought_is_a_value_of_its_number_and_events():
    told = brought(2**63 - 1, [b"a"])
    assert 0 <= told < 2**63
    assert len({told, brought(1, [b"a"]), brought(1, [b"b"]), brought(1, [b"a", b""])}) == 4
    ours = IdempotencyKey(W1, 5)
    assert is_other(ours, [b"a"], 5, brought(5, [b"b"]))
    assert not is_other(ours, [b"a"], 5, brought(5, [b"a"]))
    assert not is_other(ours, [b"a"], 5, brought(4, [b"b"]))
    assert not is_other(ours, [b"a"], 6, brought(5, [b"b"]))
    assert not is_other(ours, [b"a"], 5, None)


@pytest.mark.parametrize("text", ["", "x:1", f"{W1}", f"{W1}:0", f"{W1}:-1", f"{W1}:{2**63}"])
def test_a_key_that_is_none_is_refused(text):
    with pytest.raises(RefusedError):
        parse_idempotency_key(text)
