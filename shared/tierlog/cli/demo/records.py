"""Real records for the demo: the changelogs installed with Debian, else this project's history.

    package (version) distributions; urgency=low

      * what changed

     -- maintainer <mail>  Mon, 01 Jan 2024 00:00:00 +0000

Owns finding, parsing and replaying them. People's names and addresses are left out.

Invariant: ``replayed`` yields the same records, time after time, with event times that only the
number of the replay tells apart.
"""

import gzip
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import orjson

from tierlog.format.entry import StructuredEvent
from tierlog.model.errors import RefusedError

DOC: Final = Path("/usr/share/doc")
PATTERN: Final = "*/changelog.Debian.gz"
DAY_MS: Final = 86_400_000
FILE_BYTES_MAX: Final = 16 * 1024 * 1024

_HEAD: Final = re.compile(r"([a-z0-9][a-z0-9+.-]*) \(([^)\s]+)\) ([^;]*);")
_TAIL: Final = re.compile(r" -- .*>  (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One version of one package."""

    package: str
    version: str
    time_ms: int
    text: str

    def event(self, *, replay: int, shift_ms: int) -> StructuredEvent:
        """Return the record as an event of the ``replay``-th time."""
        document = {"package": self.package, "version": self.version, "text": self.text}
        if replay:
            document["replay"] = str(replay)
        return StructuredEvent(
            payload=orjson.dumps(document),
            key=self.package.encode(),
            event_time_ms=self.time_ms + replay * shift_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the records come from, and all of them in the order of their times."""

    name: str
    records: Sequence[Record]


def load(doc: Path = DOC, repository: Path | None = None) -> Source:
    """Return the machine's changelogs, or the repository's history where it has none."""
    paths = sorted(doc.glob(PATTERN))
    found: dict[tuple[str, str], Record] = {}
    for path in paths:
        for record in parse(_text(path)):
            found.setdefault((record.package, record.version), record)
    if found:
        name = f"{len({one.package for one in found.values()})} packages' changelogs in {doc}"
        return Source(name=name, records=_sorted(found.values()))
    history = _history(repository or Path(__file__).resolve().parent)
    if not history:
        raise RefusedError(
            f"no records: {doc} has no {PATTERN}, and there is no git history here",
            remedy="Run the demo in a clone of the repository, with git installed",
        )
    return Source(name="this repository's git history", records=_sorted(history))


def _sorted(records: Iterable[Record]) -> Sequence[Record]:
    return sorted(records, key=lambda one: (one.time_ms, one.package, one.version))


def parse(text: str) -> Iterator[Record]:
    """Iterate over a changelog's entries; what is not one is passed over."""
    head: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        begun = _HEAD.match(line)
        if begun is not None:
            head, lines = begun, []
            continue
        ended = _TAIL.match(line)
        if ended is None:
            lines.append(line.strip())
            continue
        time_ms = _time_ms(ended[1])
        if head is not None and time_ms is not None:
            body = "\n".join(line for line in lines if line)
            yield Record(package=head[1], version=head[2], time_ms=time_ms, text=body)
        head = None


def replayed(source: Source, bytes_min: int) -> Iterator[StructuredEvent]:
    """Iterate over events until their payloads are at least ``bytes_min``."""
    records = source.records
    shift_ms = records[-1].time_ms - records[0].time_ms + DAY_MS
    size, replay = 0, 0
    while True:
        for record in records:
            event = record.event(replay=replay, shift_ms=shift_ms)
            size += len(event.payload)
            yield event
            if size >= bytes_min:
                return
        replay += 1


def _text(path: Path) -> str:
    try:
        with gzip.open(path) as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""


def _time_ms(text: str) -> int | None:
    try:
        found: datetime = parsedate_to_datetime(text.strip())
        return int(found.timestamp() * 1000)
    except (TypeError, ValueError, OverflowError):
        return None


def _history(folder: Path) -> list[Record]:
    """Return the commits of the repository that holds ``folder``."""
    mark, field = "\x1e", "\x1f"
    command = ["git", "-C", str(folder), "log", "--stat", f"--format={mark}%h{field}%ct{field}%B"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    records = []
    for commit in done.stdout.decode("utf-8", "replace").split(mark)[1:]:
        version, seconds, text = commit.split(field, 2)
        records.append(
            Record(
                package="tierlog", version=version, time_ms=int(seconds) * 1000, text=text.strip()
            )
        )
    return records
