"""A connection that TLS refuses, either way, is told of as that, and not as a broker that is away.

No broker is needed: nobody comes as far as a request. One is in integration/test_kafka_tls.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import ssl
import threading
import time

import pytest
from confluent_kafka import KafkaError

from tests.security.making import Authority
from tierlog.adapters.kafka.common import HANDSHAKE_S, ClientErrors, connection_of, in_thread
from tierlog.adapters.kafka.publisher import KafkaPublisher
from tierlog.adapters.kafka.topics import ensure_topics, topic_specs
from tierlog.model.errors import Reason, RetryableError
from tierlog.runtime.settings import KafkaSettings

SPECS = topic_specs(["never"], partitions=1, replication_factor=1)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def strange(tmp_path):
    (tmp_path / "strange").mkdir()
    return Authority(tmp_path / "strange")


class _Listening(socketserver.ThreadingTCPServer):
    """Takes connections over TLS and answers nothing.

    Its threads are joined at the end. The loop's own server would leave connections behind that
    are amid their handshake when a client goes.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)

    def finish_request(self, request, client_address):
        request.settimeout(5.0)
        # A handshake that is refused, a client that goes: both are what the tests are about.
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(request, server_side=True) as connection,
        ):
            connection.recv(65536)


@contextlib.contextmanager
def listening(authority, issued, *, mutual=False):
    """Give the address of a server that holds what was `issued`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    if mutual:
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
    with _Listening(context) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def how_of(authority, issued=None):
    tls = {"enabled": True, "ca_file": str(authority.file)}
    if issued is not None:
        tls |= {"certificate_file": str(issued.certificate), "key_file": str(issued.key)}
    return connection_of(KafkaSettings.model_validate({"tls": tls}))


async def refusal(address, how):
    with pytest.raises(RetryableError) as caught:
        await ensure_topics(address, SPECS, timeout_s=2.0, how=how)
    assert caught.value.reason is Reason.UNAVAILABLE
    assert address in caught.value.message
    return caught.value


async def test_a_broker_of_another_authority_or_name_is_refused_and_the_setting_named(
    authority, strange
):
    elsewhere = authority.issue("elsewhere", dns=("elsewhere",), addresses=())
    for issued in (strange.issue("kafka"), elsewhere):
        with listening(authority, issued) as address:
            error = await refusal(address, how_of(authority))
            assert "TLS failed" in error.message
            assert "verify failed" in error.message
            assert "kafka.tls.ca_file" in error.remedy


async def test_who_publishes_is_told_so_too(authority, strange):
    with listening(strange, strange.issue("kafka")) as address:
        publisher = KafkaPublisher(address, publish_timeout_s=2.0, how=how_of(authority))
        try:
            with pytest.raises(RetryableError, match="TLS failed"):
                await publisher.publish("never", key=b"k", value=b"v", headers={})
        finally:
            await publisher.close()


async def test_a_broker_that_wants_another_certificate_is_told_with_the_settings(
    authority, strange
):
    """It closes the connection, and the library does not hear why."""
    with listening(authority, authority.issue("kafka"), mutual=True) as address:
        for issued in (None, strange.issue("stranger")):
            error = await refusal(address, how_of(authority, issued))
            assert "kafka.tls" in error.remedy


async def test_a_broker_that_is_away_is_told_as_that(free_port):
    error = await refusal(f"127.0.0.1:{free_port}", {})
    assert "TLS" not in error.message
    assert "kafka.bootstrap_servers" in error.remedy


def test_a_refused_connection_explains_what_follows_it_soon(monkeypatch):
    errors = ClientErrors("test")
    away, other = KafkaError(KafkaError._TRANSPORT), KafkaError(KafkaError.INVALID_PARTITIONS)
    assert errors.explain(away) is away
    refused = KafkaError(KafkaError._AUTHENTICATION)
    errors.remember(refused)
    assert errors.explain(away) is refused
    assert errors.explain(other) is other
    later_s = time.monotonic() + HANDSHAKE_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert errors.explain(away) is away


async def test_nobody_waits_for_a_call_that_was_given_up():
    """The end of a process waits for threads of the executor, and not for these."""
    loop, began_s, ended = asyncio.get_running_loop(), time.monotonic(), []

    def blocks():
        time.sleep(1.0)
        ended.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await in_thread("blocks", blocks)
    await loop.shutdown_default_executor()
    assert time.monotonic() - began_s < 0.9
    assert not ended
    with pytest.raises(ZeroDivisionError):
        await in_thread("fails", lambda: 1 / 0)
    assert await in_thread("returns", lambda: 7) == 7
    while not ended:
        await asyncio.sleep(0.05)
