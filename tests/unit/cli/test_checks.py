"""``tierlog doctor`` and ``tierlog debug bundle``: what each check finds, and no secret shown."""

import io
import json
import tarfile
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from uuid import UUID

import grpc
import pytest
from aiohttp import web
from pydantic import SecretStr

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import SmallCluster
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.cli.bundle import (
    ANSWER_BYTES_MAX,
    LOGS_MAX,
    Bundle,
    add_logs,
    add_services,
    redactor_for,
    tail_of,
    versions,
    write_private,
)
from tierlog.cli.checks import build_info, check_services, check_versions, service_addresses
from tierlog.client.endpoints import EndpointsFile
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.ports.ids import Ids
from tierlog.runtime.calling import Calling
from tierlog.runtime.clusters import KnownCluster
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.origins import redacted_settings
from tierlog.runtime.redaction import Redactor
from tierlog.runtime.rpc import serve_grpc
from tierlog.runtime.settings import Settings
from tierlog.wiring.checks import (
    Result,
    check_bucket,
    check_cache,
    check_metadata,
    guarded,
    skew,
)


class OneId(Ids):
    def uuid(self):
        return UUID(int=7)

    def uniform(self, low, high):
        return low


def by_name(checks):
    assert all(one.remedy or one.result is Result.OK for one in checks)
    return {one.check: one for one in checks}


def results(checks):
    return {name: one.result.value for name, one in by_name(checks).items()}


class Denied:
    """A bucket in which some things are not allowed."""

    def __init__(self, store, *names):
        self._store, self._names = store, names

    def __getattr__(self, name):
        if name in self._names:

            async def refuse(*args, **more):
                raise RefusedError(
                    f"{name} is not allowed", reason=Reason.PERMISSION_DENIED, remedy="Allow it"
                )

            return refuse
        return getattr(self._store, name)


STEPS = ("look", "write", "read", "list", "upload", "delete")


def probe(*denied, ahead_s=0):
    """Run the check on a bucket; returns the checks and what is left in it."""

    async def main():
        clock, store_clock = SimClock(), SimClock()
        store_clock.jump_wall(ahead_s)
        bucket = MemoryObjects(store_clock)
        store = Denied(bucket.connect(), *denied)
        found = await check_bucket(store, clock, OneId(), key_prefix="p/", bucket="b")
        left = [info.key async for info in bucket.connect().list()]
        return found, left + [one.key for one in await bucket.connect().list_uploads()]

    return run_virtual(main())


def test_a_bucket_where_all_is_allowed_and_nothing_is_left():
    found, left = probe()
    assert results(found) == {f"bucket b: {step}": "ok" for step in STEPS} | {
        "clock of the store": "ok"
    }
    assert left == []


def test_a_store_whose_clock_is_apart():
    found, _ = probe(ahead_s=-20)
    assert results(found)["clock of the store"] == "warning"


@pytest.mark.parametrize(
    ("denied", "fails", "left"),
    [
        ("put", "write", 0),
        ("head", "look", 0),
        ("get_range", "read", 0),
        ("create_upload", "upload", 0),
        ("list_uploads", "upload", 0),
        ("delete", "delete", 1),
    ],
)
def test_what_is_not_allowed_is_named_with_its_remedy_and_the_probe_goes_all_the_same(
    denied, fails, left
):
    found, remaining = probe(denied)
    failed = [one for one in found if one.result is Result.FAILED]
    assert [one.check for one in failed] == [f"bucket b: {fails}"]
    assert "not allowed" in failed[0].value
    assert failed[0].remedy == "Allow it"
    assert len(remaining) == left


@pytest.mark.parametrize(
    ("apart_s", "result"),
    [(0, "ok"), (1.5, "ok"), (-5.9, "ok"), (6, "warning"), (-20, "warning"), (61, "failed")],
)
def test_clocks_that_are_apart(apart_s, result):
    found = skew("clock", 1_000_000.0, 1_000_000.0 + 1000 * apart_s)
    assert found.result.value == result
    assert f"{apart_s:+.1f}" in found.value
    assert ("NTP" in found.remedy) is (result != "ok")


def test_metadata_without_a_cluster_and_with_one():
    async def main():
        cluster = SmallCluster(2)
        before = await check_metadata(cluster.catalog(), cluster.clock)
        await cluster.start()
        return before, await check_metadata(cluster.catalog(), cluster.clock)

    before, after = run_virtual(main())
    assert results(before) == {"metadata": "warning"}
    assert results(after) == {"metadata": "ok", "nodes": "ok"}
    assert "2 live: n1, n2" in by_name(after)["nodes"].value


async def test_no_redis_is_nothing_wrong():
    (found,) = await check_cache(Settings.model_validate({"redis": {"url": None}}))
    assert found.result is Result.OK


def test_a_check_ends_in_time_and_tells_errors():
    async def hang():
        import asyncio

        await asyncio.sleep(10**6)
        return []

    async def fail():
        raise RetryableError("nobody there", remedy="go there")

    async def refuse():
        raise ConnectionRefusedError("refused")

    async def lack():
        raise ModuleNotFoundError(name="kazoo")

    async def main():
        return [(await guarded("x", "remedy", one))[0] for one in (hang, fail, refuse, lack)]

    found = run_virtual(main())
    assert all(one.result is Result.FAILED for one in found)
    assert ["no answer" in found[0].value, found[0].remedy] == [True, "remedy"]
    assert found[1].remedy == "go there"
    assert "refused" in found[2].value
    assert "kazoo" in found[3].value


def test_versions_that_differ():
    assert results(check_versions({"a": "1", "b": "1"}, (3, 11, 2))) == {
        "python": "ok",
        "packages": "ok",
    }
    assert results(check_versions({"a": "1", "b": "2"}, (3, 10, 0))) == {
        "python": "failed",
        "packages": "failed",
    }


async def test_services_ready_and_not_and_away():
    fine, ready = True, {"metadata": True}

    async def check():
        return ready["metadata"]

    def register(server: grpc.aio.Server) -> None:
        pass

    app = build_http_app("test", checks={"metadata": check})
    async with (
        serve_http(app, host="127.0.0.1", port=0) as http,
        serve_grpc(register, host="127.0.0.1", port=0) as grpc_port,
    ):
        services = {"reader": {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{grpc_port}"}}
        found = await check_services(services)
        assert results(found) == {"reader": "ok", "clock of reader": "ok", "reader gRPC": "ok"}
        ready["metadata"] = not fine
        found = by_name(await check_services(services))
        assert found["reader"].result is Result.FAILED
        assert "metadata" in found["reader"].value
    found = by_name(await check_services(services))
    assert {one.result for one in found.values()} == {Result.FAILED}
    assert set(found) == {"reader", "reader gRPC"}
    assert results(await check_services({})) == {"services": "warning"}


async def test_services_of_another_cluster():
    """Which of two is the right one nobody here can know: the first one asked is taken for it."""
    ours, theirs = UUID(int=1), UUID(int=2)

    def register(server: grpc.aio.Server) -> None:
        pass

    def served(cluster_id):
        app = build_http_app("test", checks={}, cluster_id=cluster_id)
        return (
            serve_http(app, host="127.0.0.1", port=0),
            serve_grpc(register, host="127.0.0.1", port=0, cluster_id=cluster_id),
        )

    one, other = served(ours), served(theirs)
    async with one[0] as http, one[1] as rpc, other[0] as far_http, other[1] as far_rpc:
        services = {
            "ingest": {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{rpc}"},
            "reader": {"http": f"127.0.0.1:{far_http}", "grpc": f"127.0.0.1:{far_rpc}"},
        }
        found = by_name(await check_services(services, Calling(cluster=KnownCluster())))
    assert found["ingest"].result is found["ingest gRPC"].result is Result.OK
    for name in ("reader", "reader gRPC"):
        assert found[name].result is Result.FAILED
        assert "another cluster answers" in found[name].value


async def test_services_of_another_version_or_with_another_clock():
    async def serve(version, date):
        async def answer(request):
            text = f'tierlog_build_info{{version="{version}",wire="3"}} 1.0\n'
            return web.Response(text=text, headers={"Date": date})

        app = web.Application()
        app.router.add_get("/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"127.0.0.1:{runner.addresses[0][1]}"

    one, first = await serve("0.1.0", formatdate(usegmt=True))
    two, second = await serve("0.2.0", "Mon, 01 Jan 2024 00:00:00 GMT")
    try:
        found = results(await check_services({"a": {"http": first}, "b": {"http": second}}))
    finally:
        await one.cleanup()
        await two.cleanup()
    assert found == {
        "a": "ok", "clock of a": "ok", "b": "ok", "clock of b": "failed",
        "versions of services": "warning",
    }  # fmt: skip


def test_what_metrics_say_of_a_build():
    assert build_info('x 1\ntierlog_build_info{version="1",wire="3"} 1.0\n') == {
        "version": "1",
        "wire": "3",
    }
    assert build_info("nothing") == {}


def test_addresses_come_from_settings_and_from_what_up_wrote(tmp_path):
    settings = Settings.model_validate(
        {
            "state_dir": tmp_path,
            "client": {"ingest_address": "a:1,b:2", "reader_http_address": "c:3"},
        }
    )
    assert service_addresses(settings) == {
        "ingest": {"grpc": "a:1"},
        "ingest 1": {"grpc": "b:2"},
        "reader": {"http": "c:3"},
    }


PLANTED = [f"pl4nted-{number}-{'x' * number}" for number in range(20)]


def planted_settings(tmp_path):
    values = {
        "state_dir": str(tmp_path),
        "s3": {"secret_key": PLANTED[0], "endpoint_url": f"http://u:{PLANTED[1]}@s3:1"},
        "wire": {"token": PLANTED[2]},
        "redis": {"url": f"redis://:{PLANTED[3]}@cache:6379/0"},
        "tracing": {"headers": f"authorization={PLANTED[4]}"},
        "up": {"external_redis": f"redis://u:{PLANTED[5]}@cache:6379/0"},
    }
    endpoints = EndpointsFile(
        pid=1,
        state_dir=str(tmp_path),
        services={name: {"http": "127.0.0.1:1"} for name in ("ingest", "reader", "scheduler")},
        servers={"s3_access_key": "an-id", "s3_secret_key": PLANTED[6]},
    )
    (tmp_path / "endpoints.json").write_text(endpoints.model_dump_json())
    return Settings.model_validate(values)


SHAPES = [
    "Authorization: Bearer {}", "password={}", "redis://u:{}@h", "?X-Amz-Security-Token={}&x",
]  # fmt: skip


class Leaky(BaseHTTPRequestHandler):
    """A service that tells its secrets to everybody."""

    def do_GET(self):
        text = "\n".join(PLANTED[:7]) + "\n" + SHAPES[0].format(PLANTED[8])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format, *args):  # noqa: A002
        pass


async def test_a_bundle_has_none_of_the_planted_secrets(tmp_path):
    """In settings, in what up wrote, in logs, in answers of services; and what is no secret is."""
    settings = planted_settings(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = [json.dumps({"event": "planted.said", "why": one}) for one in PLANTED[:7]]
    lines += [SHAPES[0].format(PLANTED[9]), SHAPES[2].format(PLANTED[10]), "plain words stay"]
    (logs / "ingest.log").write_text("\n".join(lines) + "\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Leaky)
    serving = Thread(target=server.serve_forever)
    serving.start()
    try:
        bundle = Bundle(redactor_for(settings), name="b", time_s=1)
        bundle.add_json("settings.json", redacted_settings(settings, None))
        bundle.add_json("versions.json", versions())
        bundle.add_json(
            "nested.json", {"deep": [{"token": PLANTED[11], "a": SecretStr(PLANTED[0])}]}
        )
        port = server.server_address[1]
        await add_services(bundle, {"ingest": {"http": f"127.0.0.1:{port}"}})
        add_logs(bundle, logs)
        packed = bundle.packed()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {
            one.name: read.read().decode()
            for one in archive.getmembers()
            if (read := archive.extractfile(one))
        }
    assert set(files) == {
        "b/settings.json", "b/versions.json", "b/nested.json", "b/troubles.txt",
        "b/logs/ingest.log",
        "b/services/ingest-readyz.txt", "b/services/ingest-metrics.txt",
        "b/services/ingest-v1-status.txt",
    }  # fmt: skip
    for name, text in files.items():
        assert [one for one in PLANTED if one in text] == [], name
    assert "plain words stay" in files["b/logs/ingest.log"]
    assert files["b/logs/ingest.log"].count("planted.said") == 7
    assert "s3.bucket" in files["b/settings.json"]
    assert '"tierlog"' in files["b/versions.json"]


async def test_a_bundle_says_what_it_could_not_have(tmp_path):
    bundle = Bundle(Redactor(), name="b", time_s=1)
    add_logs(bundle, tmp_path / "nowhere")
    await add_services(bundle, {"reader": {"http": "127.0.0.1:1"}, "x": {"grpc": "127.0.0.1:1"}})

    async def fail():
        raise RetryableError("nobody there", remedy="go there")

    await bundle.gather("metadata.json", fail)
    assert len(bundle.troubles) == 4
    assert bundle.files == {}


def test_logs_are_bounded_and_never_cut_inside_of_a_line(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number} {PLANTED[0]}\n" for number in range(1000)))
    for bytes_max in range(100, 160):
        tail = tail_of(path, bytes_max=bytes_max)
        assert len(tail) <= bytes_max
        assert tail.splitlines()[-1] == f"line 999 {PLANTED[0]}"
        assert all(line.startswith("line ") for line in tail.splitlines())
    assert tail_of(path, bytes_max=10**9) == path.read_text()
    for number in range(LOGS_MAX + 3):
        (tmp_path / f"{number}.log").write_text("x\n")
    (tmp_path / "link.log").symlink_to("/etc/hostname")
    bundle = Bundle(Redactor(), name="b", time_s=1)
    add_logs(bundle, tmp_path)
    assert len(bundle.files) == LOGS_MAX
    assert "logs/link.log" not in bundle.files
    assert any("4 older" in one for one in bundle.troubles)


async def test_answers_are_bounded():
    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(ANSWER_BYTES_MAX // (64 * 1024) + 4):
            await response.write(b"x" * 64 * 1024)
        return response

    app = web.Application()
    app.router.add_get("/{tail:.*}", endless)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    bundle = Bundle(Redactor(), name="b", time_s=1)
    try:
        await add_services(bundle, {"reader": {"http": f"127.0.0.1:{runner.addresses[0][1]}"}})
    finally:
        await runner.cleanup()
    assert all(len(raw) < ANSWER_BYTES_MAX + 100 for raw in bundle.files.values())
    assert all(raw.endswith("… cut\n".encode()) for raw in bundle.files.values())


def test_a_bundle_is_for_its_owners_eyes_and_overwrites_nothing(tmp_path):
    path = tmp_path / "b.tar.gz"
    write_private(path, b"x")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(path, b"y")
