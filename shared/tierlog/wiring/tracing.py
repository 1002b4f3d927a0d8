"""The tracer of a process: none, unless the settings want one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from pydantic import SecretStr

from tierlog.model.errors import RefusedError
from tierlog.ports.tracing import NO_TRACER, Tracer
from tierlog.runtime.settings import Settings


@contextlib.asynccontextmanager
async def open_tracer(
    settings: Settings, service: str, *, instance: str = ""
) -> AsyncIterator[Tracer]:
    """Give a tracer for the length of the context; at its end what waits is sent, within bounds.

    Raises ``RefusedError`` where traces are wanted and their library is not there.
    """
    own = settings.tracing
    if not own.enabled:
        yield NO_TRACER
        return
    try:
        from tierlog.adapters.otel import OtelTracer, otlp_processor

        processor = otlp_processor(
            own.endpoint_url,
            headers=_headers(own.headers),
            queued_max=own.queued_spans_max,
            timeout_s=own.export_timeout_s,
        )
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"tracing.enabled needs a library that is not there: {error.name}",
            remedy="Install it: pip install 'tierlog[tracing]', or set tracing.enabled=false",
        ) from error
    tracer = OtelTracer(
        processor,
        service=service,
        instance=instance,
        version=version("tierlog"),
        ledgers_share=own.ledgers_share,
        append_every=own.append_every,
    )
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def _headers(given: SecretStr | None) -> dict[str, str]:
    text = given.get_secret_value() if given is not None else ""
    pairs = [one.partition("=") for one in text.split(",") if one.strip()]
    if any(not name.strip() or not between for name, between, _ in pairs):
        raise RefusedError(
            "tracing.headers is not NAME=VALUE,NAME=VALUE",
            remedy="Correct TIERLOG_TRACING__HEADERS",
        )
    return {name.strip(): value.strip() for name, _, value in pairs}
