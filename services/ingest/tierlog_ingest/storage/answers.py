"""What a storage node answers when it does not do what it was asked, and futures that say so."""

import asyncio

from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId


def failed(error: BaseException) -> "asyncio.Future[None]":
    """Return a future that failed already."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.set_exception(error)
    answer.exception()  # whoever asked may be gone
    return answer


def done() -> "asyncio.Future[None]":
    """Return a future that succeeded already."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.set_result(None)
    return answer


def copy_outcome(source: "asyncio.Future[None]", target: "asyncio.Future[None]") -> None:
    """Let ``target`` end as ``source`` did."""
    if target.done():
        return
    error = source.exception()
    if error is None:
        target.set_result(None)
    else:
        target.set_exception(error)
        target.exception()


def read_only() -> RetryableError:
    """Say that the disk is full."""
    return RetryableError(
        "the node's disk is nearly full",
        reason=Reason.READ_ONLY,
        remedy="Free some space; the node comes back by itself",
    )


def no_such_ledger(ledger_id: LedgerId) -> RefusedError:
    """Say that the ledger was freed."""
    return RefusedError(
        f"ledger {ledger_id} was deleted",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="Read the stream's metadata again",
        details={"ledger_id": str(ledger_id)},
    )


def fenced(ledger_id: LedgerId) -> RefusedError:
    """Say that ordinary adds are over."""
    return RefusedError(
        f"ledger {ledger_id} is fenced",
        reason=Reason.FENCED,
        remedy="Another owner has taken over; read the stream's metadata again",
        details={"ledger_id": str(ledger_id)},
    )


def queue_full(waiting_bytes: int, *, budget: str) -> RetryableError:
    """Say that too much waits for the disk."""
    return RetryableError(
        f"{waiting_bytes} bytes already wait for the node's disk",
        reason=Reason.RESOURCE_EXHAUSTED,
        remedy="Send less at once",
        details={"budget": budget},
    )


def not_yet(ledger_id: LedgerId, entry_id: EntryId, last_add_confirmed: EntryId) -> RetryableError:
    """Say that an entry is behind the LAC."""
    return RetryableError(
        f"entry {entry_id} of ledger {ledger_id} is not confirmed yet",
        reason=Reason.NOT_YET,
        remedy="Ask again, with some time to wait",
        details={"last_add_confirmed": str(last_add_confirmed)},
    )


def unknown_entry(ledger_id: LedgerId, entry_id: EntryId) -> RetryableError:
    """Say that damage may have taken the entry."""
    return RetryableError(
        f"the node can't tell whether it ever had entry {entry_id} of ledger {ledger_id}",
        reason=Reason.UNKNOWN,
        remedy="Ask another node; the log of this one says what was damaged",
    )


def no_such_entry(ledger_id: LedgerId, entry_id: EntryId) -> RefusedError:
    """Say that the entry isn't there."""
    return RefusedError(
        f"the node does not have entry {entry_id} of ledger {ledger_id}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="Ask another node of the entry's write set",
        details={"ledger_id": str(ledger_id), "entry_id": str(entry_id)},
    )


def unreadable(ledger_id: LedgerId, cause: Exception) -> RetryableError:
    """Say that a ledger's file can't be read."""
    return RetryableError(
        f"the node can't read ledger {ledger_id} ({cause})",
        reason=Reason.UNKNOWN,
        remedy="Read another copy; look into the node's log",
    )
