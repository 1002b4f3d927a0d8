"""Which ledgers a back-fill offloads (pure).

Owns the choice. Does not own what an offload is (``tierlog.offload.attempting``), which looks
again at each ledger: what is planned here may be done by others meanwhile.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext
from tierlog.model.stream import ListedLedger, Stream, StreamLifecycle
from tierlog.offload.attempting import MAY_BEGIN

COMPLETED: Final = "completed"
ALREADY: Final = "already_complete"
PAUSED: Final = "paused"
STALE: Final = "stale"
REFUSED: Final = "refused"
FAILED: Final = "failed"
OUTCOMES: Final = (COMPLETED, ALREADY, PAUSED, STALE, REFUSED, FAILED)


class OffloadItem(NamedTuple):
    """A ledger that is to be offloaded."""

    stream: StreamName
    incarnation: UUID
    ledger_id: LedgerId
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a ledger: one of ``OUTCOMES``, and why, where it is not in tier 2."""

    item: OffloadItem
    outcome: str
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""


def sealed(
    stream: Stream, ledgers: Iterable[ListedLedger], *, closed_before_ms: int | None = None
) -> Iterator[OffloadItem]:
    """Iterate over a stream's ledgers of which there may be a copy to make.

    None of a stream that is paused or being deleted.
    """
    if stream.offload_pause is not None or stream.lifecycle is not StreamLifecycle.ACTIVE:
        return
    for one in ledgers:
        old = closed_before_ms is None or one.closed_ms < closed_before_ms
        if one.closed and one.entry_count > 0 and old:
            yield OffloadItem(stream.name, stream.incarnation, one.ledger_id, one.length)


Context = OffloadContext | CorruptError | None
"""Why it can't be read, where that is so."""


def is_wanting(context: Context) -> bool:
    """Tell whether a ledger has no complete copy; what can't be read is told by its attempt."""
    if isinstance(context, CorruptError):
        return True
    return context is not None and context.state in MAY_BEGIN


def wanting(
    items: Iterable[OffloadItem], contexts: Mapping[LedgerId, Context]
) -> list[OffloadItem]:
    """Return those that have no complete copy."""
    return [item for item in items if is_wanting(contexts.get(item.ledger_id))]


def best(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return one outcome of each ledger: of a task that ran twice, what it came to."""
    found: dict[LedgerId, Outcome] = {}
    for one in outcomes:
        before = found.get(one.item.ledger_id)
        if before is None or OUTCOMES.index(one.outcome) < OUTCOMES.index(before.outcome):
            found[one.item.ledger_id] = one
    return sorted(found.values(), key=lambda one: (one.item.stream, one.item.ledger_id))
