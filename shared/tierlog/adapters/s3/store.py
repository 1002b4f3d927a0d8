"""One bucket of S3, or of what speaks its protocol.

Owns how answers map to the port. Does not own which objects there are (``tierlog.offload`` does),
nor how a request is sent (``requests``).

Invariants:
    * What is sent carries a CRC32C that the store checks; payloads are not hashed for signing.
    * Ranges are exactly what was asked for, or what is left before the object's end: a body that
      is shorter or longer is asked for again, and never more of it held than was wanted.
    * A completed upload that is completed again, its first answer lost, is a success.
    * "There is no such object" is said only where the store says so, and not of a 404 that does not
      say what is missing. Nor is anything taken for deleted, or aborted, by one.
    * A list is empty only where the store says so: an answer without what each has is none, and is
      asked for again. So is one to what is put, an upload or a part of it, that does not say what
      was made, and one of an object without its stamp.
"""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final

from aiobotocore.config import AioConfig
from botocore.exceptions import ClientError

from tierlog.adapters.s3.answers import date_ms, lower_keys, object_of, total
from tierlog.adapters.s3.body import BuffersBody
from tierlog.adapters.s3.credentials import Credentials, Reload, load_keys, open_session
from tierlog.adapters.s3.errors import (
    BARE_404,
    BEYOND_END,
    MISSING_BUCKET,
    MISSING_OBJECT,
    NO_SUCH_UPLOAD,
    PRECONDITION_FAILED,
    CutBodyError,
    code_of,
    map_error,
    of_request,
    request_of,
    retries_of,
)
from tierlog.adapters.s3.requests import TROUBLE, Requests, Take
from tierlog.format import checksum
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.ports.clock import Clock
from tierlog.ports.files import Buffer
from tierlog.ports.filling import Filling, length_of
from tierlog.ports.ids import Ids
from tierlog.ports.objects import NoSuchUploadError, ObjectInfo, OpenUpload, Part, check_length
from tierlog.ports.spending import CostMeter
from tierlog.ports.throttle import TokenBucket
from tierlog.runtime.settings import S3Settings

READ_CHUNK_BYTES: Final = 256 * 1024
USER_AGENT: Final = f"tierlog/{version('tierlog')}"
"""Logs of a store tell by it who asked. The library's own is put together anew for each request,
letter by letter, which takes a tenth of the processor that a ranged GET does.
"""
PART_TYPE: Final = "application/octet-stream"
"""SeaweedFS guesses what a part without a type is by its first 128 bytes, in ours a header that is
nearly all zeros: it would compress the first 8 MiB of each, and unpack them at every ranged read.
"""

_LIST_SAYS: Final = frozenset({"IsTruncated", "KeyCount", "Name"})
_UPLOADS_SAY: Final = frozenset({"IsTruncated", "MaxUploads", "Bucket"})
_COMPLETED_SAYS: Final = frozenset({"ETag", "Location", "Key"})

_TakePiece = Callable[[bytes], None]


def client_config(settings: S3Settings) -> AioConfig:
    """Return how requests are signed, summed and timed out. Sent again they are by ``requests``."""
    return AioConfig(
        signature_version="s3v4",
        user_agent=USER_AGENT,
        s3={
            "payload_signing_enabled": False,
            "addressing_style": "path" if settings.endpoint_url else "auto",
        },
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=settings.connections_max,
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": 1},
    )


def _name_part_type(params: dict[str, Any], **_: object) -> None:
    """Say what a part is: the library has no argument for it, and stores need none."""
    params["headers"]["Content-Type"] = PART_TYPE


@contextlib.asynccontextmanager
async def open_s3(
    settings: S3Settings,
    *,
    clock: Clock,
    ids: Ids,
    meter: CostMeter | None = None,
    reload: Reload | None = None,
    pace: TokenBucket | None = None,
) -> AsyncIterator["S3ObjectStore"]:
    """Open the bucket of ``settings`` for the length of the context.

    ``reload`` reads them again, for keys that were replaced. ``pace`` is what requests wait for,
    where others of this process wait for it too; else that of the settings.
    """
    session = open_session(settings)
    async with session.client(
        "s3", endpoint_url=settings.endpoint_url, config=client_config(settings)
    ) as client:
        client.meta.events.register("before-call.s3.UploadPart", _name_part_type)
        credentials = Credentials(
            await session.get_credentials(), partial(load_keys, settings, reload)
        )
        requests = Requests(
            client,
            settings,
            credentials,
            clock=clock,
            ids=ids,
            meter=meter if meter is not None else CostMeter(),
            pace=pace,
        )
        yield S3ObjectStore(requests, bucket=settings.bucket, region=settings.region)


class S3ObjectStore:
    """The port ``ObjectStore`` over a client of aioboto3."""

    def __init__(self, requests: Requests, *, bucket: str, region: str) -> None:
        self._requests = requests
        self._region = region
        self.bucket = bucket

    def __repr__(self) -> str:
        return f"S3ObjectStore(bucket={self.bucket!r})"

    async def ensure_bucket(self) -> None:
        """Make the bucket unless it is there."""
        try:
            await self._requests.send("head_bucket", Bucket=self.bucket)
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT | {BARE_404, MISSING_BUCKET}:
                raise self._mapped(error, "look for the bucket", "") from error
        except TROUBLE as error:
            raise self._mapped(error, "look for the bucket", "") from error
        else:
            return
        more: dict[str, Any] = {}
        if self._region != "us-east-1":
            more["CreateBucketConfiguration"] = {"LocationConstraint": self._region}
        try:
            await self._requests.send("create_bucket", Bucket=self.bucket, **more)
        except ClientError as error:
            if code_of(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise self._mapped(error, "create the bucket", "") from error
        except TROUBLE as error:
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
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_none_match else {}
        try:
            answer = await self._requests.send(
                "put_object",
                take=self._saying({"ETag"}, "put", key),
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
        except TROUBLE as error:
            raise self._mapped(error, "put", key) from error
        return ObjectInfo(
            key=key,
            size=len(body),
            etag=str(answer.get("ETag", "")),
            metadata=lower_keys(metadata),
            modified_ms=date_ms(answer),
        )

    async def _own_put(
        self, key: str, body: bytes, metadata: Mapping[str, str]
    ) -> ObjectInfo | None:
        """Return the object if it is what was just put: its first answer was lost."""
        found = await self.get(key)
        if found is None:
            return None
        info, stored = found
        return info if stored == body and info.metadata == lower_keys(metadata) else None

    async def head(self, key: str) -> ObjectInfo | None:
        async def take(answer: Any) -> ObjectInfo:  # noqa: ANN401 - the library has no types
            return object_of(key, self._length_of(answer, "head", key), answer)

        try:
            found: ObjectInfo = await self._requests.send(
                "head_object", take=take, Bucket=self.bucket, Key=key
            )
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT | {BARE_404}:
                raise self._mapped(error, "head", key) from error
            # An answer to HEAD has no body that could say what is missing, if the store said it.
            if await self.get_range(key, 0, 1) is not None:
                raise self._mapped(error, "head", key) from error
            return None
        except TROUBLE as error:
            raise self._mapped(error, "head", key) from error
        return found

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        async def take(answer: Any) -> tuple[ObjectInfo, bytes]:  # noqa: ANN401
            pieces: list[bytes] = []
            try:
                length = self._length_of(answer, "get", key)
                check_length(key, length, bytes_max)
            except (CutBodyError, CorruptError):
                answer["Body"].close()
                raise
            await self._receive(key, answer, length, pieces.append)
            body = b"".join(pieces)
            return object_of(key, len(body), answer), body

        try:
            found: tuple[ObjectInfo, bytes] = await self._requests.send(
                "get_object", take=take, Bucket=self.bucket, Key=key
            )
        except TROUBLE as error:
            if isinstance(error, ClientError) and code_of(error) in MISSING_OBJECT:
                return None
            raise self._mapped(error, "get", key) from error
        return found

    def _length_of(self, answer: Mapping[str, Any], what: str, key: str) -> int:
        """Return the length that an answer says; of one without, nobody knows where it ends."""
        self._check_stamp(answer, what, key)
        if "ContentLength" in answer:
            return int(answer["ContentLength"])
        raise self._lacking("its length", answer, what, key)

    def _check_stamp(self, answer: Mapping[str, Any], what: str, key: str) -> None:
        """Refuse to take for an object's an answer without a stamp, such as a proxy's page."""
        if "LastModified" not in answer:
            raise self._lacking("of when the object is", answer, what, key)

    def _lacking(self, lacks: str, answer: Mapping[str, Any], what: str, key: str) -> CutBodyError:
        return CutBodyError(
            f"{what} {self.bucket}/{key}: the answer does not say {lacks}{of_request(answer)}",
            remedy="Check what stands between Tierlog and the object store; it is tried again",
            details=self._details(key, answer),
        )

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        pieces: list[bytes] = []

        def begin() -> _TakePiece:
            pieces.clear()
            return pieces.append

        found = await self._ranged(key, start, length, begin)
        return None if found is None else b"".join(pieces)

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        # Each try begins with the first byte: what one before it wrote is overwritten.
        return await self._ranged(key, start, length_of(targets), lambda: Filling(targets).add)

    async def _ranged(
        self, key: str, start: int, length: int, begin: Callable[[], _TakePiece]
    ) -> int | None:
        """Give the pieces of a range to what ``begin`` returns for each try; return their length.

        None: there is no such object.
        """
        assert start >= 0, start
        assert length > 0, length

        async def take(answer: Any) -> int:  # noqa: ANN401 - the library has no types
            try:
                self._check_stamp(answer, "get", key)
                expected = min(length, total(answer, key, start) - start)
            except (CutBodyError, RefusedError):
                answer["Body"].close()
                raise
            return await self._receive(key, answer, expected, begin())

        asked = f"bytes={start}-{start + length - 1}"
        try:
            found: int = await self._requests.send(
                "get_object", expects=length, take=take, Bucket=self.bucket, Key=key, Range=asked
            )
        except TROUBLE as error:
            code = code_of(error) if isinstance(error, ClientError) else ""
            if code in MISSING_OBJECT:
                return None
            if code in BEYOND_END:
                return 0
            raise self._mapped(error, "get", key) from error
        return found

    async def _receive(
        self,
        key: str,
        answer: Any,  # noqa: ANN401 - the library has no types
        length: int,
        take_piece: _TakePiece,
    ) -> int:
        """Take a body piece by piece; ``CutBodyError`` unless it has exactly ``length`` bytes.

        Of one that is longer no more than that is taken, or waited for.
        """
        stream, came = answer["Body"], 0
        cause: Exception | None = None
        try:
            async with stream:
                while came <= length and (piece := await stream.read(READ_CHUNK_BYTES)):
                    came += len(piece)
                    if came <= length:
                        take_piece(piece)
        except TROUBLE as error:
            cause = error
        self._requests.received("get_object", came)
        if cause is None and came == length:
            return came
        raise CutBodyError(
            f"get {self.bucket}/{key}: {came} bytes arrived of {length}{of_request(answer)}",
            remedy="Check that the object store is reachable and healthy; it is tried again",
            details=self._details(key, answer),
        ) from cause

    async def delete(self, key: str) -> None:
        try:
            await self._requests.send(
                "delete_object", take=self._bare("delete", key), Bucket=self.bucket, Key=key
            )
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT:
                raise self._mapped(error, "delete", key) from error
        except TROUBLE as error:
            raise self._mapped(error, "delete", key) from error

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        more: dict[str, Any] = {}
        while True:
            try:
                page = await self._requests.send(
                    "list_objects_v2",
                    take=self._saying(_LIST_SAYS, "list", prefix),
                    Bucket=self.bucket,
                    Prefix=prefix,
                    **more,
                )
            except TROUBLE as error:
                raise self._mapped(error, "list", prefix) from error
            for item in page.get("Contents", ()):
                yield ObjectInfo(
                    key=item["Key"],
                    size=int(item["Size"]),
                    etag=str(item.get("ETag", "")),
                    metadata={},
                    modified_ms=int(item["LastModified"].timestamp() * 1000),
                )
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def create_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str
    ) -> str:
        try:
            answer = await self._requests.send(
                "create_multipart_upload",
                take=self._saying({"UploadId"}, "begin an upload of", key),
                Bucket=self.bucket,
                Key=key,
                Metadata=dict(metadata),
                ContentType=content_type,
                ChecksumAlgorithm="CRC32C",
            )
        except TROUBLE as error:
            raise self._mapped(error, "begin an upload of", key) from error
        return str(answer["UploadId"])

    async def upload_part(
        self, key: str, upload_id: str, number: int, body: Sequence[Buffer], *, crc32c: int
    ) -> Part:
        sent = BuffersBody(body)
        try:
            answer = await self._requests.send(
                "upload_part",
                take=self._saying({"ETag"}, f"upload part {number} of", key),
                Bucket=self.bucket,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=sent,
                ChecksumCRC32C=checksum.to_base64(crc32c),
            )
        except TROUBLE as error:
            raise self._mapped(error, f"upload part {number} of", key) from error
        confirmed = answer.get("ChecksumCRC32C")
        if confirmed is not None and checksum.from_base64(confirmed) != crc32c:
            raise CorruptError(
                f"part {number} of {self.bucket}/{key} arrived with another checksum"
                f"{of_request(answer)}",
                remedy="Send it again; check memory and network",
                details=self._details(key, answer),
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
            answer = await self._requests.send(
                "complete_multipart_upload",
                take=self._saying(_COMPLETED_SAYS, "complete the upload of", key),
                Bucket=self.bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": named},
            )
        except TROUBLE as error:
            mapped = self._mapped(error, "complete the upload of", key)
            doubtful = isinstance(mapped, RetryableError | NoSuchUploadError)
            if doubtful and await self._completed(key, parts):
                return
            raise mapped from error
        found = answer.get("ChecksumCRC32C")
        if found is not None and found != composite_checksum(parts):
            raise CorruptError(
                f"{self.bucket}/{key} was made of other bytes than its parts{of_request(answer)}",
                remedy="Begin a new attempt; check the object store",
                details=self._details(key, answer),
            )

    async def _completed(self, key: str, parts: Sequence[Part]) -> bool:
        """Tell whether the object is what these parts make."""
        info = await self.head(key)
        if info is None or info.size != sum(part.size for part in parts):
            return False
        return info.etag.strip('"') == composite_etag(parts) or await self._made_of(key, parts)

    async def _made_of(self, key: str, parts: Sequence[Part]) -> bool:
        """Tell by its checksum: of what is encrypted (SSE-KMS, SSE-C) the ETag is no MD5."""
        try:
            answer = await self._requests.send(
                "head_object", Bucket=self.bucket, Key=key, ChecksumMode="ENABLED"
            )
        except TROUBLE as error:
            raise self._mapped(error, "head", key) from error
        return bool(answer.get("ChecksumCRC32C") == composite_checksum(parts))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        try:
            await self._requests.send(
                "abort_multipart_upload",
                take=self._bare("abort the upload of", key),
                Bucket=self.bucket,
                Key=key,
                UploadId=upload_id,
            )
        except ClientError as error:
            if code_of(error) not in MISSING_OBJECT | {NO_SUCH_UPLOAD}:
                raise self._mapped(error, "abort the upload of", key) from error
        except TROUBLE as error:
            raise self._mapped(error, "abort the upload of", key) from error

    async def list_uploads(self, prefix: str = "") -> Sequence[OpenUpload]:
        found: list[OpenUpload] = []
        more: dict[str, Any] = {}
        while True:
            try:
                page = await self._requests.send(
                    "list_multipart_uploads",
                    take=self._saying(_UPLOADS_SAY, "list the open uploads of", prefix),
                    Bucket=self.bucket,
                    Prefix=prefix,
                    **more,
                )
            except TROUBLE as error:
                raise self._mapped(error, "list the open uploads of", prefix) from error
            found.extend(
                OpenUpload(
                    key=item["Key"],
                    upload_id=item["UploadId"],
                    initiated_ms=int(item["Initiated"].timestamp() * 1000),
                )
                for item in page.get("Uploads", ())
                if item["Key"].startswith(prefix)
            )
            if not page.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def _saying(self, fields: Collection[str], what: str, key: str) -> Take:
        """Return what takes an answer that has one of these fields, as each has.

        The library makes an answer of 200 that says nothing, such as one without a body or a
        proxy's page, a list of nothing, or a success.
        """

        async def take(answer: Any) -> Any:  # noqa: ANN401 - the library has no types
            if not any(field in answer for field in fields):
                raise self._nothing(answer, what, key)
            return answer

        return take

    def _bare(self, what: str, key: str) -> Take:
        """Return what takes an answer without a body: one to DELETE that has one is a page.

        A store says 204, or 200 with its own name for the request; else it may be a proxy's.
        """

        async def take(answer: Any) -> None:  # noqa: ANN401 - the library has no types
            metadata = answer["ResponseMetadata"]
            headers = metadata["HTTPHeaders"]
            bare = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            stores = metadata["HTTPStatusCode"] == HTTPStatus.NO_CONTENT or request_of(answer)
            if not (bare and stores):
                raise self._nothing(answer, what, key)

        return take

    def _nothing(self, answer: Mapping[str, Any], what: str, key: str) -> CutBodyError:
        return CutBodyError(
            f"{what} {self.bucket}/{key}: the answer says nothing{of_request(answer)}",
            remedy="Check what stands between Tierlog and the object store; it is tried again",
            details=self._details(key, answer),
        )

    def _details(self, key: str, answer: Mapping[str, Any]) -> dict[str, str]:
        return {"bucket": self.bucket, "object": key, "request_id": request_of(answer)}

    def _mapped(self, error: Exception, what: str, key: str) -> Exception:
        return map_error(error, what=what, key=key, bucket=self.bucket)


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
