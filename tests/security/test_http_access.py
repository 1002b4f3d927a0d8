"""HTTP: who asks is known before a body is read; what is refused reaches no handler."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp
import pytest
import structlog
from fastapi import FastAPI

from tests.security.making import Issuer, gate_of, grant
from tierlog.model.access import Permission, Role, Rule
from tierlog.runtime.access import COMMON_HTTP_RULES
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http

RULES = {
    **COMMON_HTTP_RULES,
    "GET /v1/streams/{stream}/bounds": Rule(permission=Permission.READ, stream="stream"),
    "POST /v1/streams/{stream}/seal": Rule(permission=Permission.OPERATE, stream="stream"),
    "GET /v1/streams": Rule(permission=Permission.DESCRIBE),
}
NOBODY: dict[str, str] = {}


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "jwks.json")


def app_of(called) -> FastAPI:
    app = build_http_app("test", checks={})

    async def named(stream: str) -> dict[str, str]:
        called.append(stream)
        return {"stream": stream}

    async def everything() -> list[str]:
        called.append("*")
        return []

    app.add_api_route("/v1/streams/{stream}/bounds", named, methods=["GET"])
    app.add_api_route("/v1/streams/{stream}/seal", named, methods=["POST"])
    app.add_api_route("/v1/streams", everything, methods=["GET"])
    app.add_api_route("/v1/surprise", everything, methods=["GET"])
    return app


@contextlib.asynccontextmanager
async def serving(gate):
    called: list[str] = []
    app = app_of(called)
    guard_http(app, RULES, gate)
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):

        async def ask(method, path, headers=NOBODY):
            async with session.request(method, path, headers=headers) as answer:
                body = await answer.read()
                return answer.status, body.decode(), answer.headers

        yield ask, called


def shown(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_without_a_token_only_probes_answer(issuer):
    async with serving(gate_of(issuer)) as (ask, called):
        assert [(await ask("GET", path))[0] for path in ("/livez", "/readyz")] == [200, 200]
        paths = ("/metrics", "/docs", "/openapi.json", "/v1/streams", "/v1/streams/a/bounds",
                 "/v1/surprise", "/nothing")  # fmt: skip
        for path in paths:
            status, body, headers = await ask("GET", path)
            assert (path, status) == (path, 401)
            assert '"UNAUTHENTICATED"' in body
            assert headers["WWW-Authenticate"] == "Bearer"
        assert called == []


async def test_role_and_prefix_decide(issuer):
    consumer = shown(issuer.token("c", roles=("consumer",), streams=("orders*",)))
    async with serving(gate_of(issuer)) as (ask, called):
        assert (await ask("GET", "/v1/streams/orders.eu/bounds", consumer))[0] == 200
        for method, path in (
            ("GET", "/v1/streams/billing/bounds"),
            ("POST", "/v1/streams/orders.eu/seal"),
            ("GET", "/v1/streams"),
            ("GET", "/metrics"),
            ("GET", "/v1/surprise"),
        ):
            status, body, _ = await ask(method, path, consumer)
            assert (path, status) == (path, 403)
            assert '"PERMISSION_DENIED"' in body
        assert called == ["orders.eu"]


async def test_a_route_without_a_rule_is_refused_whoever_asks(issuer):
    roles = tuple(Role)
    everything = shown(issuer.token("root", roles=roles, streams=("*",)))
    async with serving(gate_of(issuer)) as (ask, called):
        assert (await ask("GET", "/v1/streams", everything))[0] == 200
        assert (await ask("GET", "/v1/surprise", everything))[0] == 403
        assert (await ask("GET", "/nothing", everything))[0] == 404
        assert (await ask("PUT", "/v1/streams", everything))[0] == 405
        assert called == ["*"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/streams/orders/../billing/bounds",
        "/v1/streams/orders%2F..%2Fbilling/bounds",
        "/v1/streams/billing%00/bounds",
        "//v1/streams/billing/bounds",
        "/v1/streams/billing/bounds/",
        "/V1/streams/billing/bounds",
        "/v1/streams/billing/bounds;x=/v1/streams/orders/bounds",
    ],
)
async def test_no_way_of_writing_a_path_gets_round_its_rule(issuer, path):
    consumer = issuer.token("c", roles=("consumer",), streams=("orders",))
    async with serving(gate_of(issuer)) as (_, called):
        pass
    called.clear()
    app = app_of(called)
    guard_http(app, RULES, gate_of(issuer))
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {consumer}\r\n\r\n"
        writer.write(head.encode())
        status = int((await reader.readline()).split()[1])
        writer.close()
        await writer.wait_closed()
    assert status in {400, 403, 404, 307}
    assert called == []


async def test_a_bad_token_is_not_made_good_by_anything(issuer):
    async with serving(gate_of(issuer)) as (ask, called):
        for value in (
            "Basic YWxpY2U6cHc=",
            "Bearer",
            "Bearer ",
            "Bearer a.b.c",
            "Bearer " + "x" * 9000,
        ):
            status, body, _ = await ask("GET", "/v1/streams", {"Authorization": value})
            assert (value[:12], status) == (value[:12], 401)
            assert value[7:20] == "" or value[7:] not in body
        assert called == []


async def test_a_body_is_not_read_for_who_is_refused(issuer):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield bytes(64 * 1024)

    app = app_of([])
    guard_http(app, RULES, gate_of(issuer))
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        with contextlib.suppress(aiohttp.ClientError):
            async with (
                asyncio.timeout(10),
                session.post("/v1/streams/a/seal", data=endless()) as answer,
            ):
                assert answer.status == 401
    assert sent * 64 * 1024 < 64 * 1024 * 1024


async def test_what_administrators_do_is_written_down_done_or_refused(issuer):
    operator = shown(issuer.token("op", roles=("operator",), streams=("a",)))
    consumer = shown(issuer.token("c", roles=("consumer",), streams=("*",)))
    with structlog.testing.capture_logs() as logs:
        async with serving(gate_of(issuer)) as (ask, _):
            await ask("POST", "/v1/streams/a/seal", {**operator, "X-Request-Id": "r-1"})
            await ask("POST", "/v1/streams/b/seal", {**operator, "X-Request-Id": "bad id\t"})
            await ask("POST", "/v1/streams/a/seal", consumer)
            await ask("POST", "/v1/streams/a/seal")
            await ask("GET", "/v1/streams/a/bounds", consumer)
    found = [one for one in logs if one["event"] == "action.audited"]
    assert [(one["subject"], one["target"], one["outcome"]) for one in found] == [
        ("token:op", "a", "done"),
        ("token:op", "b", "PERMISSION_DENIED"),
        ("token:c", "a", "PERMISSION_DENIED"),
        (None, "a", "UNAUTHENTICATED"),
    ]
    assert {one["logger"] for one in found} == {"audit"}
    assert {one["action"] for one in found} == {"POST /v1/streams/{stream}/seal"}
    assert found[0]["request_id"] == "r-1"
    assert all(one["peer"].startswith("127.0.0.1:") for one in found)


async def test_the_audit_log_names_a_request_as_all_else_does(issuer):
    operator = shown(issuer.token("op", roles=("operator",), streams=("a",)))
    with structlog.testing.capture_logs() as logs:
        async with serving(gate_of(issuer)) as (ask, _):
            told = [
                (await ask("POST", "/v1/streams/a/seal", headers))[2]["X-Request-Id"]
                for headers in (
                    operator,
                    {**operator, "X-Request-Id": "r:1"},
                    {**operator, "X-Request-Id": "bad id\t"},
                    NOBODY,
                )
            ]
    assert [one["request_id"] for one in logs if one["event"] == "action.audited"] == told
    assert told[1] == "r:1"
    assert len(set(told)) == 4


async def test_the_audit_log_is_written_at_any_level(issuer):
    operator = shown(issuer.token("op", roles=("operator",), streams=("a",)))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        with structlog.testing.capture_logs() as logs:
            structlog.get_logger().info("not.written")
            async with serving(gate_of(issuer)) as (ask, _):
                await ask("POST", "/v1/streams/a/seal", operator)
    finally:
        structlog.reset_defaults()
    assert [one["event"] for one in logs] == ["action.audited"]


async def test_actions_of_one_subject_have_a_rate(issuer):
    first = shown(issuer.token("first", roles=("operator",), streams=("*",)))
    other = shown(issuer.token("other", roles=("operator",), streams=("*",)))
    async with serving(gate_of(issuer, actions_per_s=2.0)) as (ask, called):
        found = [(await ask("POST", "/v1/streams/a/seal", first))[0] for _ in range(8)]
        assert found == [200] * 4 + [429] * 4
        assert (await ask("POST", "/v1/streams/a/seal", other))[0] == 200
        assert (await ask("GET", "/v1/streams", first))[0] == 200
        assert len(called) == 6


async def test_settings_grant_before_the_token_does(issuer):
    gate = gate_of(issuer, {"token:alice": grant(Role.CONSUMER, streams=("a",))})
    alice = shown(issuer.token("alice", roles=("admin",), streams=("*",)))
    async with serving(gate) as (ask, _):
        assert (await ask("GET", "/v1/streams/a/bounds", alice))[0] == 200
        assert (await ask("GET", "/v1/streams", alice))[0] == 403


async def test_an_issuer_cannot_name_the_subject_of_a_certificate(issuer):
    gate = gate_of(issuer, {"certificate:ingest-1": grant(Role.SERVICE, Role.OPERATOR)})
    for sub in ("ingest-1", "certificate:ingest-1"):
        async with serving(gate) as (ask, _):
            token = shown(issuer.token(sub))
            assert (await ask("GET", "/v1/streams", token))[0] == 403


async def test_without_a_gate_everybody_may_all():
    async with serving(None) as (ask, called):
        assert (await ask("GET", "/v1/surprise"))[0] == 200
        assert (await ask("POST", "/v1/streams/a/seal"))[0] == 200
        assert called == ["*", "a"]
