"""What happened in a run, in order: for people to read, and as a digest that a replay repeats.

Invariants:
    * The digest covers every line, those of single calls too, whether or not they are kept.
    * Nothing in a line depends on the machine: no addresses, no real time.
"""

import hashlib
import re
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

import structlog

CURRENT: ContextVar[str] = ContextVar("process", default="world")
"""The simulated process whose code runs now; tasks and callbacks inherit it."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Trace:
    """Lines ``time process what details``. Single calls are kept only when asked for."""

    def __init__(self, *, keep_calls: bool = False, echo: bool = False) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        """Log events of level error and above: each needs a person, so a run must have none."""
        self.keep_calls = keep_calls
        self.echo = echo
        self.now_s = lambda: 0.0
        self._digest = hashlib.sha256()
        self._count = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"<Trace {self._count} lines, {self.digest[:12]}>"

    @property
    def digest(self) -> str:
        """SHA-256 over all lines so far."""
        return self._digest.hexdigest()

    def end(self) -> None:
        """Take no more lines: what is left is torn down with the loop, in no order of its own."""
        self._ended = True

    def note(self, what: str, /, *, process: str | None = None, **details: object) -> None:
        """Add a line that is kept."""
        self._keep(what, process, details)

    def _keep(self, what: str, process: str | None, details: dict[str, Any]) -> None:
        line = self._line(what, process, details)
        if self._ended:
            return
        self.lines.append(line)
        if self.echo:
            print(line, file=sys.stderr)

    def detail(self, text: str) -> None:
        """Add text that only people read; the digest knows nothing of it."""
        self.lines += text.splitlines()
        if self.echo:
            print(text, file=sys.stderr)

    def call(self, name: str, outcome: str) -> None:
        """Add the line of one call of a port."""
        if self.keep_calls:
            self.note(name, outcome=outcome)
        else:
            self._line(name, None, {"outcome": outcome})

    def log_event(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        """Take a structlog event as a line; the last of structlog's processors."""
        what = str(event.pop("event"))
        error = event.pop("exc_info", None)
        if error is True:
            error = sys.exc_info()[1]
        if isinstance(error, BaseException):
            event["error"] = repr(error)
        self._keep(what, None, {"level": method, **event})
        if method in {"error", "exception", "critical"} and not self._ended:
            self.errors.append(self.lines[-1])
        raise structlog.DropEvent

    def _line(self, what: str, process: str | None, details: dict[str, Any]) -> str:
        who = process if process is not None else CURRENT.get()
        said = " ".join(f"{key}={value}" for key, value in details.items())
        line = _ADDRESS.sub("", f"{self.now_s():11.3f} {who:<8} {what} {said}").rstrip()
        if self._ended:
            return line
        self._digest.update(line.encode() + b"\n")
        self._count += 1
        return line
