"""What is made of files that change while a process runs: certificates, keys, tokens.

Invariants:
    * A change is found at the next look, by what the file system says of the files; no look reads
      again what was read and is as it was.
    * Files that can't be read, or make no sense, leave what was made of them before; the first
      ones must.
"""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from tierlog.model.errors import RefusedError
from tierlog.runtime.redaction import learn_secrets

log = structlog.get_logger()

T = TypeVar("T")
_Stamp = tuple[tuple[int, int, int], ...]


class Reloading(Generic[T]):
    """A value that ``make`` makes of ``files``."""

    def __init__(self, files: Sequence[Path], make: Callable[[], T], *, what: str) -> None:
        self._files = tuple(files)
        self._make = make
        self._what = what
        self._stamp = self._look()
        self._failed: _Stamp | None = None
        self._value = self._first()
        self.generation = 1
        """Grows whenever the value is another one."""

    def __repr__(self) -> str:
        return f"<Reloading {self._what}, {self.generation}>"

    def get(self) -> T:
        """Return the value of the files as they are now."""
        stamp = self._look()
        if stamp is not None and stamp != self._stamp:
            try:
                self._value = self._make()
            except (OSError, ValueError, RefusedError) as error:
                self._note(error, stamp)
            else:
                self._stamp = stamp
                self.generation += 1
                log.info("file.reloaded", what=self._what)
        return self._value

    def _note(self, error: Exception, stamp: _Stamp) -> None:
        if stamp != self._failed:
            # Half written, say. What it says may be secret; of which kind it is, is not.
            log.warning("file.reload_failed", what=self._what, cause=type(error).__name__)
            self._failed = stamp
        # Where it was not the files' fault (too many are open, say), the next look reads again.
        if not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
            self._stamp = stamp

    def _first(self) -> T:
        try:
            return self._make()
        except (OSError, ValueError) as error:
            where = ", ".join(map(str, self._files))
            why = error.strerror if isinstance(error, OSError) else type(error).__name__
            raise RefusedError(
                f"{self._what} can't be read from {where}: {why}",
                remedy="Check that the files are there, readable, and of that kind",
            ) from None

    def _look(self) -> _Stamp | None:
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return None
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


def secret_of(file: Path) -> str:
    """Return the secret that a file holds, without the white space around it; no log has it."""
    text = file.read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError("an empty file holds no secret")
    learn_secrets([text])
    return text
