"""Structured logs on standard error: events are nouns.past, context is bound beside them."""

import logging
import sys

import structlog

from tierlog.runtime.settings import LogSettings

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logging(settings: LogSettings, *, service: str) -> None:
    """Set up structlog, and the standard library's logging behind it, for this process."""
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    level = _LEVELS[settings.level]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer)
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
