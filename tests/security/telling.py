"""A program that uses everything that holds a secret, with logs at level debug.

What it raises, shows and answers goes to standard output; what is logged, to standard error. The
test that runs it looks at both. Logs are set up once for a process, so this is one of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import sys
import traceback
from pathlib import Path

import aiohttp
import structlog

from tests.security.making import Authority, Issuer, gate_of
from tierlog.adapters.kafka.common import connection_of
from tierlog.adapters.kafka.topics import ensure_topics
from tierlog.model.errors import TierlogError
from tierlog.proto.v1 import reader_pb2, reader_pb2_grpc
from tierlog.runtime.calling import Calling
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.rpc import open_channel, serve_grpc
from tierlog.runtime.rpc_access import AccessInterceptor
from tierlog.runtime.sections import LogSettings
from tierlog.runtime.settings import Settings
from tierlog.runtime.tls import ClientTls, ServerTls
from tierlog.wiring.build import open_metadata, topic_specs
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.reader import open_cache
from tierlog.wiring.security import calling_of, wire_credentials
from tierlog_reader.access import HTTP_RULES, RPC_RULES

LOAD = 40


@contextlib.asynccontextmanager
async def nonsense():
    """Listen, and answer whoever connects with what no protocol has."""

    async def answer(reader, writer):
        with contextlib.suppress(OSError):
            await reader.read(64)
            writer.write(b"\xff" * 64)
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


def settings_of(planted, folder, port, *, files):
    def secret(kind, name):
        if not files:
            return {name: planted[kind]}
        file = folder / f"{kind}.txt"
        file.write_text(planted[f"{kind}-file"] + "\n", encoding="utf-8")
        return {f"{name}_file": str(file)}

    url = f"redis://reader:{planted['redis-url-password']}@127.0.0.1:{port}/0"
    redis = secret("redis-secret", "secret")
    if not files:
        redis |= {"password": planted["redis-password"]}
        url = f"redis://127.0.0.1:{port}/0"
    sasl = {"mechanism": "PLAIN", "username": "u", **secret("kafka-password", "password")}
    return Settings.model_validate(
        {
            "s3": {"access_key": "a", "secret_key": planted["s3-secret-key"]},
            "wire": {"token": planted["wire-token"]},
            "keys": {"k1": planted["ledger-key"]},
            "redis": {"url": url, **redis},
            "kafka": {
                "bootstrap_servers": f"127.0.0.1:{port}",
                "sasl": sasl,
                "publish_timeout_s": 1,
            },
            "zookeeper": {
                "hosts": f"127.0.0.1:{port}",
                "connect_timeout_s": 1,
                "username": "u",
                **secret("zookeeper-password", "password"),
            },
        }
    )


async def outer_systems(settings, told):
    """Use each outer system that isn't there; keep what is said."""
    try:
        async with open_metadata(settings) as store:
            await store.get("/")
    except TierlogError:
        told.append(traceback.format_exc())
    try:
        kafka, specs = settings.kafka, topic_specs(settings)
        how = connection_of(kafka)
        await ensure_topics(kafka.bootstrap_servers, specs, timeout_s=1.0, how=how)
    except TierlogError:
        told.append(traceback.format_exc())
    async with open_cache(settings) as cache:
        for _ in range(3):
            assert await cache.get("x") is None
        told.append(repr(cache))


class Reader(reader_pb2_grpc.ReaderServicer):
    async def Read(self, request, context):  # noqa: N802 - gRPC's name
        return reader_pb2.ReadResponse()


async def served(issuer, authority, planted, told):
    """Ask servers with tokens of each kind, many at once."""
    gate, server = gate_of(issuer), authority.issue("server")
    planted["tls-key"] = server.key.read_text("ascii").splitlines()[1]
    app = build_http_app("test", checks={})
    guard_http(app, HTTP_RULES, gate)
    tls = ServerTls(authority.files(server), client_certificates=False)
    client = ClientTls(authority.files())
    tokens = {
        "token-good": issuer.token("good", jti=planted["token-good"], roles=("consumer",)),
        "token-expired": issuer.token("late", jti=planted["token-expired"], iat=1, exp=2),
        "token-other-issuer": issuer.token("other", jti=planted["token-other-issuer"], iss="x"),
        "token-nonsense": planted["token-nonsense"],
    }
    planted |= tokens
    basic = base64.b64encode(f"u:{planted['basic-password']}".encode()).decode()
    planted["basic"] = basic
    async with (
        serve_http(app, host="127.0.0.1", port=0, tls=tls) as http,
        serve_grpc(
            lambda server: reader_pb2_grpc.add_ReaderServicer_to_server(Reader(), server),  # type: ignore[abstract]
            host="127.0.0.1", port=0, tls=tls, access=AccessInterceptor(RPC_RULES, gate),
        ) as rpc,
        aiohttp.ClientSession(f"https://127.0.0.1:{http}") as session,
        asyncio.TaskGroup() as tasks,
    ):  # fmt: skip

        async def by_http(value):
            path = f"/v1/streams/a/bounds?token={planted['query-token']}"
            headers = {"Authorization": value}
            async with session.get(path, headers=headers, ssl=client.context()) as answer:
                told.append(await answer.text())

        async def by_grpc(token):
            calling = Calling(tls=client, token=lambda: token)
            async with open_channel(f"127.0.0.1:{rpc}", calling) as channel:
                try:
                    stub = reader_pb2_grpc.ReaderStub(channel)
                    await stub.Read(reader_pb2.ReadRequest(stream="a"), timeout=20)
                except Exception as error:  # noqa: BLE001 - what is said counts, not its kind
                    told.append(str(error.details()))  # type: ignore[attr-defined]

        for number in range(LOAD):
            token = list(tokens.values())[number % len(tokens)]
            tasks.create_task(by_http(f"Bearer {token}"))
            tasks.create_task(by_grpc(token))
            tasks.create_task(by_http(f"Basic {basic}"))


async def tell(planted, folder):
    """Do all of it; return what was said."""
    told: list[str] = []
    issuer, authority = Issuer(folder / "jwks.json"), Authority(folder)
    async with nonsense() as port:
        for files in (False, True):
            settings = settings_of(planted, folder, port, files=files)
            told += [repr(settings), str(settings), settings.model_dump_json()]
            told.append(repr(ledger_keys(settings)))
            told.append(repr(wire_credentials(settings, calling_of(settings.security))()))
            await outer_systems(settings, told)
    token_file = folder / "token.txt"
    token_file.write_text(planted["token-file"], encoding="utf-8")
    for shown in ({"token": planted["security-token"]}, {"token_file": str(token_file)}):
        security = Settings.model_validate({"security": shown}).security
        told += [repr(security), repr(calling_of(security))]
    await served(issuer, authority, planted, told)
    return told


def main() -> None:
    folder = Path(sys.argv[1])
    planted = json.loads((folder / "planted.json").read_text(encoding="utf-8"))
    configure_logging(LogSettings(level="debug"), service="test")
    logging.getLogger().setLevel(logging.DEBUG)
    structlog.get_logger().debug("marker.written")
    logging.getLogger("somebody.else").debug("marker of a library")
    told = asyncio.run(tell(planted, folder))
    (folder / "planted.json").write_text(json.dumps(planted), encoding="utf-8")
    print("\n".join(told), flush=True)


if __name__ == "__main__":
    main()
