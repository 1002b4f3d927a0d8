"""The cache port over Redis: every trouble is a miss, and soon costs nothing.

    0   16  digest   BLAKE2b of key and value, keyed with the secret if there is one
    16  -   value

Invariants:
    * Nothing raises but a programmer's error. An unreachable, slow, full or confused Redis is
      an empty cache, and while it is, only one call in a growing interval tries it. Confused:
      the library raises whatever its parser meets (ValueError, TypeError, RecursionError).
    * What is returned is what was put under that very key: the digest says so. With a secret
      it says so even when somebody else writes to this Redis.
    * Never more than the limit is read, whatever lies under a key.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, Final

import structlog
from redis.asyncio import Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from tierlog.adapters.offsets import Backoff
from tierlog.ports.clock import Clock
from tierlog.runtime.security import secret_text
from tierlog.runtime.settings import RedisSettings

log = structlog.get_logger()

DIGEST_LEN = 16
CONNECTIONS_MAX = 8
CAUSE_CHARS_MAX = 300  # an error of the library's parser may repeat all that came
DEFAULT_BACKOFF = Backoff(first_s=1.0, max_s=30.0)

How = Mapping[str, Any]
"""What the library is told of TLS and of who this is."""

PLAIN: Final[How] = {}


def url_of(settings: RedisSettings) -> str:
    """Return the URL, over TLS where the settings say so."""
    assert settings.url is not None
    scheme, colon, rest = settings.url.partition("://")
    return f"{'rediss' if settings.tls.enabled else scheme}{colon}{rest}"


def connection_of(settings: RedisSettings) -> How:
    """Return what the URL doesn't say. The server's name is verified, always."""
    tls, how = settings.tls, dict[str, Any]()
    if url_of(settings).startswith("rediss:"):
        files = {
            "ssl_ca_certs": tls.ca_file,
            "ssl_certfile": tls.certificate_file,
            "ssl_keyfile": tls.key_file,
        }
        how |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        how |= {name: str(file) for name, file in files.items() if file is not None}
    password = secret_text(settings.password, settings.password_file, name="redis.password")
    if settings.username:
        how["username"] = settings.username
    if password is not None:
        how["password"] = password
    return how


def digest_key(secret: str | None) -> bytes:
    """Return the key of the digests; of no secret: none, and anybody can make them."""
    return hashlib.sha256(secret.encode()).digest() if secret is not None else b""


class _Fresh(SSLConnection):
    """Reads the files of TLS whenever it connects, and not the first time alone."""

    async def connect_check_health(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
        self.ssl_context.context = None
        await super().connect_check_health(*args, **options)


class RedisCache:
    """One Redis, shared with whoever has the same prefix (and secret)."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        key_prefix: str = "tierlog:",
        timeout_s: float = 0.25,
        value_bytes_max: int = 1024 * 1024,
        secret: bytes = b"",
        backoff: Backoff = DEFAULT_BACKOFF,
        how: How = PLAIN,
    ) -> None:
        self._clock = clock
        self._key_prefix = key_prefix
        self._value_bytes_max = value_bytes_max
        self._secret = secret
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._failures = 0
        self._try_at_s = float("-inf")
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=CONNECTIONS_MAX,
            **how,
        )
        pool = self._redis.connection_pool
        if pool.connection_class is SSLConnection:
            pool.connection_class = _Fresh

    def __repr__(self) -> str:
        return f"RedisCache(prefix={self._key_prefix!r}, failures={self._failures})"

    async def get(self, key: str) -> bytes | None:
        if not self._may_try():
            return None
        name, limit = self._key_prefix + key, DIGEST_LEN + self._value_bytes_max
        try:
            async with asyncio.timeout(2 * self._timeout_s), self._slots:
                found = await self._redis.getrange(name, 0, limit)
        except ResponseError as error:
            log.info("cache.get_refused", cause=str(error))
            return None
        except Exception as error:  # noqa: BLE001 - see the invariants
            self._note_absent(error)
            return None
        self._note_present()
        if not isinstance(found, bytes) or not DIGEST_LEN <= len(found) <= limit:
            return None
        digest, value = found[:DIGEST_LEN], found[DIGEST_LEN:]
        return value if hmac.compare_digest(digest, self._digest(key, value)) else None

    async def put(self, key: str, value: bytes, *, ttl_s: int) -> None:
        if len(value) > self._value_bytes_max or not self._may_try():
            return
        name, kept = self._key_prefix + key, self._digest(key, value) + value
        try:
            async with asyncio.timeout(2 * self._timeout_s), self._slots:
                await self._redis.set(name, kept, ex=ttl_s)
        except ResponseError as error:
            log.info("cache.put_refused", cause=str(error))
        except Exception as error:  # noqa: BLE001 - as above
            self._note_absent(error)
        else:
            self._note_present()

    async def drop(self, key: str) -> None:
        if not self._may_try():
            return
        name = self._key_prefix + key
        try:
            async with asyncio.timeout(2 * self._timeout_s), self._slots:
                await self._redis.delete(name)
        except ResponseError as error:
            log.info("cache.drop_refused", cause=str(error))
        except Exception as error:  # noqa: BLE001 - as above
            self._note_absent(error)
        else:
            self._note_present()

    async def close(self) -> None:
        await self._redis.aclose()

    def _digest(self, key: str, value: bytes) -> bytes:
        digest = hashlib.blake2b(digest_size=DIGEST_LEN, key=self._secret)
        name = key.encode()
        digest.update(len(name).to_bytes(4, "big") + name)
        digest.update(value)
        return digest.digest()

    def _may_try(self) -> bool:
        """Tell whether to ask Redis now; while it is absent, only once in each interval."""
        now_s = self._clock.monotonic_s()
        if now_s < self._try_at_s:
            return False
        if self._failures:
            self._try_at_s = now_s + self._backoff.after(self._failures)
        return True

    def _note_absent(self, error: Exception) -> None:
        if self._failures == 0:
            log.warning("cache.lost", cause=repr(error)[:CAUSE_CHARS_MAX])
        self._failures += 1
        self._try_at_s = self._clock.monotonic_s() + self._backoff.after(self._failures)

    def _note_present(self) -> None:
        if self._failures:
            log.info("cache.found", failures=self._failures)
        self._failures = 0
        self._try_at_s = float("-inf")
