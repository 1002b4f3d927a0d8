"""`format("tierlog")` where services ask who it is: a write and reads with the right credentials,
and with wrong ones, of which nothing stays. What is wrong is said once, with what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.spark_kit import rows_read
from tests.integration.test_secured_services import STREAM, deployment, read
from tests.integration.test_spark_sink import plain, writing
from tierlog.client import open_client
from tierlog.model.errors import Reason, TierlogError, first_error
from tierlog.runtime.settings import load_settings
from tierlog.wiring.build import open_catalog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.integration.test_secured_services import Deployment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

__all__ = ["deployment"]

GIVEN = {"stream": STREAM}
ROLES = {
    "spark": ("producer", "service"),
    "nodes": ("service",),
    "producer": ("producer",),
    "consumer": ("consumer",),
}


@pytest.fixture
def told(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Say in the environment of the driver who it is."""
    addresses = {
        "TIERLOG_CLIENT__INGEST_ADDRESS": deployment.addresses["ingest"]["grpc"],
        "TIERLOG_CLIENT__READER_HTTP_ADDRESS": deployment.addresses["reader"]["http"],
        "TIERLOG_CLIENT__TIMEOUT_S": "5",
    }
    wanted = ("TIERLOG_ZOOKEEPER__", "TIERLOG_SECURITY__TLS__CA", "TIERLOG_SECURITY__PLAIN")
    known = {k: v for k, v in deployment.environment().items() if k.startswith(wanted)}
    for name, value in (known | addresses).items():
        monkeypatch.setenv(name, value)
    for name, roles in ROLES.items():
        token = deployment.issuer.token(name, roles=roles, streams=("*",))
        (deployment.folder / f"{name}.token").write_text(token, encoding="utf-8")

    def tell(name: str | None) -> None:
        if name is None:
            monkeypatch.delenv("TIERLOG_SECURITY__TOKEN_FILE", raising=False)
        else:
            file = str(deployment.folder / f"{name}.token")
            monkeypatch.setenv("TIERLOG_SECURITY__TOKEN_FILE", file)

    return tell


async def staged() -> int:
    async with open_catalog(load_settings()) as catalog:
        return len(await catalog.bare.list_staging())


async def refused(doing: Awaitable[object]) -> Reason:
    with pytest.raises((TierlogError, BaseExceptionGroup)) as caught:
        await doing
    error = first_error(caught.value)
    assert isinstance(error, TierlogError)
    assert error.remedy
    return error.reason


async def test_what_may_not_be_written_or_read_is_refused_and_leaves_nothing(
    deployment: Deployment, told: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(deployment.settings("app")) as app:
        await app.create_stream(STREAM)
    told("spark")
    good = await writing(GIVEN)
    await good.commit([await good.task(plain([b"one", b"two"]))])

    async def rows() -> list[bytes]:
        async with open_client(deployment.settings("app")) as app:
            found: list[bytes] = await read(app)
            return found

    assert await rows() == [b"one", b"two"]

    # It may write to the storage nodes, and not into the stream.
    told("nodes")
    write = await writing(GIVEN)
    done = await write.task(plain([b"three"]))
    assert await staged() == 1
    assert await refused(write.commit([done])) is Reason.PERMISSION_DENIED
    await write.abort([done])
    for name, reason in (
        ("producer", Reason.PERMISSION_DENIED),
        (None, Reason.UNAUTHENTICATED),
    ):
        told(name)
        write = await writing(GIVEN)
        assert await refused(write.task(plain([b"four"]))) is reason
    assert await staged() == 0
    assert await rows() == [b"one", b"two"]
    await _reads(told)
    password = deployment.folder / "wrong.password"
    password.write_text("wrong", encoding="utf-8")
    monkeypatch.setenv("TIERLOG_ZOOKEEPER__PASSWORD_FILE", str(password))
    told("spark")
    assert await refused(writing(GIVEN)) is Reason.PERMISSION_DENIED


async def _reads(told: Callable[[str | None], None]) -> None:
    given = {**GIVEN, "readMode": "service"}
    told("consumer")
    assert [row["payload"] for row in await rows_read(given)] == [b"one", b"two"]
    for name, reason in (
        ("producer", Reason.PERMISSION_DENIED),
        (None, Reason.UNAUTHENTICATED),
    ):
        told(name)
        assert await refused(rows_read(given)) is reason
