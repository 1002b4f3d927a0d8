"""One bucket of S3, or of what speaks its protocol.

Owns one client of a process, its limits and retries, and how answers map to the port. Does not
own which objects there are: ``tierlog.offload`` does.

Retries: the library's own "standard" mode, with capped back-off and jitter and a budget over all
requests; what it does not cover (a body that is cut while it is read) is retried here, as often.

Invariants:
    * What is sent carries a CRC32C that the store checks; payloads are not hashed for signing.
    * ``get_range`` gives exactly what was asked for, or what is left before the object's end.
    * A completed upload that is completed again, its first answer lost, is a success.
    * "There is no such object" is said only of a bucket that is there.
"""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar

import aioboto3
import stamina
from aiobotocore.config import AioConfig
from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError

from tierlog.adapters.s3.body import BuffersBody
from tierlog.adapters.s3.errors import (
    BEYOND_END,
    MISSING_BUCKET,
    MISSING_OBJECT,
    NO_SUCH_UPLOAD,
    PRECONDITION_FAILED,
    code_of,
    map_error,
    retries_of,
)
from tierlog.format import checksum
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.ports.files import Buffer
from tierlog.ports.objects import NoSuchUploadError, ObjectInfo, OpenUpload, Part
from tierlog.runtime.settings import S3Settings

READ_CHUNK_BYTES: Final = 256 * 1024
BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 5.0

Answer = TypeVar("Answer")


def client_config(settings: S3Settings) -> AioConfig:
    """Return how requests are signed, summed, timed out and sent again."""
    return AioConfig(
        signature_version="s3v4",
        s3={
            "payload_signing_enabled": False,
            "addressing_style": "path" if settings.endpoint_url else "auto",
        },
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=settings.connections_max,
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": settings.attempts_max},
    )


@contextlib.asynccontextmanager
async def open_s3(settings: S3Settings) -> AsyncIterator["S3ObjectStore"]:
    """Open the bucket of ``settings`` for the length of the context."""
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=(
            settings.secret_key.get_secret_value() if settings.secret_key else None
        ),
        region_name=settings.region,
    )
    async with session.client(
        "s3", endpoint_url=settings.endpoint_url, config=client_config(settings)
    ) as client:
        yield S3ObjectStore(
            client,
            bucket=settings.bucket,
            region=settings.region,
            attempts_max=settings.attempts_max,
        )


class S3ObjectStore:
    """The port ``ObjectStore`` over a client of aioboto3."""

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - the library has no types
        *,
        bucket: str,
        region: str,
        attempts_max: int,
    ) -> None:
        self._client = client
        self._region = region
        self._attempts_max = attempts_max
        self.bucket = bucket

    def __repr__(self) -> str:
        return f"S3ObjectStore(bucket={self.bucket!r})"

    async def ensure_bucket(self) -> None:
        """Make the bucket unless it is there."""
        try:
            await self._client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT | {MISSING_BUCKET}:
                raise self._mapped(error, "look for the bucket", "") from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "look for the bucket", "") from error
        else:
            return
        where = {"LocationConstraint": self._region}
        more = {} if self._region == "us-east-1" else {"CreateBucketConfiguration": where}
        try:
            await self._client.create_bucket(Bucket=self.bucket, **more)
        except ClientError as error:
            if code_of(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise self._mapped(error, "create the bucket", "") from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "create the bucket", "") from error

    async def put(
        self,
        key: str,
        body: bytes,
        *,
        metadata: Mapping[str, str],
        content_type: str = "application/octet-stream",
        if_none_match: bool = False,
    ) -> ObjectInfo:
        condition = {"IfNoneMatch": "*"} if if_none_match else {}
        try:
            answer = await self._client.put_object(
                Bucket=self.bucket,
                Key=key,
                Body=BuffersBody([body]),
                Metadata=dict(metadata),
                ContentType=content_type,
                ChecksumCRC32C=checksum.to_base64(checksum.crc32c(body)),
                **condition,
            )
        except ClientError as error:
            repeated = code_of(error) in PRECONDITION_FAILED and retries_of(error.response) > 0
            if repeated and (own := await self._own_put(key, body, metadata)) is not None:
                return own
            raise self._mapped(error, "put", key) from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "put", key) from error
        return ObjectInfo(
            key=key,
            size=len(body),
            etag=str(answer.get("ETag", "")),
            metadata=_lower(metadata),
            modified_ms=_date_ms(answer),
        )

    async def _own_put(
        self, key: str, body: bytes, metadata: Mapping[str, str]
    ) -> ObjectInfo | None:
        """Return the object if it is what was just put: its first answer was lost."""
        found = await self.get(key)
        if found is None:
            return None
        info, stored = found
        return info if stored == body and info.metadata == _lower(metadata) else None

    async def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = await self._client.head_object(Bucket=self.bucket, Key=key)
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT:
                raise self._mapped(error, "head", key) from error
            # An answer to HEAD has no body that could say which of the two is missing.
            await self._check_bucket()
            return None
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "head", key) from error
        return _info(key, int(answer["ContentLength"]), answer)

    async def _check_bucket(self) -> None:
        try:
            await self._client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if code_of(error) in MISSING_OBJECT:
                raise RefusedError(
                    f"there is no bucket {self.bucket}",
                    remedy="Create the bucket, or correct s3.bucket in the settings",
                    details={"bucket": self.bucket},
                ) from error
            raise self._mapped(error, "head", "") from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "head", "") from error

    async def get(self, key: str) -> tuple[ObjectInfo, bytes] | None:
        async def once() -> tuple[ObjectInfo, bytes] | None:
            answer = await self._get(key)
            if answer is None:
                return None
            body = await self._body(key, answer, length=int(answer["ContentLength"]))
            return _info(key, len(body), answer), body

        return await self._again(once)

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        assert start >= 0, start
        assert length > 0, length

        async def once() -> bytes | None:
            try:
                answer = await self._get(key, Range=f"bytes={start}-{start + length - 1}")
            except _BeyondEndError:
                return b""
            if answer is None:
                return None
            expected = min(length, _total(answer, key) - start)
            return await self._body(key, answer, length=expected)

        return await self._again(once)

    async def _get(self, key: str, **more: str) -> Any:  # noqa: ANN401 - the library has no types
        try:
            return await self._client.get_object(Bucket=self.bucket, Key=key, **more)
        except ClientError as error:
            if code_of(error) in MISSING_OBJECT:
                return None
            if code_of(error) in BEYOND_END:
                raise _BeyondEndError from error
            raise self._mapped(error, "get", key) from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "get", key) from error

    async def _body(self, key: str, answer: Any, *, length: int) -> bytes:  # noqa: ANN401
        """Read a body to its end; ``RetryableError`` unless it has exactly ``length`` bytes."""
        stream = answer["Body"]
        cause: Exception | None = None
        taken: list[bytes] = []
        try:
            async with stream:
                while chunk := await stream.read(READ_CHUNK_BYTES):
                    taken.append(chunk)
        except (BotoCoreError, HttpError, OSError, TimeoutError) as error:
            cause = error
        body = taken[0] if len(taken) == 1 else b"".join(taken)
        if cause is None and len(body) == length:
            return body
        raise _CutBodyError(
            f"get {self.bucket}/{key}: {len(body)} bytes arrived of {length}",
            remedy="Check that the object store is reachable and healthy; it is tried again",
            details={
                "bucket": self.bucket,
                "object": key,
                "request_id": str(answer["ResponseMetadata"].get("RequestId", "")),
            },
        ) from cause

    async def _again(self, once: Callable[[], Awaitable[Answer]]) -> Answer:
        """Send a read again whose body was cut; other errors were retried by the library."""
        async for attempt in stamina.retry_context(
            on=_CutBodyError,
            attempts=self._attempts_max,
            timeout=None,
            wait_initial=BACKOFF_S_FIRST,
            wait_max=BACKOFF_S_MAX,
        ):
            with attempt:
                return await once()
        raise AssertionError("a retry ends with an answer or an error")

    async def delete(self, key: str) -> None:
        try:
            await self._client.delete_object(Bucket=self.bucket, Key=key)
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT:
                raise self._mapped(error, "delete", key) from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "delete", key) from error

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        pages = self._client.get_paginator("list_objects_v2")
        try:
            async for page in pages.paginate(Bucket=self.bucket, Prefix=prefix):
                for item in page.get("Contents", ()):
                    yield ObjectInfo(
                        key=item["Key"],
                        size=int(item["Size"]),
                        etag=str(item.get("ETag", "")),
                        metadata={},
                        modified_ms=int(item["LastModified"].timestamp() * 1000),
                    )
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "list", prefix) from error

    async def create_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str
    ) -> str:
        try:
            answer = await self._client.create_multipart_upload(
                Bucket=self.bucket,
                Key=key,
                Metadata=dict(metadata),
                ContentType=content_type,
                ChecksumAlgorithm="CRC32C",
            )
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "begin an upload of", key) from error
        return str(answer["UploadId"])

    async def upload_part(
        self, key: str, upload_id: str, number: int, body: Sequence[Buffer], *, crc32c: int
    ) -> Part:
        sent = BuffersBody(body)
        try:
            answer = await self._client.upload_part(
                Bucket=self.bucket,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=sent,
                ChecksumCRC32C=checksum.to_base64(crc32c),
            )
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, f"upload part {number} of", key) from error
        confirmed = answer.get("ChecksumCRC32C")
        if confirmed is not None and checksum.from_base64(confirmed) != crc32c:
            raise CorruptError(
                f"part {number} of {self.bucket}/{key} arrived with another checksum",
                remedy="Send it again; check memory and network",
                details={"bucket": self.bucket, "object": key},
            )
        return Part(number=number, etag=str(answer["ETag"]), crc32c=crc32c, size=len(sent))

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[Part]) -> None:
        named = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                "ChecksumCRC32C": checksum.to_base64(part.crc32c),
            }
            for part in parts
        ]
        try:
            answer = await self._client.complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": named}
            )
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            mapped = self._mapped(error, "complete the upload of", key)
            doubtful = isinstance(mapped, RetryableError | NoSuchUploadError)
            if doubtful and await self._completed(key, parts):
                return
            raise mapped from error
        found = answer.get("ChecksumCRC32C")
        if found is not None and found != composite_checksum(parts):
            raise CorruptError(
                f"{self.bucket}/{key} was made of other bytes than its parts",
                remedy="Begin a new attempt; check the object store",
                details={"bucket": self.bucket, "object": key},
            )

    async def _completed(self, key: str, parts: Sequence[Part]) -> bool:
        """Tell whether the object is what these parts make."""
        info = await self.head(key)
        if info is None or info.size != sum(part.size for part in parts):
            return False
        return info.etag.strip('"') == composite_etag(parts)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        try:
            await self._client.abort_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload_id
            )
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT | {NO_SUCH_UPLOAD}:
                raise self._mapped(error, "abort the upload of", key) from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "abort the upload of", key) from error

    async def list_uploads(self, prefix: str = "") -> Sequence[OpenUpload]:
        pages = self._client.get_paginator("list_multipart_uploads")
        found: list[OpenUpload] = []
        try:
            async for page in pages.paginate(Bucket=self.bucket, Prefix=prefix):
                found.extend(
                    OpenUpload(
                        key=item["Key"],
                        upload_id=item["UploadId"],
                        initiated_ms=int(item["Initiated"].timestamp() * 1000),
                    )
                    for item in page.get("Uploads", ())
                    if item["Key"].startswith(prefix)
                )
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            raise self._mapped(error, "list the open uploads of", prefix) from error
        return found

    def _mapped(self, error: Exception, what: str, key: str) -> Exception:
        return map_error(error, what=what, key=key, bucket=self.bucket)


class _BeyondEndError(Exception):
    """The range begins at or after the object's end."""


class _CutBodyError(RetryableError):
    """A body ended before its length."""


def composite_etag(parts: Sequence[Part]) -> str:
    """Return the ETag of an object of ``parts``: the MD5 of their MD5s, and their number."""
    hexes = [part.etag.strip('"') for part in parts]
    try:
        joined = b"".join(bytes.fromhex(one) for one in hexes)
    except ValueError:
        return f"unknown-{len(parts)}"
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"


def composite_checksum(parts: Sequence[Part]) -> str:
    """Return the checksum of an object of ``parts``: the CRC32C of their CRC32Cs."""
    joined = b"".join(part.crc32c.to_bytes(checksum.CRC32C_LEN, "big") for part in parts)
    return f"{checksum.to_base64(checksum.crc32c(joined))}-{len(parts)}"


def _total(answer: Mapping[str, Any], key: str) -> int:
    """Return the object's whole size from an answer to a ranged GET."""
    shown = str(answer.get("ContentRange", ""))
    _, slash, total = shown.rpartition("/")
    if not slash or not total.isdigit():
        raise RefusedError(
            f"the object store answered a range of {key} without saying which",
            remedy="Check what stands between Tierlog and the object store",
            details={"object": key},
        )
    return int(total)


def _info(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=size,
        etag=str(answer.get("ETag", "")),
        metadata=_lower(answer.get("Metadata", {})),
        modified_ms=int(answer["LastModified"].timestamp() * 1000),
    )


def _date_ms(answer: Mapping[str, Any]) -> int:
    """Return when the store answered, by its own clock; 0 when it didn't say."""
    text = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return int(parsedate_to_datetime(text).timestamp() * 1000) if text else 0


def _lower(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key.lower(): value for key, value in metadata.items()}
