"""How errors travel: the same reasons as problem+json over HTTP and ErrorInfo over gRPC.

Invariants: what crosses is a reason, a message, a remedy and details; never a stack trace. What
arrives is raised as the kind that its reason belongs to; what can't be read is UNKNOWN.
"""

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from pydantic import BaseModel

from tierlog.model.errors import (
    SURFACES,
    IndeterminateError,
    Reason,
    RetryableError,
    TierlogError,
    from_reason,
)

DOMAIN: Final = "tierlog"
PROBLEM_TYPE: Final = "application/problem+json"
REMEDY: Final = "remedy"


class Problem(BaseModel):
    """RFC 9457, with Tierlog's reason, remedy and details beside it."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    remedy: str = ""
    details: dict[str, str] = {}
    retry_after_s: float | None = None


def problem_of(error: TierlogError) -> Problem:
    """Return what HTTP says of ``error``."""
    return Problem(
        type=f"urn:tierlog:{error.reason.value.lower().replace('_', '-')}",
        title=error.reason.value.replace("_", " ").capitalize(),
        status=SURFACES[error.reason].http_status,
        detail=error.message,
        reason=error.reason.value,
        remedy=error.remedy,
        details=error.details,
        retry_after_s=error.retry_after_s,
    )


def error_of_problem(body: bytes, *, status: int, source: str) -> TierlogError:
    """Return the error that an HTTP answer tells of; UNKNOWN when it is not one of ours."""
    try:
        problem = Problem.model_validate_json(body)
        reason = Reason(problem.reason)
    except ValueError:
        return RetryableError(
            f"{source} answered with status {status} and no reason",
            reason=Reason.UNKNOWN,
            remedy="Check that the address is that of a Tierlog service",
        )
    return from_reason(
        reason,
        problem.detail,
        remedy=problem.remedy,
        details=problem.details,
        retry_after_s=problem.retry_after_s,
    )


def grpc_status_of(error: TierlogError) -> Any:  # noqa: ANN401 - grpc's Status has no public type
    """Return what gRPC says of ``error``, for ``context.abort_with_status``."""
    info = any_pb2.Any()
    metadata = {**error.details, REMEDY: error.remedy}
    info.Pack(
        error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata)
    )
    details = [info]
    if error.retry_after_s is not None:
        retry = any_pb2.Any()
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        details.append(retry)
    code = getattr(grpc.StatusCode, SURFACES[error.reason].grpc_status)
    return rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=error.message, details=details)
    )


def error_of_grpc(error: grpc.aio.AioRpcError, *, source: str, changes: bool) -> TierlogError:
    """Return the error that a failed call tells of.

    ``changes``: the call changes something, so that a lost answer leaves its outcome unknown.
    """
    told = _told(error)
    if told is not None:
        return told
    message = f"{source} did not answer: {error.code().name}, {error.details()}"
    remedy = "Check that the service runs and that its address is right"
    if changes and error.code() is not grpc.StatusCode.UNIMPLEMENTED:
        return IndeterminateError(message, remedy=remedy)
    return RetryableError(message, remedy=remedy)


def _told(error: grpc.aio.AioRpcError) -> TierlogError | None:
    """Return the error that the service told of; None when it told of none that is known here."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else []:
        _ = detail.Unpack(info) or detail.Unpack(retry)
    if info.domain != DOMAIN or info.reason not in set(Reason):
        return None
    metadata: Mapping[str, str] = dict(info.metadata)
    return from_reason(
        Reason(info.reason),
        error.details() or info.reason,
        remedy=metadata.get(REMEDY, ""),
        details={key: value for key, value in metadata.items() if key != REMEDY},
        retry_after_s=(
            retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else None
        ),
    )
