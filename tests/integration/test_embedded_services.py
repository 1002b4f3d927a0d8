"""Service processes: ready when they say so, stopped in order, their end noticed, none left.

The process here is the standard library's HTTP server, since what is tested is the supervision.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tierlog.embedded.ports import Ports
from tierlog.embedded.process import first_end, identify
from tierlog.embedded.services import EmbeddedServices, ServiceSpec, service_spec
from tierlog.model.errors import RetryableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SERVER = """
import http.server, os, pathlib, signal, sys
from functools import partial
port = int(os.environ["TIERLOG_STUB__LISTEN__HTTP_PORT"])
class Handler(http.server.BaseHTTPRequestHandler):
    log_message = lambda *_: None
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
def end(*_):
    with pathlib.Path(os.environ["ENDED"]).open("a") as ended:
        ended.write(os.environ["NAME"] + " ")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("level", os.environ.get("LEVEL"), flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
async def services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EmbeddedServices]:
    package = tmp_path / "code" / "tierlog_stub"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SERVER)
    (tmp_path / "code" / "tierlog_broken").mkdir()
    (tmp_path / "code" / "tierlog_broken" / "main.py").write_text("raise SystemExit('no disk')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    embedded = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    yield embedded
    await embedded.stop()


def stub(tmp_path: Path, name: str, kind: str = "stub") -> ServiceSpec:
    ports = Ports(tmp_path / "ports.json").take(name, ["http"])
    env = {"LEVEL": "one", "NAME": name, "ENDED": str(tmp_path / "ended")}
    return service_spec(kind, ports=ports, env=env, name=name)


async def test_the_last_one_started_is_stopped_first(
    services: EmbeddedServices, tmp_path: Path
) -> None:
    await services.start([stub(tmp_path, name) for name in "abc"], lambda *_: None)
    await services.stop()
    assert (tmp_path / "ended").read_text().split() == ["c", "b", "a"]


async def test_services_start_restart_with_settings_and_stop(
    services: EmbeddedServices, tmp_path: Path
) -> None:
    told: list[str] = []
    specs = [stub(tmp_path, "a"), stub(tmp_path, "b")]
    await services.start(specs, lambda what, _done, _total: told.append(what))
    assert sorted(line[:10] for line in told) == ["a is ready", "b is ready"]

    watch = asyncio.ensure_future(first_end(services.children))
    await asyncio.sleep(0)
    services.kill("b")
    assert await watch == "b"

    await services.restart("b", env={"LEVEL": "two"})
    assert services.log("b").read_text() == "level one\nlevel two\n"
    await services.restart("b")
    assert services.log("b").read_text() == "level one\nlevel two\nlevel one\n"
    pids = [services.pid("a"), services.pid("b")]
    await services.stop()
    assert [identify(pid) for pid in pids] == [None, None]
    assert not list(tmp_path.glob("*.pid"))


async def test_a_service_that_ends_while_starting_is_named_and_none_is_left(
    services: EmbeddedServices, tmp_path: Path
) -> None:
    specs = [stub(tmp_path, "a"), stub(tmp_path, "broken", kind="broken")]
    with pytest.raises(RetryableError, match="broken ended with 1 while starting: no disk"):
        await services.start(specs)
    assert not services.children
    assert not list(tmp_path.glob("*.pid"))
