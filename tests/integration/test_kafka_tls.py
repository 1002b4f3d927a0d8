"""Kafka over TLS: a real broker with certificates of an authority of its own.

Names and authorities are verified on both sides; who is refused is told why, and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from confluent_kafka import Consumer
from structlog.testing import capture_logs

from tests.plugins.fix_servers import run_apart
from tests.security.making import Authority
from tierlog.adapters.kafka import source as source_module
from tierlog.adapters.kafka import watched as watched_module
from tierlog.adapters.kafka.common import connection_of
from tierlog.adapters.kafka.publisher import KafkaPublisher
from tierlog.adapters.kafka.source import KafkaEventSource
from tierlog.adapters.kafka.topics import ensure_topics, topic_specs
from tierlog.embedded.kafka import Kafka
from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.process import Child, Launch
from tierlog.embedded.server import Place
from tierlog.embedded.supervisor import until_ready
from tierlog.model.errors import Reason, RetryableError
from tierlog.runtime.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tierlog.ports.progress import Progress

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LISTENERS = """
listeners=PLAINTEXT://{host}:{broker},CONTROLLER://{host}:{controller},SSL://{host}:{tls},\
MUTUAL://{host}:{mutual}
advertised.listeners=PLAINTEXT://{host}:{broker},SSL://{host}:{tls},MUTUAL://{host}:{mutual}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SSL:SSL,MUTUAL:SSL
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={truststore}
listener.name.mutual.ssl.client.auth=required
"""


class TlsKafka(Kafka):
    """The embedded broker with two more listeners: one that shows a certificate, one that wants
    to see one, too."""

    port_purposes: ClassVar[Sequence[str]] = ("broker", "controller", "tls", "mutual")

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    async def prepare(self, place: Place, progress: Progress) -> Launch:
        launch = await super().prepare(place, progress)
        issued = self._authority.issue("kafka")
        keystore = place.data / "keystore.pem"
        keystore.write_bytes(issued.key.read_bytes() + issued.certificate.read_bytes())
        ports = {name: place.ports[name] for name in self.port_purposes}
        with (place.data / "server.properties").open("a", encoding="utf-8") as file:
            file.write(
                LISTENERS.format(
                    host=LOOPBACK, keystore=keystore, truststore=self._authority.file, **ports
                )
            )
        return launch


class Broker:
    """A running one, and settings of who calls it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        (folder / "strange").mkdir()
        self.strange = Authority(folder / "strange")
        server = TlsKafka(self.authority)
        self.ports = Ports(folder / "ports.json").take("kafka", server.port_purposes)
        self._place = Place(
            data=folder / "data", log=folder / "kafka.log", ports=self.ports, environ=os.environ
        )
        self._place.data.mkdir()
        self._server = server
        self._child: Child | None = None

    async def start(self) -> None:
        launch = await self._server.prepare(self._place, lambda *_: None)
        self._child = Child.spawn("kafka", launch, run_dir=self._place.data)
        async with asyncio.timeout(90):
            await until_ready(self._server, self._place, self._child)

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(deadline_s=self._server.stop_s_max)

    def settings(self, listener: str, **tls: Any) -> KafkaSettings:
        given = {name: str(value) for name, value in tls.items()}
        return KafkaSettings.model_validate(
            {
                "bootstrap_servers": f"{LOOPBACK}:{self.ports[listener]}",
                "tls": {"enabled": True, **given},
            }
        )


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("kafka-tls"))
    try:
        run_apart(made.start())
        yield made
    finally:
        run_apart(made.stop())


async def there_and_back(settings: KafkaSettings) -> list[bytes]:
    """Make a topic, publish to it, and take what is in it, as services do."""
    how, bootstrap, topic = connection_of(settings), settings.bootstrap_servers, str(uuid.uuid4())
    specs = topic_specs([topic], partitions=1, replication_factor=1)
    await ensure_topics(bootstrap, specs, how=how)
    publisher = KafkaPublisher(bootstrap, specs=specs, how=how)
    source = KafkaEventSource(bootstrap, [topic], group=topic, how=how)
    found: list[bytes] = []
    try:
        for value in (b"one", b"two"):
            await publisher.publish(topic, key=b"k", value=value, headers={"h": b"v"})
        async with asyncio.timeout(60):
            while len(found) < 2:
                event = await source.take()
                found.append(event.value)
                await source.ack(event)
    finally:
        await source.close()
        await publisher.close()
    return found


async def refusal(settings: KafkaSettings) -> RetryableError:
    specs = topic_specs(["never"], partitions=1, replication_factor=1)
    with pytest.raises(RetryableError) as caught:
        await ensure_topics(
            settings.bootstrap_servers, specs, timeout_s=5, how=connection_of(settings)
        )
    assert caught.value.reason is Reason.UNAVAILABLE
    assert settings.bootstrap_servers in caught.value.message
    return caught.value


async def test_events_go_there_and_back_over_tls(broker):
    settings = broker.settings("tls", ca_file=broker.authority.file)
    assert await there_and_back(settings) == [b"one", b"two"]


async def test_a_broker_of_another_authority_is_not_spoken_to_and_the_setting_is_named(broker):
    error = await refusal(broker.settings("tls", ca_file=broker.strange.file))
    assert "TLS failed" in error.message
    assert "certificate verify failed" in error.message
    assert "kafka.tls.ca_file" in error.remedy


async def test_so_is_who_publishes(broker):
    settings = broker.settings("tls", ca_file=broker.strange.file)
    publisher = KafkaPublisher(
        settings.bootstrap_servers, publish_timeout_s=3.0, how=connection_of(settings)
    )
    try:
        with pytest.raises(RetryableError, match="TLS failed") as caught:
            await publisher.publish("never", key=b"k", value=b"v", headers={})
        assert "kafka.tls.ca_file" in caught.value.remedy
    finally:
        await publisher.close()


async def test_a_broker_that_asks_for_a_certificate_gets_one(broker):
    issued = broker.authority.issue("offloader")
    settings = broker.settings(
        "mutual",
        ca_file=broker.authority.file,
        certificate_file=issued.certificate,
        key_file=issued.key,
    )
    assert await there_and_back(settings) == [b"one", b"two"]


async def test_without_one_that_it_believes_nobody_is_let_in(broker):
    none = broker.settings("mutual", ca_file=broker.authority.file)
    strange = broker.strange.issue("stranger")
    other = broker.settings(
        "mutual",
        ca_file=broker.authority.file,
        certificate_file=strange.certificate,
        key_file=strange.key,
    )
    for settings in (none, other):
        error = await refusal(settings)
        assert "kafka.tls" in error.remedy


async def test_a_listener_without_tls_is_not_spoken_to(broker):
    error = await refusal(broker.settings("broker", ca_file=broker.authority.file))
    assert "kafka.tls" in error.remedy


def put(issued, certificate, key):
    """Put a certificate and its key where others lie, as who rotates them does."""
    for new, old in ((issued.certificate, certificate), (issued.key, key)):
        beside = old.with_suffix(".new")
        beside.write_bytes(new.read_bytes())
        beside.rename(old)


@contextlib.asynccontextmanager
async def passing(settings, monkeypatch):
    """Give what passes an event through, the members that were made, and the publisher."""
    members = []

    def member(*args, **options):
        members.append(Consumer(*args, **options))
        return members[-1]

    monkeypatch.setattr(source_module, "Consumer", member)
    how, bootstrap, topic = connection_of(settings), settings.bootstrap_servers, str(uuid.uuid4())
    specs = topic_specs([topic], partitions=1, replication_factor=1)
    await ensure_topics(bootstrap, specs, how=how)
    publisher = KafkaPublisher(bootstrap, publish_timeout_s=5.0, how=how)
    source = KafkaEventSource(bootstrap, [topic], group=topic, how=how)

    async def passes(value):
        await publisher.publish(topic, key=b"k", value=value, headers={})
        async with asyncio.timeout(60):
            event = await source.take()
        assert event.value == value
        await source.ack(event)

    try:
        yield passes, members, publisher
    finally:
        await source.close()
        await publisher.close()


async def test_files_are_read_again_when_they_change(broker, tmp_path, monkeypatch):
    """Those that no broker takes change nothing but the log; those that it takes are used."""
    good, strange = broker.authority.issue("rotated"), broker.strange.issue("rotated")
    better = broker.authority.issue("better")
    monkeypatch.setattr(watched_module, "TRY_AGAIN_S", 1.0)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    put(good, certificate, key)
    settings = broker.settings(
        "mutual", ca_file=broker.authority.file, certificate_file=certificate, key_file=key
    )
    async with passing(settings, monkeypatch) as (passes, members, publisher):
        await passes(b"by the first")
        first = publisher._producing
        put(strange, certificate, key)
        with capture_logs() as logged:
            async with asyncio.timeout(60):
                while not (told := [one for one in logged if "not_taken" in one["event"]]):
                    await passes(b"by the first again")
        assert "kafka.tls" in told[0]["cause"]
        await passes(b"still")
        assert (len(members), publisher._producing) == (1, first)
        put(better, certificate, key)
        async with asyncio.timeout(60):
            while len(members) < 2 or publisher._producing is first:
                await passes(b"by the better ones")
        # A key without its certificate is what a rotation looks like half way.
        key.write_bytes(strange.key.read_bytes())
        count = len(members)
        await passes(b"by those that were read")
        assert len(members) == count
