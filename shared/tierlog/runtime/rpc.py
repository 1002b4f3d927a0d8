"""gRPC for every service: the server with limits, health, reflection, errors; channels to it."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Self, cast
from uuid import UUID

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.ports.ids import Ids
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.clusters import KnownCluster, OwnCluster, named_in
from tierlog.runtime.errors import grpc_status_of
from tierlog.runtime.requests import RequestIds, bind_metadata
from tierlog.runtime.tls import ServerTls

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

OWN_METHODS: Final = "/tierlog."

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
SEND_S_MAX: Final = 30.0
SEND_BYTES: Final = 256 * 1024
"""A client has ``send_s_max`` for each so many bytes of a message."""
_OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    # A node that comes back is not to wait for its callers.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_RECEIVED: Final = "grpc.max_receive_message_length"
_CLIENT_OPTIONS: Final = (*_OPTIONS, (_RECEIVED, MESSAGE_BYTES_MAX))
_SERVER_OPTIONS: Final = (
    *_OPTIONS,
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    # Only as they are: what is small on its way would be large here.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers with the reason of a ``TierlogError``; anything else is a bug and is logged.

    Of answers that go on, a client that takes nothing is left.
    """

    def __init__(self, request_ids: RequestIds, *, send_s_max: float = SEND_S_MAX) -> None:
        self._request_ids = request_ids
        self._send_s_max = send_s_max

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's own handler type
        """Wrap handlers that answer once, and those that answer on and on."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        for kind, made in _ONE_ANSWER.items():
            if (inner := getattr(handler, kind)) is not None:
                guarded = _guarded(inner, method, self._request_ids)
                return _like(handler, made, guarded)
        for kind, made in _MANY_ANSWERS.items():
            if (inner := getattr(handler, kind)) is not None and method.startswith(OWN_METHODS):
                sending = _guarded_stream(inner, method, self._request_ids, self._send_s_max)
                return _like(handler, made, sending)
        return handler


class ClusterInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that are meant for another cluster, and says of answers whose they are.

    Stands behind what asks who calls: who is not known is told nothing. ``public``: nobody asks.
    """

    def __init__(self, cluster_id: UUID, *, public: bool) -> None:
        self._cluster = OwnCluster(cluster_id)
        self._public = public

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's own handler type
        """Wrap our own handlers, and that of health where there are no strangers."""
        handler = await continuation(handler_call_details)
        own = handler_call_details.method.startswith(OWN_METHODS)
        if handler is None or not (own or self._public):
            return handler
        for kind, made in _ONE_ANSWER.items():
            if (inner := getattr(handler, kind)) is not None:
                return _like(handler, made, self._once(inner))
        for kind, made in _MANY_ANSWERS.items():
            if (inner := getattr(handler, kind)) is not None and own:
                return _like(handler, made, self._on_and_on(inner))
        return handler

    def _once(self, inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def told(request: Any, context: Context) -> Any:  # noqa: ANN401
            await self._tell(context)
            return await inner(request, context)

        return told

    def _on_and_on(
        self, inner: Callable[..., AsyncGenerator[Any, None]]
    ) -> Callable[..., AsyncGenerator[Any, None]]:
        async def told(request: Any, context: Context) -> AsyncGenerator[Any, None]:  # noqa: ANN401
            await self._tell(context)
            async with contextlib.aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer
                    del answer  # the next one may be long in coming

        return told

    async def _tell(self, context: Context) -> None:
        await context.send_initial_metadata(self._cluster.metadata)
        self._cluster.admit(named_in(context.invocation_metadata()))


_ONE_ANSWER: Final[Mapping[str, Callable[..., Any]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
}
_MANY_ANSWERS: Final[Mapping[str, Callable[..., Any]]] = {
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def _like(
    handler: Any,  # noqa: ANN401 - grpc's own handler type, below too
    made: Callable[..., Any],
    behaviour: Callable[..., Any],
) -> Any:  # noqa: ANN401
    return made(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _guarded(
    inner: Callable[..., Awaitable[Any]], method: str, request_ids: RequestIds
) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:  # noqa: ANN401
        bind_metadata(request_ids, context.invocation_metadata() or ())
        try:
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - it is told, and logged where it is a bug
            await _abort(context, error, method)

    return guarded


def _guarded_stream(
    inner: Callable[..., AsyncGenerator[Any, None]],
    method: str,
    request_ids: RequestIds,
    send_s_max: float,
) -> Callable[..., Awaitable[None]]:
    async def guarded(request: Any, context: Context) -> None:  # noqa: ANN401
        bind_metadata(request_ids, context.invocation_metadata() or ())
        try:
            async with contextlib.aclosing(inner(request, context)) as responses:
                async for response in responses:
                    await _send(response, context, send_s_max)
                    del response  # the next one may be long in coming
        except grpc.aio.BaseError:
            raise  # the call is over, or its client went away
        except Exception as error:  # noqa: BLE001 - as above
            await _abort(context, error, method)

    return guarded


async def _send(
    response: Any,  # noqa: ANN401 - a message of any kind
    context: Context,
    send_s_max: float,
) -> None:
    """Return once the transport has passed a message on, for which it waits for the client."""
    length = len(response) if isinstance(response, bytes) else response.ByteSize()
    patience_s = send_s_max * max(1, math.ceil(length / SEND_BYTES))
    try:
        async with asyncio.timeout(patience_s):
            await context.write(response)
    except TimeoutError:
        log.info("client.left", cause="it takes nothing", bytes=length)
        raise RetryableError(
            f"nothing of an answer was taken for {patience_s:g} s",
            reason=Reason.RESOURCE_EXHAUSTED,
            remedy="Ask again from where the last answer ended, and take what comes",
        ) from None


async def _abort(context: Context, error: Exception, method: str) -> None:
    """End a call with what ``error`` says; anything but our own errors is a bug."""
    if isinstance(error, TierlogError):
        await context.abort_with_status(grpc_status_of(error))
    log.error("rpc.failed", method=method, exc_info=error)
    bug = IndeterminateError(
        "the service failed while it worked on this call",
        remedy="Look into the service's log",
    )
    await context.abort_with_status(grpc_status_of(bug))


@contextlib.asynccontextmanager
async def serve_grpc(  # noqa: PLR0913 - one for each thing that a service has its own way
    register: Callable[[grpc.aio.Server], None],
    *,
    services: Sequence[str] = (),
    host: str,
    port: int,
    drain_s_max: float = 5.0,
    ids: Ids | None = None,
    tls: ServerTls | None = None,
    access: grpc.aio.ServerInterceptor | None = None,
    request_bytes_max: int = MESSAGE_BYTES_MAX,
    send_s_max: float = SEND_S_MAX,
    cluster_id: UUID | None = None,
) -> AsyncIterator[int]:
    """Serve what ``register`` adds, with health and reflection; give the port; drain at the end.

    ``services`` are the full names of what is added, for those who ask the server what it has.
    ``ids`` tell requests of this process from those of others; ``access`` is asked before every
    call. A larger request is refused; a client that takes nothing of an answer for so long is left,
    as is one with a call under way from which nothing at all comes: its machine is gone, perhaps.
    What is meant for another cluster than ``cluster_id`` is refused too.
    """
    errors = ErrorInterceptor(RequestIds(ids), send_s_max=send_s_max)
    interceptors = [errors, *([access] if access is not None else [])]
    if cluster_id is not None:
        interceptors.append(ClusterInterceptor(cluster_id, public=access is None))
    options = (*_SERVER_OPTIONS, *_alive_within(send_s_max), (_RECEIVED, request_bytes_max))
    server = grpc.aio.server(interceptors=interceptors, options=options)
    register(server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        if tls is None:
            bound_port = server.add_insecure_port(f"{host}:{port}")
        else:
            bound_port = server.add_secure_port(f"{host}:{port}", tls.grpc_credentials())
    except RuntimeError as error:
        raise RetryableError(
            f"can't listen on {host}:{port} for gRPC",
            remedy="Stop what uses the port, or choose another one in the settings",
        ) from error
    await server.start()
    for name in ("", *services):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound_port
    finally:
        await healthy.enter_graceful_shutdown()
        await server.stop(drain_s_max)


def _alive_within(patience_s: float) -> Sequence[tuple[str, int]]:
    """Return what asks silent clients for a sign of life: else calls of those that vanish go on."""
    patience_ms = math.ceil(patience_s * 1000)
    return (
        ("grpc.keepalive_time_ms", patience_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        # One that measures the way, when it is under way, stands for it.
        ("grpc.http2.ping_timeout_ms", patience_ms),
        ("grpc.http2.max_pings_without_data", 0),
    )


def open_channel(address: str, calling: Calling = PLAIN) -> grpc.aio.Channel:
    """Return a channel to ``host:port``; it connects at its first call."""
    channel = (
        grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
        if calling.tls is None
        else cast("grpc.aio.Channel", _RenewedChannel(address, calling))
    )
    if calling.cluster is None:
        return channel
    return cast("grpc.aio.Channel", _ClusterChannel(channel, address, calling.cluster))


class _ClusterChannel:
    """A channel to a node of one cluster: calls name it, and answers of others are none."""

    def __init__(self, channel: grpc.aio.Channel, address: str, cluster: KnownCluster) -> None:
        self._channel = channel
        self._address = address
        self._cluster = cluster

    def __repr__(self) -> str:
        return f"<_ClusterChannel {self._address}, {self._cluster!r}>"

    def unary_unary(self, method: str, **how: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return what calls ``method``, and looks whose answer it got."""
        named = self._named(self._channel.unary_unary(method, **how))

        async def call(*given: Any, **options: Any) -> Any:  # noqa: ANN401 - as gRPC's own
            answering = named(*given, **options)
            try:
                answer = await answering
            except grpc.aio.AioRpcError as error:
                self._check(error.initial_metadata())
                raise
            self._check(await answering.initial_metadata())
            return answer

        return call

    def unary_stream(self, method: str, **how: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return what calls ``method``; of answers that go on, the server's refusal is enough."""
        return self._named(self._channel.unary_stream(method, **how))

    def stream_stream(self, method: str, **how: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return the same for requests and answers that go on."""
        return self._named(self._channel.stream_stream(method, **how))

    def _named(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, metadata: Any = (), **options: Any) -> Any:  # noqa: ANN401
            named = (*metadata, *self._cluster.named().items())
            return inner(*given, metadata=named, **options)

        return call

    def _check(self, metadata: Any) -> None:  # noqa: ANN401 - gRPC's own type
        self._cluster.check(named_in(metadata), where=self._address)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel."""
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _ShownToken(grpc.AuthMetadataPlugin):
    """Adds the token to each call; asked in a thread of gRPC's."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        del context
        try:
            shown = f"Bearer {self._token()}"
        except Exception as error:  # noqa: BLE001 - it is the call's to tell
            callback((), error)
            return
        callback((("authorization", shown),), None)


class _RenewedChannel:
    """A channel over TLS that is made anew when its certificates were.

    gRPC's own holds those that it was made with. Calls under way end on the one that they began on.
    """

    def __init__(self, address: str, calling: Calling) -> None:
        self._address = address
        self._calling = calling
        self._channel, self._generation = self._open()
        self._former: grpc.aio.Channel | None = None

    def __repr__(self) -> str:
        return f"<_RenewedChannel {self._address}, {self._generation}>"

    def _open(self) -> tuple[grpc.aio.Channel, int]:
        assert self._calling.tls is not None
        credentials, generation = self._calling.tls.grpc_credentials()
        if self._calling.token is not None:
            shown = grpc.metadata_call_credentials(_ShownToken(self._calling.token))
            credentials = grpc.composite_channel_credentials(credentials, shown)
        return grpc.aio.secure_channel(
            self._address, credentials, options=_CLIENT_OPTIONS
        ), generation

    def _current(self) -> grpc.aio.Channel:
        assert self._calling.tls is not None
        if self._calling.tls.generation() != self._generation:
            self._former = self._channel
            self._channel, self._generation = self._open()
        return self._channel

    def unary_unary(self, method: str, **how: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return what calls ``method`` on the channel that is the present one then."""
        return self._later("unary_unary", method, how)

    def unary_stream(self, method: str, **how: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return the same for answers that go on."""
        return self._later("unary_stream", method, how)

    def stream_stream(self, method: str, **how: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return the same for requests and answers that go on."""
        return self._later("stream_stream", method, how)

    def _later(self, kind: str, method: str, how: Mapping[str, Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:  # noqa: ANN401 - as gRPC's own
            return getattr(self._current(), kind)(method, **how)(*given, **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Close the channels."""
        for channel in (self._former, self._channel):
            if channel is not None:
                await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
