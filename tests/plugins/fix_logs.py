"""Logs are after each test as they were before it, whatever it configured."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import structlog
from structlog._config import BoundLoggerLazyProxy

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Commands set up logs for their process; here others come after them.

    A logger that was used meanwhile keeps what was configured, and with it an output that is closed
    by now, until it is told to ask again.
    """
    yield
    if not structlog.is_configured():
        return
    structlog.reset_defaults()
    for module in list(sys.modules.values()):
        log = vars(module).get("log")
        if isinstance(log, BoundLoggerLazyProxy):
            vars(log).pop("bind", None)
