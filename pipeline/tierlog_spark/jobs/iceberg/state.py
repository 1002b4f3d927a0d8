"""What a table says of the export that it is of, and which files it lacks (pure).

    tierlog.export          of the table: the place of the export, the stream's
    tierlog.export-number   of the table and of each snapshot that adds files: the newest commit
    tierlog.export-file     likewise: a file of that commit, by which it is known again

Owns these properties, and the cutting of files into commits of the table. Does not own the log
(``tierlog_spark.jobs.export``), nor PyIceberg (``tables``).

Invariants:
    * The files of a commit of the export come into the table together, and before those of the
      next one: one number says what is there.
    * What the newest snapshot says counts, so that a table that was rolled back gets again what it
      lost. The table's own property is for those whose snapshots expired.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tierlog.model.errors import RefusedError
from tierlog_spark.jobs.export.committed import Committed

EXPORT: Final = "tierlog.export"
NUMBER: Final = "tierlog.export-number"
FILE: Final = "tierlog.export-file"
# Engines that expire snapshots or remove orphans leave such a table's files alone.
GC: Final = "gc.enabled"
NEW_TABLE: Final = "Name a table that does not exist yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a table has: all up to a commit. ``file`` is one of that commit's; 0 has none."""

    number: int = 0
    file: str = ""

    def properties(self) -> dict[str, str]:
        """Return it as a table and its snapshots keep it."""
        return {NUMBER: str(self.number), FILE: self.file}


def properties_of(place: str) -> dict[str, str]:
    """Return the properties of a new table."""
    return {EXPORT: place, GC: "false", **Known().properties()}


def known_of(snapshots: Iterable[Mapping[str, str]], properties: Mapping[str, str]) -> Known | None:
    """Return what a table says of itself; ``snapshots`` are properties, the newest first."""
    for found in (*snapshots, properties):
        number = found.get(NUMBER, "")
        if number.isascii() and number.isdecimal():
            return Known(number=int(number), file=found.get(FILE, ""))
    return None


def check_place(place: str) -> None:
    """Refuse a place whose files no URI names: Iceberg knows files by theirs."""
    if "#" in place or "?" in place:
        raise RefusedError(
            f"{place} has a # or a ? in it, which Iceberg's names of files can't have",
            remedy="Export to another place",
        )


def check_owner(table: str, properties: Mapping[str, str], place: str) -> None:
    """Refuse a table that is not this export's, or that would delete its files."""
    of = properties.get(EXPORT)
    if of != place:
        what = "was not made for an export" if of is None else f"is of the export at {of}"
        raise RefusedError(f"table {table} {what}, and this is {place}", remedy=NEW_TABLE)
    if properties.get(GC) != "false":
        raise RefusedError(
            f"table {table} may delete the export's files: its property {GC} is not false",
            remedy=f"Set {GC}=false, see that no file is gone (tierlog spark exported --verify), "
            "and run it again",
        )


def lacking(
    table: str, known: Known, files: Sequence[Committed], place: str
) -> Sequence[Committed]:
    """Return the files that a table lacks. ``files`` has those of ``known``'s commit too."""
    wanted = f"{place}/{known.file}"
    if known.number and not any(one.commit == known.number and one.path == wanted for one in files):
        raise RefusedError(
            f"table {table} has the export up to commit {known.number} with {known.file}, and the "
            f"log at {place} has no such file in such a commit: another export lies there now",
            remedy=NEW_TABLE,
        )
    return [one for one in files if one.commit > known.number]


def together(files: Sequence[Committed], *, files_max: int) -> Sequence[Committed]:
    """Return what goes into the table next: whole commits, about so many files."""
    last = files[min(files_max, len(files)) - 1].commit
    return [one for one in files if one.commit <= last]
