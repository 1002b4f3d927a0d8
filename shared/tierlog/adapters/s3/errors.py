"""What the S3 library raises, as one of Tierlog's four kinds, with the store's request id.

Invariants:
    * What is not known to be for good is ``RetryableError``; a missing bucket is never taken for a
      missing object.
    * That something is not there is known only where the store says what: a 404 without its name is
      also what a balancer answers that has no store behind it.
    * A request is sent again exactly when its error is ``RetryableError``, but for a 404 to HEAD:
      no store says more.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiohttp import ClientError as HttpError
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

NO_SUCH_KEY: Final = "NoSuchKey"
MISSING_OBJECT: Final = frozenset({NO_SUCH_KEY, "NotFound"})
BARE_404: Final = "404"
MISSING_BUCKET: Final = "NoSuchBucket"
NO_SUCH_UPLOAD: Final = "NoSuchUpload"
PRECONDITION_FAILED: Final = frozenset({"PreconditionFailed", "412"})
BEYOND_END: Final = frozenset({"InvalidRange", "416"})
# Keys that were good, and that someone replaces. An answer to HEAD has no body that could name its
# code: its bare 400 may be this.
_OVER: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "400"})
# Refused for good with these keys, unless there are others by now.
_NOT_THESE: Final = frozenset({"InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})
_BARE_403: Final = "403"
_HEADS: Final = frozenset({"head_object", "head_bucket"})
# 4xx that a later try may pass; conditional writes that met each other are among them, and what
# proxies answer by themselves.
_SEND_AGAIN: Final = _OVER | {
    BARE_404,
    "408",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeTooSkewed",
}
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
        _NOT_THESE,
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


class CutBodyError(RetryableError):
    """A body ended before its length, or nobody says how long it is; or an answer says nothing."""


def sends_again(error: Exception, operation: str) -> bool:
    """Tell whether the same request may succeed later."""
    if operation in _HEADS and isinstance(error, ClientError) and code_of(error) == BARE_404:
        return False
    return isinstance(map_error(error, what="", key="", bucket=""), RetryableError)


def keys_are_over(error: Exception) -> bool:
    """Tell whether the store does not know the keys, or not any more."""
    return isinstance(error, ClientError) and code_of(error) in _OVER | _NOT_THESE | {_BARE_403}


def retry_after_s(error: Exception) -> float | None:
    """Return how long the store asks to be left alone; None: it doesn't say."""
    if not isinstance(error, ClientError):
        return None
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    text = str(headers.get("retry-after", ""))
    return float(text) if text.isdigit() else None


def code_of(error: ClientError) -> str:
    """Return the store's own name of an error; the status alone where a page came instead."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return str(error.response.get("Error", {}).get("Code") or status)


def retries_of(answer: Mapping[str, Any]) -> int:
    """Return how often a request was sent again before this answer came."""
    return int(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def request_of(answer: Mapping[str, Any]) -> str:
    """Return the id that the store gave a request; "" when it gave none."""
    return str(answer.get("ResponseMetadata", {}).get("RequestId", ""))


def of_request(answer: Mapping[str, Any]) -> str:
    """Return how an error's text names the request, as whoever runs the store asks for it."""
    request_id = request_of(answer)
    return f" (request {request_id})" if request_id else ""


def map_error(error: Exception, *, what: str, key: str, bucket: str) -> TierlogError:
    """Return ``error`` as one of the four kinds; ``what`` is in the present tense."""
    details = {"bucket": bucket, "object": key}
    if isinstance(error, TierlogError):
        return error
    if isinstance(error, ClientError):
        metadata = error.response.get("ResponseMetadata", {})
        details["code"] = code_of(error)
        details["request_id"] = request_of(error.response)
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
    assert isinstance(error, BotoCoreError | HttpError | OSError | TimeoutError), error
    cause = str(error) or type(error).__name__
    return RetryableError(f"{what} {bucket}/{key}: {cause}", remedy=_CHECK_STORE, details=details)


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
