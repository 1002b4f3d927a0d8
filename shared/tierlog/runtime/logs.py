"""Structured logs on standard error: events are nouns.past, context is bound beside them.

Invariant: secrets of the process are in no line, of the libraries neither.
"""

import logging
import sys
from collections.abc import Iterable

import structlog

from tierlog.runtime.redaction import learn_secrets, process_redactor
from tierlog.runtime.sections import LogSettings

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logging(settings: LogSettings, *, service: str, secrets: Iterable[str] = ()) -> None:
    """Set up structlog, and the standard library's logging behind it, for this process."""
    learn_secrets(secrets)
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
        process_redactor(),  # the last one: what is formatted by now is looked through too
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
