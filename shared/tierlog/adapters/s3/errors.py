"""What the S3 library raises, as one of Tierlog's four kinds, with the store's request id.

Invariant: what is not known to be for good is ``RetryableError``; a missing bucket is never
taken for a missing object.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)

from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.ports.objects import NoSuchUploadError, ObjectExistsError

MISSING_OBJECT: Final = frozenset({"NoSuchKey", "404", "NotFound"})
MISSING_BUCKET: Final = "NoSuchBucket"
NO_SUCH_UPLOAD: Final = "NoSuchUpload"
PRECONDITION_FAILED: Final = frozenset({"PreconditionFailed", "412"})
BEYOND_END: Final = frozenset({"InvalidRange", "416"})
# Conditional writes that met each other: S3 says to send them again.
_SEND_AGAIN: Final = frozenset(
    {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "RequestTimeTooSkewed"}
)
_CHECK_SETTINGS: Final = "Check s3.endpoint_url, s3.bucket and the keys in the settings"
_CHECK_STORE: Final = "Check that the object store is reachable and healthy; it is tried again"

_Refusal = tuple[frozenset[str], type[TierlogError], Reason | None, str]
_REFUSALS: Final[Sequence[_Refusal]] = (
    (
        frozenset({MISSING_BUCKET}),
        RefusedError,
        None,
        "Create the bucket, or correct s3.bucket in the settings",
    ),
    (frozenset({NO_SUCH_UPLOAD}), NoSuchUploadError, None, "Begin a new attempt"),
    (PRECONDITION_FAILED, ObjectExistsError, None, "Read the object that is there"),
    (
        frozenset({"BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest"}),
        CorruptError,
        None,
        "Send it again; check memory and network",
    ),
    (
        frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}),
        RefusedError,
        Reason.UNAUTHENTICATED,
        _CHECK_SETTINGS,
    ),
    (
        frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem"}),
        RefusedError,
        Reason.PERMISSION_DENIED,
        _CHECK_SETTINGS,
    ),
)


def code_of(error: ClientError) -> str:
    """Return the store's own name of an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def retries_of(answer: Mapping[str, Any]) -> int:
    """Return how often a request was sent again before this answer came."""
    return int(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def map_error(error: Exception, *, what: str, key: str, bucket: str) -> TierlogError:
    """Return ``error`` as one of the four kinds; ``what`` is in the present tense."""
    details = {"bucket": bucket, "object": key}
    if isinstance(error, ClientError):
        metadata = error.response.get("ResponseMetadata", {})
        details["code"] = code_of(error)
        details["request_id"] = str(metadata.get("RequestId", ""))
        details["attempts"] = str(1 + retries_of(error.response))
        status = int(metadata.get("HTTPStatusCode", 0))
        return _of_answer(error, status, f"{what} {bucket}/{key}", details)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return RefusedError(
            f"{what} {bucket}/{key}: there are no credentials for the object store",
            reason=Reason.UNAUTHENTICATED,
            remedy="Set s3.access_key and s3.secret_key, or the SDK's own variables",
            details=details,
        )
    if isinstance(error, ParamValidationError):
        return RefusedError(f"{what} {bucket}/{key}: {error}", details=details)
    assert isinstance(error, BotoCoreError | OSError | TimeoutError), error
    return RetryableError(f"{what} {bucket}/{key}: {error}", remedy=_CHECK_STORE, details=details)


def _of_answer(
    error: ClientError, status: int, what: str, details: Mapping[str, str]
) -> TierlogError:
    code, message = details["code"], error.response["Error"].get("Message") or str(error)
    text = f"{what}: {message} ({code}, request {details['request_id']})"
    for codes, kind, reason, remedy in _REFUSALS:
        if code in codes:
            return kind(text, reason=reason, remedy=remedy, details=details)
    if not 400 <= status < 500 or status == 429 or code in _SEND_AGAIN:
        return RetryableError(text, remedy=_CHECK_STORE, details=details)
    reason = Reason.PERMISSION_DENIED if status == 403 else None
    return RefusedError(text, reason=reason, remedy=_CHECK_SETTINGS, details=details)
