"""The health check of containers: in plain text and over TLS, as the service's settings say."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.deployment.health import health_check
from tests.security.making import Authority
from tierlog.model.errors import RetryableError
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.probe import SERVICES
from tierlog.runtime.settings import load_settings
from tierlog.runtime.tls import ServerTls


@contextlib.asynccontextmanager
async def service(tls=None, *, error=None):
    """Give the settings that say where a service listens which is ready, unless it has an error."""

    async def queue() -> bool:
        if error is not None:
            raise error
        return True

    app = build_http_app("test", checks={"queue": queue})
    async with serve_http(app, host="0.0.0.0", port=0, tls=tls) as port:
        yield {
            "TIERLOG_READER__LISTEN__HTTP_PORT": str(port),
            "TIERLOG_READER__LISTEN__HOST": "0.0.0.0",
        }


def of(files):
    return {
        "TIERLOG_SECURITY__TLS__CERTIFICATE_FILE": str(files.certificate),
        "TIERLOG_SECURITY__TLS__KEY_FILE": str(files.key),
        "TIERLOG_SECURITY__TLS__CA_FILE": str(files.ca),
    }


OPEN = {"TIERLOG_SECURITY__MODE": "open"}


def test_each_service_is_known():
    settings = load_settings()
    assert all(hasattr(getattr(settings, kind).listen, "http_port") for kind in SERVICES)


async def test_in_plain_text_where_security_is_open():
    async with service() as listen:
        code, told = await health_check("reader", {**OPEN, **listen})
        assert (code, '"ready":true' in told) == (0, True)
    away = RetryableError("Kafka at 10.0.0.7 is away", remedy="Start Kafka")
    async with service(error=away) as listen:
        code, told = await health_check("reader", {**OPEN, **listen})
        assert (code, '"remedies":{"queue":"Start Kafka"}' in told) == (1, True)
        assert "10.0.0.7" not in told, "who asks may be a stranger"
    code, told = await health_check("reader", {**OPEN, **listen})
    assert (code, "refused" in told) == (1, True)


@pytest.mark.parametrize(
    "names",
    [
        {"dns": ("*.reader.svc",), "addresses": ()},
        {"dns": (), "addresses": ("10.1.2.3",)},
        {"dns": ("reader",)},
    ],
)
async def test_over_tls_whatever_names_the_certificate_has(tmp_path, names):
    authority = Authority(tmp_path)
    files = authority.files(authority.issue("reader", **names))
    async with service(ServerTls(files, client_certificates=True)) as listen:
        code, told = await health_check("reader", {**of(files), **listen})
        assert (code, '"ready":true' in told) == (0, True)


async def test_no_other_certificate_is_believed_nor_plain_text(tmp_path):
    authority = Authority(tmp_path)
    files, other = (authority.files(authority.issue(name)) for name in ("reader", "other"))
    async with service(ServerTls(other, client_certificates=False)) as listen:
        code, told = await health_check("reader", {**of(files), **listen})
        assert (code, "CERTIFICATE_VERIFY_FAILED" in told) == (1, True)
        assert (await health_check("reader", {**OPEN, **listen}))[0] == 1
    async with service() as listen:
        assert (await health_check("reader", {**of(files), **listen}))[0] == 1


async def test_settings_may_stand_in_a_file(tmp_path: Path):
    async with service() as listen:
        port = listen["TIERLOG_READER__LISTEN__HTTP_PORT"]
        file = tmp_path / "tierlog.toml"
        file.write_text(
            f'[security]\nmode = "open"\n[reader.listen]\nhttp_port = {port}\n', encoding="utf-8"
        )
        assert (await health_check("reader", {"TIERLOG_CONFIG": str(file)}))[0] == 0


async def test_what_can_not_be_asked_is_said(tmp_path):
    code, told = await health_check("reader", OPEN)
    assert (code, "TIERLOG_READER__LISTEN__HTTP_PORT" in told) == (1, True)
    code, told = await health_check("spark", OPEN)
    assert (code, "usage" in told) == (2, True)
    authority = Authority(tmp_path)
    files = authority.files(authority.issue("nobody", dns=(), addresses=()))
    async with service(ServerTls(files, client_certificates=False)) as listen:
        code, told = await health_check("reader", {**of(files), **listen})
        assert (code, "names no host" in told) == (1, True)
