"""Lines of the log say which request they belong to: over HTTP and over gRPC."""

import asyncio
import json
from typing import Any

import grpc
import pytest
import structlog
from aiohttp import ClientSession

from tierlog.format.envelope import Traceparent
from tierlog.ports.tracing import CALLER, apart
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.requests import RequestIds, trace_in
from tierlog.runtime.rpc import open_channel, serve_grpc

PLACE = Traceparent(trace_id=bytes(range(1, 17)), span_id=bytes(range(1, 9)))


def _bound():
    caller = CALLER.get()
    return {**structlog.contextvars.get_contextvars(), "caller": str(caller) if caller else None}


async def _ask(http_port, **headers):
    url = f"http://127.0.0.1:{http_port}/bound"
    async with ClientSession() as session, session.get(url, headers=headers) as answer:
        return json.loads(await answer.text()), answer.headers["x-request-id"]


@pytest.fixture
async def http_port():
    app = build_http_app("test", checks={})

    @app.get("/bound")
    async def bound() -> Any:
        await asyncio.sleep(0)
        return _bound()

    async with serve_http(app, host="127.0.0.1", port=0) as port:
        yield port


async def test_http_binds_what_the_caller_says(http_port):
    bound, told = await _ask(http_port, **{"x-request-id": "order-17", "traceparent": str(PLACE)})
    assert (bound["request_id"], told) == ("order-17", "order-17")
    assert bound["trace_id"] == PLACE.trace_id.hex()
    assert bound["caller"] == str(PLACE)


async def test_http_makes_an_id_for_each_request_and_forgets_the_one_before(http_port):
    first = await _ask(http_port, **{"x-request-id": "one", "traceparent": str(PLACE)})
    second = await _ask(http_port)
    third = await _ask(http_port)
    assert first[0]["request_id"] == "one"
    assert second[0]["request_id"] == second[1] != third[1] == third[0]["request_id"]
    assert "trace_id" not in second[0]
    assert second[0]["caller"] is None
    assert "request_id" not in structlog.contextvars.get_contextvars()


@pytest.mark.parametrize("given", ["a b", "x" * 65, 'x"', "", "-x"])
async def test_http_takes_no_id_that_could_break_a_line(http_port, given):
    bound, told = await _ask(http_port, **{"x-request-id": given})
    assert bound["request_id"] == told != given


async def test_an_error_has_the_id_too(http_port):
    url = f"http://127.0.0.1:{http_port}/nowhere"
    headers = {"x-request-id": "lost"}
    async with ClientSession() as session, session.get(url, headers=headers) as answer:
        assert answer.status == 404
        assert answer.headers["x-request-id"] == "lost"


class _Echo(grpc.GenericRpcHandler):
    """Answers with what is bound, once and as a stream."""

    def service(self, handler_call_details):
        async def once(request, context):
            return json.dumps(_bound()).encode()

        async def again(request, context):
            yield json.dumps(_bound()).encode()
            yield json.dumps(_bound()).encode()

        if handler_call_details.method == "/tierlog.Test/Once":
            return grpc.unary_unary_rpc_method_handler(once)
        return grpc.unary_stream_rpc_method_handler(again)


async def test_grpc_binds_what_the_metadata_say():
    metadata = (("x-request-id", "order-18"), ("traceparent", str(PLACE)))

    def register(server):
        server.add_generic_rpc_handlers((_Echo(),))

    async with (
        serve_grpc(register, host="127.0.0.1", port=0) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        once: Any = channel.unary_unary("/tierlog.Test/Once")
        bound = json.loads(await once(b"", metadata=metadata))
        assert (bound["request_id"], bound["caller"]) == ("order-18", str(PLACE))
        bound = json.loads(await once(b""))
        assert bound["request_id"].startswith("local-")
        assert bound["caller"] is None
        again: Any = channel.unary_stream("/tierlog.Test/Again")
        lines = [json.loads(one) async for one in again(b"", metadata=metadata)]
        assert [one["request_id"] for one in lines] == ["order-18", "order-18"]


async def test_a_task_that_outlives_its_request_is_apart_from_it():
    async def bound():
        return _bound()

    with structlog.contextvars.bound_contextvars(request_id="one", trace_id="t", service="ingest"):
        token = CALLER.set(PLACE)
        try:
            async with asyncio.TaskGroup() as tasks:
                inside = tasks.create_task(bound())
                outside = tasks.create_task(bound(), context=apart())
        finally:
            CALLER.reset(token)
    assert inside.result()["request_id"] == "one"
    assert outside.result()["caller"] is None
    assert outside.result()["service"] == "ingest"
    assert not {"request_id", "trace_id"} & set(outside.result())


def test_ids_are_of_the_process():
    ids = RequestIds()
    assert [ids.named(None), ids.named("x"), ids.named(None)] == ["local-1", "x", "local-2"]


@pytest.mark.parametrize("text", [None, "", "nonsense", str(PLACE) + "x" * 99])
def test_a_place_that_is_none_is_passed_over(text):
    assert trace_in(text) is None
