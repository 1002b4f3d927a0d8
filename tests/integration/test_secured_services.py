"""All four services with TLS and tokens, on the real servers: the main job, and who may not do it.

What they log at debug level meanwhile shows no secret, and the audit log has what was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.deployment.health import health_check
from tests.plugins.fix_corner import environment_of
from tests.security.making import ISSUER, Authority, Issuer
from tierlog.cli.checks import check_services
from tierlog.client import open_client
from tierlog.embedded.nodes import quorum_environment
from tierlog.model.errors import Reason, TierlogError, first_error
from tierlog.runtime.settings import Settings
from tierlog.wiring.checks import Result
from tierlog.wiring.security import calling_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KINDS = ("ingest", "reader", "offloader", "scheduler")
STREAM = "orders.eu"
ZOOKEEPER_PASSWORD = "planted-zookeeper-password-hush"


class Deployment:
    """The four services as processes of their own, and what clients are given."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.issuer = Issuer(folder / "jwks.json")
        self.addresses: dict[str, dict[str, Any]] = {}
        self._env = env
        self._issued = self.authority.issue("services")
        self._running: list[asyncio.subprocess.Process] = []
        self.tokens = {
            "service": self.issuer.token("tierlog-services", roles=("service",), streams=("*",)),
            "admin": self.issuer.token("admin", roles=("admin",), streams=("orders*",)),
            "app": self.issuer.token("app", roles=("producer", "consumer"), streams=("orders*",)),
            "billing": self.issuer.token("billing", roles=("producer",), streams=("billing*",)),
        }
        for name, token in self.tokens.items():
            (folder / f"{name}.token").write_text(token, encoding="utf-8")
        (folder / "zookeeper.password").write_text(ZOOKEEPER_PASSWORD, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        issued = self._issued
        return {
            **os.environ,
            **self._env,
            "TIERLOG_LOG__LEVEL": "debug",
            "TIERLOG_SECURITY__TLS__CERTIFICATE_FILE": str(issued.certificate),
            "TIERLOG_SECURITY__TLS__KEY_FILE": str(issued.key),
            "TIERLOG_SECURITY__TLS__CA_FILE": str(self.authority.file),
            "TIERLOG_SECURITY__JWT__JWKS_FILE": str(self.issuer.file),
            "TIERLOG_SECURITY__JWT__ISSUER": ISSUER,
            "TIERLOG_SECURITY__TOKEN_FILE": str(self.folder / "service.token"),
            "TIERLOG_SECURITY__PLAIN_TEXT_TO": '["kafka", "zookeeper", "redis"]',
            "TIERLOG_ZOOKEEPER__USERNAME": "tierlog",
            "TIERLOG_ZOOKEEPER__PASSWORD_FILE": str(self.folder / "zookeeper.password"),
            "TIERLOG_INGEST__DATA_DIR": str(self.folder / "data"),
            "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
            "PYTHONUNBUFFERED": "1",
        }

    async def start(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            started = {kind: tasks.create_task(self._start(kind)) for kind in KINDS}
        self.addresses = {kind: task.result() for kind, task in started.items()}

    async def _start(self, kind: str) -> dict[str, Any]:
        with self.log(kind).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", f"tierlog_{kind}.main",
                env=self.environment(), stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._running.append(process)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, f"{kind} ended: {self.log(kind).read_text()[-2000:]}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def log(self, kind: str) -> Path:
        return self.folder / f"{kind}.log"

    async def stop(self) -> None:
        for process in reversed(self._running):
            if process.returncode is None:
                process.terminate()
                await asyncio.wait_for(process.wait(), 60)

    def settings(self, token: str | None) -> Settings:
        security: dict[str, Any] = {"tls": {"ca_file": str(self.authority.file)}}
        if token is not None:
            security["token_file"] = str(self.folder / f"{token}.token")
        return Settings.model_validate(
            {
                "security": security,
                "client": {
                    "ingest_address": self.addresses["ingest"]["grpc"],
                    "reader_http_address": self.addresses["reader"]["http"],
                    "scheduler_http_address": self.addresses["scheduler"]["http"],
                },
            }
        )


@pytest.fixture
async def deployment(corner, tmp_path):
    env = {**environment_of(corner), **quorum_environment(1, {})}
    made = Deployment(tmp_path, env)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def refusal(deployment, token, work):
    with pytest.raises((TierlogError, BaseExceptionGroup)) as caught:
        async with open_client(deployment.settings(token)) as client:
            await work(client)
    error = first_error(caught.value)
    assert isinstance(error, TierlogError)
    return error.reason


async def append(client):
    async with client.writer(STREAM) as writer:
        for number in range(100):
            await writer.send(b"event %d" % number)


async def read(client):
    return [bytes(event.payload) async for event in client.reader(STREAM).events()]


async def test_the_main_job_with_security_on_and_who_may_not_do_it(deployment):
    settings = deployment.settings
    async with open_client(settings("app")) as app:
        await append(app)
    async with open_client(settings("admin")) as admin:
        await admin.seal(STREAM)
        async with asyncio.timeout(60):
            await admin.offload(STREAM)
            while not _is_offloaded(await admin.stream(STREAM)):
                await asyncio.sleep(0.2)
    async with open_client(settings("app")) as app:
        assert await read(app) == [b"event %d" % number for number in range(100)]

    for token, reason in (
        ("billing", Reason.PERMISSION_DENIED),
        ("admin", Reason.PERMISSION_DENIED),  # creates, and does not append
        (None, Reason.UNAUTHENTICATED),
    ):
        assert await refusal(deployment, token, append) is reason
    assert await refusal(deployment, "app", lambda c: c.seal(STREAM)) is Reason.PERMISSION_DENIED
    assert (
        await refusal(deployment, "admin", lambda c: c.bounds(STREAM)) is Reason.PERMISSION_DENIED
    )
    assert await refusal(deployment, "admin", lambda c: c.streams()) is Reason.PERMISSION_DENIED
    assert await refusal(deployment, "app", lambda c: c.delete_stream(STREAM)) is (
        Reason.PERMISSION_DENIED
    )
    await _doctor_looks(deployment)
    await _health_checks(deployment)
    await _nothing_is_plain(deployment)
    _nothing_secret_is_logged(deployment)
    _audited(deployment)


def _is_offloaded(document) -> bool:
    return all(ledger["complete"] for ledger in document["ledgers"])


async def _doctor_looks(deployment):
    """As who may observe; a version is told to nobody else."""
    services = {kind: dict(ready) for kind, ready in deployment.addresses.items()}
    calling = calling_of(deployment.settings("admin").security)
    found = await check_services(services, calling)
    assert {one.result for one in found} == {Result.OK}, found
    plainly = await check_services(services)
    assert Result.OK not in {one.result for one in plainly}


async def _health_checks(deployment):
    """As the images ask, with the settings that the services have."""
    for kind, ready in deployment.addresses.items():
        port = ready["http"].rpartition(":")[2]
        env = {**deployment.environment(), f"TIERLOG_{kind.upper()}__LISTEN__HTTP_PORT": port}
        code, told = await health_check(kind, env)
        assert (code, '"ready":true' in told) == (0, True), told


async def _nothing_is_plain(deployment):
    """Every listener of every service speaks TLS and nothing else."""
    for kind, ready in deployment.addresses.items():
        for purpose in ("http", "grpc", "wire"):
            if purpose not in ready:
                continue
            async with aiohttp.ClientSession() as session:
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"http://{ready[purpose]}/livez")
        import ssl

        context = ssl.create_default_context(cafile=deployment.authority.file)
        async with aiohttp.ClientSession(f"https://{ready['http']}") as session:
            for path, status in (("/livez", 200), ("/readyz", 200), ("/metrics", 401)):
                async with session.get(path, ssl=context) as answer:
                    assert (kind, path, answer.status) == (kind, path, status)


def _nothing_secret_is_logged(deployment):
    for kind in KINDS:
        text = deployment.log(kind).read_text(encoding="utf-8")
        assert "service.started" in text
        assert ZOOKEEPER_PASSWORD not in text
        assert deployment._env["TIERLOG_S3__SECRET_KEY"] not in text
        for token in deployment.tokens.values():
            assert token not in text
            assert token.rpartition(".")[2] not in text


def _audited(deployment):
    found = []
    for kind in KINDS:
        for line in deployment.log(kind).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record.get("event") == "action.audited":
                    found.append((record["subject"], record["action"], record["outcome"]))
    assert ("token:app", "/tierlog.v1.Ingest/CreateStream", "done") in found
    assert ("token:admin", "/tierlog.v1.Ingest/Seal", "done") in found
    assert ("token:admin", "POST /v1/streams/{name}/offload", "done") in found
    assert ("token:app", "/tierlog.v1.Ingest/Seal", "PERMISSION_DENIED") in found
    assert ("token:app", "DELETE /v1/streams/{name}", "PERMISSION_DENIED") in found
