"""The log of an export where it lies: which files count, and checkpoints so that it stays short.

Owns reading records, and the order in which a checkpoint takes their place. Does not own their
bytes and names (``log``), nor when a run looks (``job``).

Invariant: whenever the log is listed, what was listed is there for as long as the next
``RECORDS_A_CHECKPOINT`` records take to come.
"""

from collections.abc import Sequence
from typing import Final

from tierlog_spark.jobs.export.log import (
    CommittedFile,
    Record,
    checkpoint_name,
    checkpoint_numbers,
    decode_checkpoint,
    decode_record,
    encode_checkpoint,
    live_numbers,
    record_name,
    record_numbers,
)
from tierlog_spark.jobs.export.targets import Target

RECORDS_A_CHECKPOINT: Final = 200


def read_records(target: Target, numbers: Sequence[int]) -> list[Record]:
    """Return records of a stream's log by their numbers."""
    names = [record_name(number) for number in numbers]
    found = []
    for number, name, raw in zip(numbers, names, target.get(names), strict=True):
        place = f"{target.place}/{name}"
        found.append(decode_record(raw or b"", number=number, place=place))
    return found


def files_that_count(
    target: Target, names: Sequence[str], *, since: int = 0, through: int | None = None
) -> list[CommittedFile]:
    """Return the files of commits behind ``since``, up to ``through``, in their order."""
    checkpoint, numbers = live_numbers(names, target.place)
    found: list[CommittedFile] = []
    if since < checkpoint:
        name = checkpoint_name(checkpoint)
        raw = target.get([name])[0]
        files = decode_checkpoint(raw or b"", number=checkpoint, place=f"{target.place}/{name}")
        found += [one for one in files if one.commit > since]
    wanted = [one for one in numbers if one > since and (through is None or one <= through)]
    return found + [
        CommittedFile(record.number, file)
        for record in read_records(target, wanted)
        for file in record.files
    ]


def shorten(
    target: Target,
    names: Sequence[str],
    *,
    cleaned_below: int,
    records_max: int = RECORDS_A_CHECKPOINT,
) -> None:
    """Let a checkpoint stand for old records, if they are many; delete what it makes needless.

    Records from ``cleaned_below`` on stay: files for their numbers are still looked at.
    """
    before = checkpoint_numbers(names)
    newest, through = max(before, default=0), cleaned_below - 1
    if through - newest < records_max:
        return
    body = encode_checkpoint(through, files_that_count(target, names, through=through))
    if not target.put_new(checkpoint_name(through), body):
        # Somebody else's lies there: it is not ours to delete what it stands for.
        return
    gone = [record_name(one) for one in record_numbers(names) if one <= newest]
    target.delete([*gone, *(checkpoint_name(one) for one in before if one < newest)])
