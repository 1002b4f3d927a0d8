"""Every error Tierlog raises, in four kinds, with reasons from one closed list.

Owns the reasons and what each means to a caller: its kind, its gRPC and HTTP status and the exit
code of the command line. Does not own how they travel: ``tierlog.runtime.errors`` does that.

Invariants:
    * A reason belongs to exactly one kind.
    * Catch by class (the kind), tell apart by ``reason``, never by text.
    * ``Indeterminate`` is neither success nor failure: whoever catches it reads back.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class Reason(StrEnum):
    """The closed list of protocols.md section 6: what a client can be told."""

    STREAM_NOT_FOUND = "STREAM_NOT_FOUND"
    LEDGER_NOT_FOUND = "LEDGER_NOT_FOUND"
    NO_SUCH_ENTRY = "NO_SUCH_ENTRY"
    NOT_YET = "NOT_YET"
    UNKNOWN = "UNKNOWN"
    NOT_OWNER = "NOT_OWNER"
    FENCED = "FENCED"
    CONDITIONAL_APPEND_FAILED = "CONDITIONAL_APPEND_FAILED"
    APPEND_INDETERMINATE = "APPEND_INDETERMINATE"
    READ_ONLY = "READ_ONLY"
    TOO_LARGE = "TOO_LARGE"
    TRIMMED = "TRIMMED"
    PARTITIONED = "PARTITIONED"
    CORRUPT = "CORRUPT"
    UNAVAILABLE = "UNAVAILABLE"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    POLICY_INVALID = "POLICY_INVALID"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"


class Surface(NamedTuple):
    """How a reason shows itself outside."""

    grpc_status: str
    http_status: int
    exit_code: int


SURFACES: Final[Mapping[Reason, Surface]] = {
    Reason.STREAM_NOT_FOUND: Surface("NOT_FOUND", 404, 3),
    Reason.LEDGER_NOT_FOUND: Surface("NOT_FOUND", 404, 3),
    Reason.NO_SUCH_ENTRY: Surface("NOT_FOUND", 404, 3),
    Reason.NOT_YET: Surface("OUT_OF_RANGE", 409, 5),
    Reason.UNKNOWN: Surface("UNAVAILABLE", 503, 5),
    Reason.NOT_OWNER: Surface("FAILED_PRECONDITION", 421, 5),
    Reason.FENCED: Surface("ABORTED", 409, 4),
    Reason.CONDITIONAL_APPEND_FAILED: Surface("ABORTED", 409, 4),
    Reason.APPEND_INDETERMINATE: Surface("UNKNOWN", 500, 5),
    Reason.READ_ONLY: Surface("UNAVAILABLE", 503, 5),
    Reason.TOO_LARGE: Surface("INVALID_ARGUMENT", 413, 2),
    Reason.TRIMMED: Surface("OUT_OF_RANGE", 410, 3),
    Reason.PARTITIONED: Surface("FAILED_PRECONDITION", 409, 2),
    Reason.CORRUPT: Surface("DATA_LOSS", 500, 6),
    Reason.UNAVAILABLE: Surface("UNAVAILABLE", 503, 5),
    Reason.RESOURCE_EXHAUSTED: Surface("RESOURCE_EXHAUSTED", 429, 5),
    Reason.POLICY_INVALID: Surface("INVALID_ARGUMENT", 422, 2),
    Reason.INVALID_ARGUMENT: Surface("INVALID_ARGUMENT", 400, 2),
    Reason.UNAUTHENTICATED: Surface("UNAUTHENTICATED", 401, 1),
    Reason.PERMISSION_DENIED: Surface("PERMISSION_DENIED", 403, 1),
}


REASON_NOTE: Final = "tierlog reason: "
REMEDY_NOTE: Final = "tierlog remedy: "


class TierlogError(Exception):
    """Base of all four kinds. ``str()`` is the message with its remedy.

    Where only its traceback travels, as out of a Spark executor, notes at its end say the reason
    and the remedy.
    """

    default_reason: Reason = Reason.INVALID_ARGUMENT

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        remedy: str = "",
        details: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason is not None else self.default_reason
        self.remedy = remedy
        self.details = dict(details or {})
        self.retry_after_s = retry_after_s
        assert self.reason in KINDS[_kind_of(type(self))], f"{self.reason} is of another kind"
        self.add_note(f"{REASON_NOTE}{self.reason}")
        if remedy:
            self.add_note(f"{REMEDY_NOTE}{remedy}")

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


class CorruptError(TierlogError):
    """Bytes are not what their writer wrote. Details name the object and the byte offset."""

    default_reason = Reason.CORRUPT


class RetryableError(TierlogError):
    """Nothing happened, and the same call may succeed later."""

    default_reason = Reason.UNAVAILABLE


class IndeterminateError(TierlogError):
    """It may or may not have happened; read back to find out."""

    default_reason = Reason.APPEND_INDETERMINATE


class RefusedError(TierlogError):
    """Nothing happened, and the same call will be refused again."""

    default_reason = Reason.INVALID_ARGUMENT


KINDS: Final[Mapping[type[TierlogError], frozenset[Reason]]] = {
    CorruptError: frozenset({Reason.CORRUPT}),
    RetryableError: frozenset(
        {
            Reason.NOT_YET,
            Reason.UNKNOWN,
            Reason.NOT_OWNER,
            Reason.READ_ONLY,
            Reason.UNAVAILABLE,
            Reason.RESOURCE_EXHAUSTED,
        }
    ),
    IndeterminateError: frozenset({Reason.APPEND_INDETERMINATE}),
    RefusedError: frozenset(
        {
            Reason.STREAM_NOT_FOUND,
            Reason.LEDGER_NOT_FOUND,
            Reason.NO_SUCH_ENTRY,
            Reason.FENCED,
            Reason.CONDITIONAL_APPEND_FAILED,
            Reason.TOO_LARGE,
            Reason.TRIMMED,
            Reason.PARTITIONED,
            Reason.POLICY_INVALID,
            Reason.INVALID_ARGUMENT,
            Reason.UNAUTHENTICATED,
            Reason.PERMISSION_DENIED,
        }
    ),
}

_KIND_OF_REASON: Final = {reason: kind for kind, reasons in KINDS.items() for reason in reasons}
assert set(_KIND_OF_REASON) == set(Reason) == set(SURFACES)
assert sum(len(reasons) for reasons in KINDS.values()) == len(Reason)


def _kind_of(cls: type[TierlogError]) -> type[TierlogError]:
    return next(kind for kind in KINDS if issubclass(cls, kind))


def from_reason(
    reason: Reason,
    message: str,
    *,
    remedy: str = "",
    details: Mapping[str, str] | None = None,
    retry_after_s: float | None = None,
) -> TierlogError:
    """Build the error of the kind that ``reason`` belongs to (as when one arrives by network)."""
    return _KIND_OF_REASON[reason](
        message, reason=reason, remedy=remedy, details=details, retry_after_s=retry_after_s
    )


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of a group, or the error itself: what went wrong before all else."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
