"""What the Kafka adapters share: the way its errors are told, and its log."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from confluent_kafka import KafkaError

from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.runtime.security import secret_text
from tierlog.runtime.settings import KafkaSettings

log = structlog.get_logger()

NOTE_INTERVAL_S = 30.0

# librdkafka's own log lines, which it would else print.
client_log = logging.getLogger("tierlog.kafka")

UNKNOWN_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - librdkafka's own codes begin so
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
_DENIED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)


How = Mapping[str, str]
"""What librdkafka is told of TLS and of who this is."""

PLAIN: Final[How] = {}


def connection_of(settings: KafkaSettings) -> How:
    """Return how the brokers are connected to. The server's name is verified, always."""
    tls, sasl, how = settings.tls, settings.sasl, dict[str, str]()
    if tls.enabled or sasl.mechanism is not None:
        kind = "SASL_" if sasl.mechanism is not None else ""
        how["security.protocol"] = kind + ("SSL" if tls.enabled else "PLAINTEXT")
    if tls.enabled:
        how["ssl.endpoint.identification.algorithm"] = "https"
        files = {
            "ssl.ca.location": tls.ca_file,
            "ssl.certificate.location": tls.certificate_file,
            "ssl.key.location": tls.key_file,
        }
        how |= {name: str(file) for name, file in files.items() if file is not None}
    if sasl.mechanism is not None:
        password = secret_text(sasl.password, sasl.password_file, name="kafka.sasl.password")
        if not (sasl.username and password):
            raise RefusedError(
                f"kafka.sasl.mechanism is {sasl.mechanism}, without a username or password",
                remedy="Set TIERLOG_KAFKA__SASL__USERNAME and …__PASSWORD_FILE",
            )
        how |= {
            "sasl.mechanism": sasl.mechanism,
            "sasl.username": sasl.username,
            "sasl.password": password,
        }
    return how


def as_error(error: KafkaError, what: str, bootstrap: str) -> TierlogError:
    """Say what a refusal or failure of Kafka means to a caller."""
    if error.code() in _DENIED:
        return RefusedError(
            f"Kafka at {bootstrap} does not allow {what}: {error.str()}",
            reason=Reason.PERMISSION_DENIED,
            remedy="Check the access list and the credentials",
        )
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return RefusedError(
            f"Kafka takes no event so large ({what})",
            reason=Reason.TOO_LARGE,
            remedy="Make it smaller, or raise message.max.bytes of the topic",
        )
    if error.code() in {KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.INVALID_PARTITIONS}:
        return RefusedError(
            f"Kafka at {bootstrap} refuses {what}: {error.str()}",
            remedy="Lower kafka.replication_factor or kafka.partitions to what the cluster has",
        )
    if error.code() in UNKNOWN_TOPIC:
        return RetryableError(
            f"Kafka at {bootstrap} has no topic for {what}",
            remedy="Create the topics with: tierlog topics apply; services do so when they start",
        )
    return RetryableError(
        f"Kafka at {bootstrap} did not do {what}: {error.str()}",
        remedy="Check that it runs there and is reachable, or set kafka.bootstrap_servers",
    )


class ClientErrors:
    """Notes what librdkafka can't tell to any call, such as an unreachable broker; not too often.

    One for each client: called by its thread, with the same few codes again and again.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._noted_s: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        now_s = time.monotonic()
        if now_s - self._noted_s.get(error.code(), float("-inf")) >= NOTE_INTERVAL_S:
            self._noted_s[error.code()] = now_s
            log.warning(
                "kafka.client_error", client=self._client, code=error.name(), cause=error.str()
            )


def from_thread(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run ``callback`` on the loop, unless that is closed and nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
