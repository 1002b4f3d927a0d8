"""What the Kafka adapters share: the way its errors are told, and its log."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final, TypeVar

import structlog
from confluent_kafka import KafkaError

from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.runtime.security import secret_text
from tierlog.runtime.settings import KafkaSettings

log = structlog.get_logger()

Result = TypeVar("Result")

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
_HANDSHAKE: Final = frozenset({KafkaError._SSL, KafkaError._AUTHENTICATION})  # noqa: SLF001
"""What brokers tell of a connection that they, or we, have refused; no call is told so."""
_AWAY: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._TRANSPORT,  # noqa: SLF001
    }
)
HANDSHAKE_S: Final = 15.0
"""For so long a refused connection explains why nobody answers; it is tried again sooner."""
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
AUTHORITIES: Final = "ssl.ca.location"
CERTIFICATE: Final = "ssl.certificate.location"
KEY: Final = "ssl.key.location"


def connection_of(settings: KafkaSettings) -> How:
    """Return how the brokers are connected to. The server's name is verified, always."""
    tls, sasl, how = settings.tls, settings.sasl, dict[str, str]()
    if tls.enabled or sasl.mechanism is not None:
        kind = "SASL_" if sasl.mechanism is not None else ""
        how["security.protocol"] = kind + ("SSL" if tls.enabled else "PLAINTEXT")
    if tls.enabled:
        how["ssl.endpoint.identification.algorithm"] = "https"
        files = {
            AUTHORITIES: tls.ca_file,
            CERTIFICATE: tls.certificate_file,
            KEY: tls.key_file,
        }
        named = {name: file for name, file in files.items() if file is not None}
        for file in named.values():
            if not file.is_file():
                raise RefusedError(
                    f"kafka.tls names {file}, which is no file",
                    remedy="Correct TIERLOG_KAFKA__TLS__CA_FILE, …CERTIFICATE_FILE and …KEY_FILE",
                )
        how |= {name: str(file) for name, file in named.items()}
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
    if error.code() in _HANDSHAKE:
        return _handshake_error(error, what, bootstrap)
    return RetryableError(
        f"Kafka at {bootstrap} did not do {what}: {error.str()}",
        remedy="Check that Kafka runs there, is reachable and takes connections of this kind "
        "(kafka.tls, kafka.sasl), or set kafka.bootstrap_servers",
    )


def _handshake_error(error: KafkaError, what: str, bootstrap: str) -> TierlogError:
    if error.code() == KafkaError._SSL:  # noqa: SLF001
        return RetryableError(
            f"TLS failed with Kafka at {bootstrap}, asked for {what}: {error.str()}",
            remedy="Check that kafka.tls.ca_file has the authority of the broker's certificate and "
            "that it names this host; a broker that asks for one needs kafka.tls.certificate_file",
        )
    return RetryableError(
        f"Kafka at {bootstrap}, asked for {what}, does not believe who this is: {error.str()}",
        remedy="Check kafka.sasl: the mechanism, the username and the password",
    )


class ClientErrors:
    """Notes what librdkafka can't tell to any call, such as an unreachable broker; not too often.

    One for each client: called by its thread, with the same few codes again and again. Calls that
    fail since nobody could be connected to ask it why.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._noted_s: dict[int, float] = {}
        self._refused: tuple[float, KafkaError] | None = None

    def __call__(self, error: KafkaError) -> None:
        now_s = time.monotonic()
        self.remember(error)
        if now_s - self._noted_s.get(error.code(), float("-inf")) >= NOTE_INTERVAL_S:
            self._noted_s[error.code()] = now_s
            log.warning(
                "kafka.client_error", client=self._client, code=error.name(), cause=error.str()
            )

    def remember(self, error: KafkaError) -> None:
        """Keep what explains later errors, and log nothing."""
        if error.code() in _HANDSHAKE:
            self._refused = time.monotonic(), error

    def explain(self, error: KafkaError) -> KafkaError:
        """Return why nobody answers, where a connection was refused; else the error itself."""
        if error.code() not in _AWAY or self._refused is None:
            return error
        since_s, refused = self._refused
        return refused if time.monotonic() - since_s < HANDSHAKE_S else error


def from_thread(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run ``callback`` on the loop, unless that is closed and nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


async def in_thread(name: str, call: Callable[[], Result]) -> Result:
    """Return what ``call`` does, which blocks, in a thread that nobody has to wait for.

    The executor's threads would hold up the end of a process whose broker does not answer.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
