"""What answers of the store say, as values. Owns no request, nor what an answer must say."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from tierlog.adapters.s3.errors import of_request, request_of
from tierlog.model.errors import RefusedError
from tierlog.ports.objects import ObjectInfo

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-.*/(\d+)", re.ASCII)


def total(answer: Mapping[str, Any], key: str, start: int) -> int:
    """Return the object's whole size from an answer to a ranged GET, which is of what was asked."""
    shown = str(answer.get("ContentRange", ""))
    match = _CONTENT_RANGE.fullmatch(shown)
    if match is None or int(match[1]) != start:
        raise RefusedError(
            f"the object store answered bytes {start} on of {key} without saying which they are, "
            f"or with others: {shown[:60]!r}{of_request(answer)}",
            remedy="Check what stands between Tierlog and the object store",
            details={"object": key, "request_id": request_of(answer)},
        )
    return int(match[2])


def object_of(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    """Return what an answer that has an object's stamp says of it."""
    return ObjectInfo(
        key=key,
        size=size,
        etag=str(answer.get("ETag", "")),
        metadata=lower_keys(answer.get("Metadata", {})),
        modified_ms=int(answer["LastModified"].timestamp() * 1000),
    )


def date_ms(answer: Mapping[str, Any]) -> int:
    """Return when the store answered, by its own clock; 0 when it didn't say."""
    text = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return int(parsedate_to_datetime(text).timestamp() * 1000) if text else 0


def lower_keys(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return an object's metadata as they are compared: stores change the case of names."""
    return {key.lower(): value for key, value in metadata.items()}
