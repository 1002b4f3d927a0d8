"""The metadata port over ZooKeeper, by way of kazoo.

Owns the bridge from kazoo's threads to the event loop, the meaning of its errors, and what a
session is to its users. kazoo owns the connection and finds its way back by itself.

Threads: kazoo's never touch anything here but ``loop.call_soon_threadsafe``; the loop never
waits for kazoo's, except through futures. What blocks in kazoo (start, stop) runs in a thread.

Invariants:
    * A change is answered, refused for certain, not sent (``RetryableError``), or in doubt
      (``IndeterminateError``). kazoo sends in the order of the calls, and drops what it has not
      sent when the session ends: a read of this client that is answered comes after every
      earlier change that can still happen.
    * A watch's event is set at the latest when the connection is lost, since what happens
      meanwhile is not told afterwards.
    * ``session_lost`` and the ephemeral nodes belong together: ``create_ephemeral`` answers only
      if the session is still the one that was present when it was called.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import structlog
from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient, KazooState
from kazoo.hosts import collect_hosts
from kazoo.security import CREATOR_ALL_ACL

from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.ports.metadata import (
    REQUEST_BYTES_MAX,
    Check,
    Create,
    Delete,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Operation,
    Put,
    VersionConflictError,
    Versioned,
)
from tierlog.runtime.security import secret_text
from tierlog.runtime.settings import ZooKeeperSettings

log = structlog.get_logger()

READ_ATTEMPTS_MAX = 3
RECONNECT_DELAY_S_MAX = 2.0
STOP_S_MAX = 15.0
NOTE_INTERVAL_S = 30.0

# The connection went before the answer came, or was not there.
_LOST = (
    kazoo_errors.ConnectionLoss,
    kazoo_errors.SessionExpiredError,  # ConnectionClosedError is one of them
    kazoo_errors.OperationTimeoutError,
    kazoo_errors.RequestTimeoutError,
    kazoo_errors.SessionMovedError,
    TimeoutError,
)
# In a failed transaction kazoo returns these for the operations that were not at fault.
_BYSTANDERS = (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)

_Start = Callable[[], Any]
"""Calls one of kazoo's ``…_async`` methods and returns its result object."""


How = Mapping[str, Any]
"""What kazoo is told of TLS, of who this is, and of who may see what it makes."""

OPEN: Final[How] = {}


def connection_of(settings: ZooKeeperSettings) -> How:
    """Return how the ensemble is connected to. The server's name is verified, always.

    Who shows who it is makes nodes for that identity alone: by default they are everybody's.
    """
    tls, how = settings.tls, dict[str, Any]()
    if tls.enabled:
        files = {"ca": tls.ca_file, "certfile": tls.certificate_file, "keyfile": tls.key_file}
        how |= {"use_ssl": True, "verify_certs": True, "check_hostname": True}
        how |= {name: str(file) for name, file in files.items() if file is not None}
    password = secret_text(settings.password, settings.password_file, name="zookeeper.password")
    if bool(settings.username) != bool(password):
        raise RefusedError(
            "zookeeper.username and zookeeper.password go together",
            remedy="Set TIERLOG_ZOOKEEPER__USERNAME and …__PASSWORD_FILE, or neither",
        )
    if settings.username:
        how["auth_data"] = [("digest", f"{settings.username}:{password}")]
    if settings.username or tls.certificate_file is not None:
        how["default_acl"] = CREATOR_ALL_ACL
    return how


class _Seldom(logging.Filter):
    """Lets through what kazoo says with each attempt to connect, but not each time."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created - self._said_s.get(record.msg, 0.0) < NOTE_INTERVAL_S:
            return False
        self._said_s[record.msg] = record.created
        return True


_client_log = logging.getLogger("tierlog.zookeeper")
_client_log.addFilter(_Seldom())


class _Watch:
    """One pending watch of a path. kazoo keeps it in a set, so that asking again adds nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, forget: Callable[[], None]) -> None:
        self.event = asyncio.Event()
        self._loop = loop
        self._forget = forget

    def __call__(self, _event: object) -> None:
        _from_thread(self._loop, self.fire)

    def fire(self) -> None:
        self._forget()
        self.event.set()


class ZooKeeperMetadata:
    """One client of a ZooKeeper ensemble. Made by ``connect``."""

    def __init__(self, client: KazooClient, hosts: str, *, operation_s_max: float) -> None:
        self._client = client
        self._hosts = hosts
        self._operation_s_max = operation_s_max
        self._loop = asyncio.get_running_loop()
        self._connected = asyncio.Event()
        self._session_lost = asyncio.Event()
        self._watches: dict[tuple[str, bool], _Watch] = {}
        self._closed = False
        client.add_listener(self._on_state)

    def __repr__(self) -> str:
        return (
            f"ZooKeeperMetadata({self._hosts!r}, connected={self._connected.is_set()}, "
            f"watches={len(self._watches)}, closed={self._closed})"
        )

    @classmethod
    async def connect(
        cls,
        hosts: str,
        *,
        session_timeout_s: float = 6.0,
        connect_timeout_s: float = 10.0,
        how: How = OPEN,
    ) -> Self:
        """Connect to ``host:port,…[/chroot]``, or raise ``RetryableError`` UNAVAILABLE in time.

        ``RefusedError`` for what names no hosts.
        """
        try:
            collect_hosts(hosts)
        except ValueError as error:
            raise RefusedError(
                f"zookeeper.hosts {hosts[:200]!r} can't be read: {error}",
                remedy="Set zookeeper.hosts (TIERLOG_ZOOKEEPER__HOSTS) to HOST:PORT, several with "
                "commas, with a root behind them if need be: zk-1:2181,zk-2:2181/tierlog",
            ) from error
        client = KazooClient(
            hosts=hosts,
            timeout=session_timeout_s,
            connection_retry={
                "max_tries": -1,
                "delay": 0.1,
                "backoff": 2,
                "max_delay": RECONNECT_DELAY_S_MAX,
            },
            logger=_client_log,
            **how,
        )
        store = cls(client, hosts, operation_s_max=max(session_timeout_s, 1.0))
        try:
            await asyncio.to_thread(client.start_async)
            async with asyncio.timeout(connect_timeout_s):
                await store._connected.wait()
                if client.chroot:
                    await store._submit(lambda: client.ensure_path_async("/"))
        except (kazoo_errors.NoAuthError, kazoo_errors.AuthFailedError) as error:
            await store.close()
            raise _denied("connecting", client.chroot or "/") from error
        except (TimeoutError, kazoo_errors.KazooException) as error:
            store._abandon()
            raise store._unavailable(f"after {connect_timeout_s:g} s") from error
        except BaseException:
            store._abandon()
            raise
        return store

    @property
    def session_lost(self) -> asyncio.Event:
        return self._session_lost

    async def sync(self, path: str) -> None:
        await self._read("sync", path, lambda: self._client.sync_async(path))

    async def get(self, path: str) -> Versioned | None:
        return await self._get(path, None)

    async def watch(self, path: str) -> tuple[Versioned | None, asyncio.Event]:
        while True:
            watch = self._watch(path, children=False)
            found = await self._get(path, watch)
            if found is not None:
                return found, watch.event
            # A missing node is not watched by reading it.
            stat = await self._read("watch", path, partial(self._client.exists_async, path, watch))
            if stat is None:
                return None, watch.event

    async def children(self, path: str) -> list[str] | None:
        return await self._children(path, None)

    async def sequence_position(self, path: str) -> int | None:
        stat = await self._read("position", path, lambda: self._client.exists_async(path))
        if stat is None:
            return None
        # A sequence number is the count of creations. What a stat tells is twice that count,
        # less the nodes that are there now, in 32 bits.
        return ((int(stat.cversion) + int(stat.numChildren)) & 0xFFFF_FFFF) // 2

    async def watch_children(self, path: str) -> tuple[list[str] | None, asyncio.Event]:
        while True:
            watch = self._watch(path, children=True)
            names = await self._children(path, watch)
            if names is not None:
                return names, watch.event
            made = self._watch(path, children=False)
            stat = await self._read("watch", path, partial(self._client.exists_async, path, made))
            if stat is None:
                return None, made.event

    async def create(self, path: str, data: bytes) -> None:
        _check_size(len(data))
        await self._change(
            "create", path, lambda: self._client.create_async(path, data, makepath=True)
        )

    async def create_ephemeral(self, path: str, data: bytes, *, sequential: bool = False) -> str:
        _check_size(len(data))
        lost = self._session_lost
        made = await self._change(
            "create",
            path,
            lambda: self._client.create_async(
                path, data, ephemeral=True, sequence=sequential, makepath=True
            ),
        )
        if self._session_lost is not lost:
            # It lives in a session whose end nobody would be told of: take it back.
            await self._change("delete", made, lambda: self._client.delete_async(made))
            raise RetryableError(
                f"the session ended while metadata node {path} was made", remedy="Try again"
            )
        return str(made)

    async def set(self, path: str, data: bytes, *, version: int) -> int:
        _check_size(len(data))
        stat = await self._change(
            "set", path, lambda: self._client.set_async(path, data, version=version)
        )
        return int(stat.version)

    async def delete(self, path: str, *, version: int) -> None:
        await self._change("delete", path, lambda: self._client.delete_async(path, version=version))

    async def transact(self, operations: Sequence[Operation]) -> None:
        if not operations:
            return
        _check_size(sum(len(o.data) for o in operations if isinstance(o, Create | Put)))
        transaction = self._client.transaction()
        for operation in operations:
            match operation:
                case Check(path, version):
                    transaction.check(path, version)
                case Create(path, data):
                    transaction.create(path, data)
                case Put(path, data, version):
                    transaction.set_data(path, data, version)
                case Delete(path, version):
                    transaction.delete(path, version)
        results = await self._change("transact", operations[0].path, transaction.commit_async)
        for operation, result in zip(operations, results, strict=False):
            if isinstance(result, Exception) and not isinstance(result, _BYSTANDERS):
                raise _refusal(result, "transact", operation.path) from result
        if any(isinstance(result, Exception) for result in results):
            raise IndeterminateError(
                f"a transaction on {operations[0].path} failed without a cause: {results}",
                remedy="Read back whether it was done",
            )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await asyncio.to_thread(_stop, self._client)
        except TimeoutError:
            log.warning("metadata.close_given_up", hosts=self._hosts, after_s=STOP_S_MAX)
        self._client.remove_listener(self._on_state)
        self._connected.clear()
        self._fire_all()
        self._session_lost.set()

    def _abandon(self) -> None:
        """End without waiting: an attempt to connect may hang."""
        self._closed = True
        threading.Thread(target=_stop, args=[self._client], daemon=True).start()

    # State, told by kazoo's connection thread.

    def _on_state(self, state: str) -> None:
        _from_thread(self._loop, lambda: self._take_state(state))

    def _take_state(self, state: str) -> None:
        if self._closed:
            return
        if state == KazooState.CONNECTED:
            self._connected.set()
            return
        self._connected.clear()
        self._fire_all()
        if state == KazooState.LOST:
            log.warning("metadata.session_lost", hosts=self._hosts)
            lost, self._session_lost = self._session_lost, asyncio.Event()
            lost.set()
        else:
            log.warning("metadata.connection_lost", hosts=self._hosts)

    def _fire_all(self) -> None:
        for watch in list(self._watches.values()):
            watch.fire()

    def _watch(self, path: str, *, children: bool) -> _Watch:
        key = (path, children)
        if key not in self._watches:
            self._watches[key] = _Watch(self._loop, lambda: self._forget(key))
        return self._watches[key]

    def _forget(self, key: tuple[str, bool]) -> None:
        self._watches.pop(key, None)

    # Calls.

    async def _get(self, path: str, watch: _Watch | None) -> Versioned | None:
        try:
            data, stat = await self._read("get", path, lambda: self._client.get_async(path, watch))
        except NoNodeError:
            return None
        return Versioned(data, stat.version)

    async def _children(self, path: str, watch: _Watch | None) -> list[str] | None:
        try:
            return sorted(
                await self._read("list", path, lambda: self._client.get_children_async(path, watch))
            )
        except NoNodeError:
            return None

    async def _read(self, verb: str, path: str, start: _Start) -> Any:  # noqa: ANN401 - kazoo's
        """Read, over a new connection when one is lost, a bounded number of times."""
        for _ in range(READ_ATTEMPTS_MAX):
            await self._wait_connected()
            try:
                async with asyncio.timeout(self._operation_s_max):
                    return await self._submit(start)
            except _LOST as error:
                log.info("metadata.read_lost", verb=verb, path=path, cause=repr(error))
            except kazoo_errors.KazooException as error:
                raise _refusal(error, verb, path, changes=False) from error
        raise self._unavailable(f"for {verb} of {path}, tried {READ_ATTEMPTS_MAX} times")

    async def _change(self, verb: str, path: str, start: _Start) -> Any:  # noqa: ANN401 - kazoo's
        await self._wait_connected()
        try:
            async with asyncio.timeout(self._operation_s_max):
                return await self._submit(start)
        except _LOST as error:
            raise IndeterminateError(
                f"the connection to ZooKeeper was lost before it answered {verb} of {path}",
                remedy="Read back whether it was done",
            ) from error
        except kazoo_errors.KazooException as error:
            raise _refusal(error, verb, path) from error

    async def _wait_connected(self) -> None:
        if self._closed:
            raise RetryableError("the connection to ZooKeeper is closed", remedy="Connect again")
        if not self._connected.is_set():
            try:
                async with asyncio.timeout(self._operation_s_max):
                    await self._connected.wait()
            except TimeoutError:
                raise self._unavailable(f"for {self._operation_s_max:g} s") from None

    def _submit(self, start: _Start) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any) -> None:  # noqa: ANN401 - kazoo's
            if not future.done():
                if result.exception is not None:
                    future.set_exception(result.exception)
                else:
                    future.set_result(result.value)

        start().rawlink(lambda result: _from_thread(self._loop, lambda: settle(result)))
        return future

    def _unavailable(self, since: str) -> RetryableError:
        return RetryableError(
            f"ZooKeeper at {self._hosts} is unreachable {since}",
            remedy="Check that it runs there (tierlog up starts one) and has a majority; or set "
            "TIERLOG_ZOOKEEPER__HOSTS",
        )


def _from_thread(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback)


def _stop(client: KazooClient) -> None:
    """End the session; blocks, for as long as a connection attempt that is under way."""
    try:
        client.stop()
    except (kazoo_errors.KazooException, OSError, AttributeError) as error:
        log.warning("metadata.stop_failed", cause=repr(error))  # the server ends the session
    with contextlib.suppress(Exception):  # kazoo's own: "cannot close until it is stopped"
        client.close()


def _check_size(size: int) -> None:
    if size > REQUEST_BYTES_MAX:
        raise RefusedError(
            f"a change of {size} bytes is above the metadata store's {REQUEST_BYTES_MAX}",
            reason=Reason.TOO_LARGE,
            remedy="Split it",
        )


def _refusal(error: Exception, verb: str, path: str, *, changes: bool = True) -> TierlogError:
    """Say what kazoo's ``error`` means; one that we don't know leaves a change in doubt."""
    known = _REFUSALS.get(type(error))
    if known is not None:
        return known(verb, path)
    message = f"ZooKeeper answered {verb} of {path} with {error!r}"
    if changes:
        return IndeterminateError(message, remedy="Read back whether it was done")
    return RetryableError(message, remedy="Try again later")


def _denied(verb: str, path: str) -> TierlogError:
    return RefusedError(
        f"ZooKeeper does not allow {verb} of {path}",
        reason=Reason.PERMISSION_DENIED,
        remedy="Check the access list of the node and the credentials",
    )


_REFUSALS: Mapping[type[Exception], Callable[[str, str], TierlogError]] = {
    kazoo_errors.NoNodeError: lambda verb, path: NoNodeError(
        f"there is no metadata node for {verb} of {path}"
    ),
    kazoo_errors.NodeExistsError: lambda _, path: NodeExistsError(
        f"metadata node {path} exists already"
    ),
    kazoo_errors.BadVersionError: lambda verb, path: VersionConflictError(
        f"metadata node {path} has another version than {verb} was made for",
        remedy="Read it again and decide anew",
    ),
    kazoo_errors.NotEmptyError: lambda _, path: NotEmptyError(
        f"metadata node {path} has nodes below it"
    ),
    kazoo_errors.NoChildrenForEphemeralsError: lambda _, path: RefusedError(
        f"the parent of metadata node {path} is ephemeral and can have none below it",
        remedy="Use another path",
    ),
    kazoo_errors.NoAuthError: _denied,
    kazoo_errors.AuthFailedError: _denied,
}
