"""gRPC for every service: the server with limits, health, reflection, errors; channels to it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.runtime.errors import grpc_status_of

log = structlog.get_logger()

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    # A node that comes back is not to wait for its callers.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers with the reason of a ``TierlogError``; anything else is a bug and is logged."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's own handler type
        """Wrap unary handlers; Tierlog has no others."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner = handler.unary_unary

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: ANN401
            try:
                return await inner(request, context)
            except TierlogError as error:
                await context.abort_with_status(grpc_status_of(error))
            except grpc.aio.AbortError:
                raise
            except Exception:
                log.exception("rpc.failed", method=handler_call_details.method)
                bug = IndeterminateError(
                    "the service failed while it worked on this call",
                    remedy="Look into the service's log",
                )
                await context.abort_with_status(grpc_status_of(bug))

        return grpc.unary_unary_rpc_method_handler(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


@contextlib.asynccontextmanager
async def serve_grpc(
    register: Callable[[grpc.aio.Server], None],
    *,
    services: Sequence[str] = (),
    host: str,
    port: int,
    drain_s_max: float = 5.0,
) -> AsyncIterator[int]:
    """Serve what ``register`` adds, with health and reflection; give the port; drain at the end.

    ``services`` are the full names of what is added, for those who ask the server what it has.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_OPTIONS)
    register(server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        bound_port = server.add_insecure_port(f"{host}:{port}")
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


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to ``host:port``; it connects at its first call."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
