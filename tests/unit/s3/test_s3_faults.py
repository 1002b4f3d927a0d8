"""The S3 adapter when the store throttles, lies, hangs up, or answers late.

Pins what the streaming body rests on: the duck typing of a pinned library. What arrives is the
buffers back to back, whole at each try, with the checksum beside it and no payload signature.
"""

import asyncio
import functools
import hashlib
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import aioboto3
import pytest
from pydantic import SecretStr

from tests.contracts.bodies_suite import BodiesContract
from tests.unit.s3.scripted import (
    Answer,
    CutRequest,
    Early,
    Request,
    ScriptedS3,
    Served,
    Step,
    error,
)
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.s3.body import CHUNK_BYTES, SLICES_MAX, BuffersBody, chunks
from tierlog.adapters.s3.credentials import Reload
from tierlog.adapters.s3.store import (
    S3ObjectStore,
    composite_checksum,
    composite_etag,
    open_s3,
)
from tierlog.adapters.system import SystemClock
from tierlog.format.checksum import crc32c_of, to_base64
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.ports.files import Buffer
from tierlog.ports.objects import NoSuchUploadError, ObjectExistsError, Part
from tierlog.ports.spending import NAMESPACE, OUT, Amount, Cause, CostMeter, Spent, spending
from tierlog.ports.throttle import TokenBucket, requests_pace
from tierlog.runtime.settings import S3Settings

BUFFERS: list[Buffer] = [
    b"h" * 128,
    memoryview(bytes(range(256)) * 2000),
    b"",
    bytearray(b"tail"),
    b"x" * 40_000,
]
WHOLE = b"".join(BUFFERS)
CRC = crc32c_of(BUFFERS)
STAMP = {"Last-Modified": "Sat, 21 Nov 2026 10:00:00 GMT", "ETag": '"e"'}


@pytest.fixture(autouse=True)
def quick_sessions(monkeypatch):
    """One session for all tests, but for keys that are looked for: S3 takes long to read."""
    monkeypatch.setattr("aioboto3.Session", one_session)


@functools.cache
def one_session(**settings: str) -> Any:
    return _SESSION(**settings)


_SESSION = aioboto3.Session


def settings_for(server: Served, **more: Any) -> S3Settings:
    quick = {"retry_wait_s_first": 0.001, "retry_wait_s_max": 0.01, "attempts_max": 3}
    keys = {"access_key": "a", "secret_key": SecretStr("s")}
    return S3Settings(endpoint_url=server.url, bucket="b", **{**keys, **quick, **more})


def opened(
    server: Served,
    *,
    meter: CostMeter | None = None,
    reload: Reload | None = None,
    pace: TokenBucket | None = None,
    **more: Any,
) -> AbstractAsyncContextManager[S3ObjectStore]:
    return open_s3(
        settings_for(server, **more),
        clock=SystemClock(),
        ids=SeededIds(random.Random(1)),
        meter=meter,
        pace=pace,
        reload=reload,
    )


def part_taken(request: Request) -> Answer:
    etag = hashlib.md5(request.body, usedforsecurity=False).hexdigest()
    return Answer(200, {"ETag": f'"{etag}"', "x-amz-checksum-crc32c": to_base64(CRC)})


async def upload(server: ScriptedS3, **more: Any) -> Part:
    async with opened(server, **more) as store:
        return await store.upload_part("k", "u", 1, BUFFERS, crc32c=CRC)


def check_plain(request: Request, body: bytes) -> None:
    """Check that a body came as it is: a store that knows no trailers would store them with it."""
    assert request.body == body
    assert request.headers["content-length"] == str(len(body))
    assert request.headers["x-amz-checksum-crc32c"] == to_base64(crc32c_of([body]))
    assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    for name in ("transfer-encoding", "content-encoding", "x-amz-trailer"):
        assert name not in request.headers


@pytest.mark.covers("A42")
@pytest.mark.parametrize(
    "trouble",
    [
        [],
        [error(503, "SlowDown")],
        [error(500, "InternalError"), error(503, "ServiceUnavailable")],
        [CutRequest(0)],
        [CutRequest(100_000)],
        [CutRequest(len(WHOLE))],
        [error(400, "RequestTimeout")],
        [error(400, "IncompleteBody")],
        [error(429, "TooManyRequests")],
        [error(400, "ExpiredToken")],
        [Answer(200, None, b"not what an upload is answered with", cut_body=5), Answer(503)],
    ],
)
async def test_a_part_arrives_whole_at_each_try(trouble):
    async with ScriptedS3(*trouble, part_taken) as server:
        part = await upload(server)
        assert part.size == len(WHOLE)
        assert part.etag.strip('"') == hashlib.md5(WHOLE, usedforsecurity=False).hexdigest()
        assert len(server.requests) == len(trouble) + 1
        last = server.requests[-1]
        check_plain(last, WHOLE)
        assert last.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize("if_none_match", [False, True])
@pytest.mark.parametrize("trouble", [[], [error(503, "SlowDown")], [CutRequest(100)]])
async def test_so_does_a_small_object(trouble, if_none_match):
    async with ScriptedS3(*trouble, Answer(200, STAMP)) as server, opened(server) as store:
        await store.put("k", WHOLE, metadata={}, if_none_match=if_none_match)
        assert len(server.requests) == len(trouble) + 1
        check_plain(server.requests[-1], WHOLE)


async def test_a_store_is_told_who_asks_in_few_words():
    async with ScriptedS3(error(503, "SlowDown"), Answer(200, STAMP)) as server:
        async with opened(server) as store:
            await store.put("k", b"body", metadata={})
        for request in server.requests:
            product, *library = request.headers["user-agent"].split(" ")
            assert product == f"tierlog/{version('tierlog')}"
            assert len(library) <= 1  # its name and version, and nothing that is made anew


async def test_tries_are_bounded_and_the_error_names_the_request():
    async with ScriptedS3(*[error(503, "SlowDown")] * 3) as server:
        with pytest.raises(RetryableError) as raised:
            await upload(server)
        assert len(server.requests) == 3
        assert raised.value.reason is Reason.UNAVAILABLE
        assert raised.value.details["code"] == "SlowDown"
        assert raised.value.details["request_id"] == "REQ-1"
        assert raised.value.details["object"] == "k"
        assert raised.value.remedy


async def test_nobody_there_is_retryable():
    async with ScriptedS3() as server:
        pass
    with pytest.raises(RetryableError):
        await upload(server)


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (error(400, "BadDigest"), CorruptError, Reason.CORRUPT),
        (error(403, "AccessDenied"), RefusedError, Reason.PERMISSION_DENIED),
        (error(403, "SignatureDoesNotMatch"), RefusedError, Reason.UNAUTHENTICATED),
        (error(404, "NoSuchBucket"), RefusedError, Reason.INVALID_ARGUMENT),
        (error(404, "NoSuchUpload"), NoSuchUploadError, Reason.INVALID_ARGUMENT),
        (error(400, "EntityTooSmall"), RefusedError, Reason.INVALID_ARGUMENT),
    ],
)
async def test_each_refusal_is_of_its_kind_and_not_tried_again(answer, kind, reason):
    async with ScriptedS3(answer) as server:
        with pytest.raises(kind) as raised:
            await upload(server)
        assert raised.value.reason is reason
        assert raised.value.details["request_id"] == "REQ-1"


async def test_a_store_that_confirms_another_checksum_is_corrupt():
    beside = {"ETag": '"e"', "x-amz-request-id": "REQ-7", "x-amz-checksum-crc32c": to_base64(1)}
    async with ScriptedS3(Answer(200, beside)) as server:
        with pytest.raises(CorruptError, match=r"\(request REQ-7\)") as raised:
            await upload(server)
        assert raised.value.details["request_id"] == "REQ-7"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(RefusedError, "InvalidAccessKeyId"), (RetryableError, "ExpiredToken")],
)
async def test_keys_that_stay_over_end_as_what_they_are(kind, code):
    async with ScriptedS3(*[error(403, code)] * 3) as server:
        with pytest.raises(kind) as raised:
            await upload(server, reload=lambda: settings_for(server))
        assert raised.value.details["code"] == code
        assert len(server.requests) == (1 if kind is RefusedError else 3)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
async def test_keys_that_were_replaced_are_taken_and_the_upload_goes_on(code):
    def checked(request: Request) -> Answer:
        good = "Credential=new/" in request.headers["authorization"]
        return part_taken(request) if good else error(403, code)

    renewals = 0

    def reload() -> S3Settings:
        nonlocal renewals
        renewals += 1
        return settings_for(server, access_key="new", secret_key=SecretStr("other"))

    async with (
        ScriptedS3(*[checked] * 7) as server,
        opened(server, access_key=f"old-{code}", reload=reload) as store,
        asyncio.TaskGroup() as group,
    ):
        sent = [
            group.create_task(store.upload_part("k", "u", number, BUFFERS, crc32c=CRC))
            for number in range(1, 4)
        ]
        for one in sent:
            await one
        last = await store.upload_part("k", "u", 4, BUFFERS, crc32c=CRC)
    assert [*(one.result().number for one in sent), last.number] == [1, 2, 3, 4]
    assert renewals == 1
    assert len(server.requests) == 7


@pytest.mark.parametrize("status", [400, 403])
async def test_an_answer_to_head_names_no_code_and_may_mean_old_keys(status):
    def checked(request: Request) -> Answer:
        good = "Credential=new/" in request.headers["authorization"]
        return Answer(200, STAMP) if good else Answer(status)

    def reload() -> S3Settings:
        return settings_for(server, access_key="new", secret_key=SecretStr("other"))

    async with (
        ScriptedS3(*[checked] * 4) as server,  # the library looks for another region first
        opened(server, access_key=f"old-{status}", reload=reload) as store,
    ):
        assert await store.head("k") is not None


async def test_keys_in_a_file_are_read_again(tmp_path, monkeypatch):
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id={}\naws_secret_access_key=s\naws_session_token=t\n"
    file.write_text(text.format("first"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("aioboto3.Session", _SESSION)

    def expires(_request: Request) -> Answer:
        file.write_text(text.format("second"))
        return error(400, "ExpiredToken")

    def checked(request: Request) -> Answer:
        assert "Credential=second/" in request.headers["authorization"]
        return part_taken(request)

    async with ScriptedS3(part_taken, expires, checked) as server:
        async with opened(server, access_key=None, secret_key=None) as store:
            for number in (1, 2):
                await store.upload_part("k", "u", number, BUFFERS, crc32c=CRC)
        assert [one.headers["x-amz-security-token"] for one in server.requests] == ["t"] * 3


async def test_a_store_that_hangs_is_given_up_in_time():
    async def never(_request: Request) -> Answer:
        await asyncio.sleep(60)
        raise AssertionError

    async with ScriptedS3(*[never] * 3) as server:
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(RetryableError, match="not done within"):
            await upload(server, request_s_max=0.5, bytes_per_s_min=10**8)
        assert asyncio.get_running_loop().time() - begun_s < 6
        assert len(server.requests) == 3


async def test_a_body_is_paced_and_its_deadline_waits_for_that():
    async with ScriptedS3(part_taken) as server:
        begun_s = asyncio.get_running_loop().time()
        large = [bytes(1_500_000)]
        async with opened(
            server, bytes_per_s_max=2e5, request_s_max=1.5, bytes_per_s_min=10**9, attempts_max=1
        ) as store:
            with pytest.raises(CorruptError):  # it confirms another body's checksum
                await store.upload_part("k", "u", 1, large, crc32c=crc32c_of(large))
        # All but a burst of 1 MiB goes at a fifth of a megabyte a second.
        assert 2.1 < asyncio.get_running_loop().time() - begun_s < 20
        assert len(server.requests[0].body) == 1_500_000


async def test_a_namespace_has_a_pace_of_its_own_and_others_do_not_wait_for_it():
    meter, large = CostMeter(), [bytes(1_500_000)]
    took_s: dict[str, float] = {}

    async def upload_of(store: S3ObjectStore, stream: str) -> None:
        begun_s = asyncio.get_running_loop().time()
        with spending(Cause.OFFLOAD, stream), pytest.raises(CorruptError):
            await store.upload_part("k", "u", 1, large, crc32c=crc32c_of(large))
        took_s[stream] = asyncio.get_running_loop().time() - begun_s

    async with (
        ScriptedS3(part_taken, part_taken) as server,
        opened(server, namespace_bytes_per_s_max=("slow=500000",), meter=meter) as store,
        asyncio.TaskGroup() as group,
    ):
        for stream in ("slow.orders", "other.orders"):
            group.create_task(upload_of(store, stream))
    # All but a burst of 1 MiB goes at half a megabyte a second.
    assert took_s["slow.orders"] > 0.85
    assert took_s["other.orders"] < took_s["slow.orders"]
    assert meter.throttled_s[OUT, NAMESPACE] > 0.85


async def test_requests_are_capped_with_those_that_are_sent_again():
    async with ScriptedS3(error(503, "SlowDown"), *[part_taken] * 6) as server:
        begun_s = asyncio.get_running_loop().time()
        async with opened(server, requests_per_s_max=5) as store:
            for number in range(1, 7):
                await store.upload_part("k", "u", number, BUFFERS, crc32c=CRC)
        assert asyncio.get_running_loop().time() - begun_s > 0.35


async def test_two_clients_of_a_process_keep_one_cap_together():
    async with ScriptedS3(*[part_taken] * 7) as server:
        pace = requests_pace(SystemClock(), per_s_max=5)
        begun_s = asyncio.get_running_loop().time()
        async with opened(server, pace=pace) as one, opened(server, pace=pace) as other:
            for number in range(1, 8):
                store = one if number % 2 else other
                await store.upload_part("k", "u", number, BUFFERS, crc32c=CRC)
        assert asyncio.get_running_loop().time() - begun_s > 0.35


async def test_each_try_is_counted_for_what_it_is_sent():
    meter, listed = CostMeter(), b"<?xml version='1.0'?><ListMultipartUploadsResult>{}</List"
    page = listed.replace(b"{}", b"<IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
                          b"<NextUploadIdMarker>u</NextUploadIdMarker>")  # fmt: skip
    script: list[Step] = [
        error(503, "SlowDown"), part_taken, ranged(b"0123456789", 20, cut_body=4),
        ranged(b"0123456789", 20), Answer(200, None, page + b"MultipartUploadsResult>"),
        Answer(200, None, listed.replace(b"{}", LAST) + b"MultipartUploadsResult>"),
    ]  # fmt: skip
    async with ScriptedS3(*script) as server, opened(server, meter=meter) as store:
        with spending(Cause.OFFLOAD, "logs"):
            await store.upload_part("k", "u", 1, BUFFERS, crc32c=CRC)
            with spending(Cause.VERIFY):
                await store.get_range("k", 0, 10)
        await store.list_uploads("k")
    assert meter.amounts == {
        Spent("logs", Cause.OFFLOAD, "upload_part"): Amount(2, 2 * len(WHOLE), 0),
        Spent("logs", Cause.VERIFY, "get_object"): Amount(2, 0, 14),
        Spent("", Cause.OTHER, "list_multipart_uploads"): Amount(2, 0, 0),
    }


LAST = b"<IsTruncated>false</IsTruncated>"
PARTS = [
    Part(number=n, etag=f'"{hashlib.md5(bytes([n])).hexdigest()}"', crc32c=n, size=10)
    for n in (1, 2)
]
COMPLETED = Answer(
    200,
    None,
    b"<?xml version='1.0'?><CompleteMultipartUploadResult><ETag>e</ETag></"
    b"CompleteMultipartUploadResult>",
)


def headed(size: int, etag: str) -> Answer:
    return Answer(200, {**STAMP, "ETag": etag}, bytes(size))


class TestCompleting:
    async def complete(self, *script) -> ScriptedS3:
        async with ScriptedS3(*script) as server, opened(server) as store:
            await store.complete_upload("k", "u", PARTS)
            return server

    async def test_names_each_part_with_its_checksum(self):
        server = await self.complete(COMPLETED)
        body = server.requests[0].body.decode()
        for part in PARTS:
            assert to_base64(part.crc32c) in body

    async def test_an_object_of_other_bytes_is_seen(self):
        def confirming(text: str) -> Answer:
            inside = f"<ETag>e</ETag><ChecksumCRC32C>{text}</ChecksumCRC32C></Complete".encode()
            return Answer(200, None, COMPLETED.body.replace(b"<ETag>e</ETag></Complete", inside))

        await self.complete(confirming(composite_checksum(PARTS)))
        with pytest.raises(CorruptError):
            await self.complete(confirming("AAAAAA==-2"))

    async def test_200_with_an_error_inside_is_tried_again(self):
        inside = Answer(200, None, error(500, "InternalError").body)
        server = await self.complete(inside, COMPLETED)
        assert len(server.requests) == 2

    async def test_its_own_success_whose_answer_was_lost_is_one(self):
        own = headed(20, f'"{composite_etag(PARTS)}"')
        await self.complete(CutRequest(0), error(404, "NoSuchUpload"), own)
        await self.complete(*[error(500, "InternalError")] * 3, own)

    async def test_its_own_success_is_known_by_its_checksum_where_the_etag_is_no_md5(self):
        plain = headed(20, '"0123456789abcdef0123456789abcdef-2"')
        named = {**(plain.headers or {}), "x-amz-checksum-crc32c": composite_checksum(PARTS)}
        own = replace(plain, headers=named)
        await self.complete(CutRequest(0), error(404, "NoSuchUpload"), plain, own)
        other = replace(plain, headers={**named, "x-amz-checksum-crc32c": "AAAAAA==-2"})
        with pytest.raises(NoSuchUploadError):
            await self.complete(CutRequest(0), error(404, "NoSuchUpload"), plain, other)

    @pytest.mark.parametrize(
        "found", [[headed(20, '"other-2"')] * 2, [headed(21, f'"{composite_etag(PARTS)}"')]]
    )
    async def test_another_object_under_the_key_is_none(self, found):
        with pytest.raises(NoSuchUploadError):
            await self.complete(error(404, "NoSuchUpload"), *found)

    async def test_an_upload_that_is_gone_without_an_object_is_refused(self):
        gone = error(404, "404"), error(404, "NoSuchKey")
        with pytest.raises(NoSuchUploadError):
            await self.complete(error(404, "NoSuchUpload"), *gone)


def ranged(body: bytes, total: int, **more) -> Answer:
    headers = {**STAMP, "Content-Range": f"bytes 0-{len(body) - 1}/{total}"}
    return Answer(206, headers, body, **more)


class TestRanges:
    async def get(self, *script, length: int = 10) -> bytes | None:
        async with ScriptedS3(*script) as server, opened(server) as store:
            return await store.get_range("k", 0, length)

    async def test_a_cut_body_is_asked_for_again(self):
        cut = ranged(b"0123456789", 20, cut_body=4)
        assert await self.get(cut, cut, ranged(b"0123456789", 20)) == b"0123456789"

    async def test_bodies_that_stay_cut_are_retryable(self):
        with pytest.raises(RetryableError, match="4 bytes arrived of 10"):
            await self.get(*[ranged(b"0123456789", 20, cut_body=4)] * 3)

    async def test_the_text_of_a_cut_body_names_the_request(self):
        cut = ranged(b"0123456789", 20, cut_body=4)
        cut = replace(cut, headers={**(cut.headers or {}), "x-amz-request-id": "REQ-7"})
        with pytest.raises(RetryableError, match=r"\(request REQ-7\)") as raised:
            await self.get(cut, cut, cut)
        assert raised.value.details["request_id"] == "REQ-7"

    async def test_fewer_bytes_than_asked_only_at_the_end(self):
        assert await self.get(ranged(b"0123", 4)) == b"0123"
        with pytest.raises(RetryableError):
            await self.get(*[ranged(b"0123", 20)] * 3)

    async def test_a_store_that_ignores_ranges_is_refused(self):
        with pytest.raises(RefusedError, match="without saying which"):
            await self.get(Answer(200, STAMP, b"0123456789"))

    async def test_missing_object_and_missing_bucket_are_two_things(self):
        assert await self.get(error(404, "NoSuchKey")) is None
        with pytest.raises(RefusedError):
            await self.get(error(404, "NoSuchBucket"))


class TestConditionalPut:
    async def put(self, *script):
        async with ScriptedS3(*script) as server, opened(server) as store:
            return await store.put("k", b"body", metadata={"A": "1"}, if_none_match=True)

    async def test_refused_when_someone_else_was_first(self):
        with pytest.raises(ObjectExistsError):
            await self.put(error(412, "PreconditionFailed"))

    async def test_its_own_success_whose_answer_was_lost_is_one(self):
        own = Answer(200, {**STAMP, "x-amz-meta-a": "1"}, b"body")
        info = await self.put(CutRequest(4), error(412, "PreconditionFailed"), own)
        assert info.size == 4

    async def test_another_body_is_someone_else_even_after_a_retry(self):
        other = Answer(200, {**STAMP, "x-amz-meta-a": "1"}, b"else")
        with pytest.raises(ObjectExistsError):
            await self.put(CutRequest(4), error(412, "PreconditionFailed"), other)


async def test_an_answer_that_does_not_say_its_length_is_asked_for_again_and_retryable():
    unsized, sized = Answer(200, STAMP, b"body", unsized=True), Answer(200, STAMP, b"body")
    async with ScriptedS3(unsized, unsized, sized) as server, opened(server) as store:
        found = await store.get("k")
        assert found is not None
        assert found[1] == b"body"
    async with ScriptedS3(*[unsized] * 6) as server, opened(server) as store:
        for read in (store.get, store.head):
            with pytest.raises(RetryableError, match="does not say its length"):
                await read("k")


def test_chunks_are_what_one_call_to_the_kernel_takes():
    buffers = [b"a"] * (SLICES_MAX + 1) + [b"b" * (3 * CHUNK_BYTES + 1)] + [b"", b"c"]
    pieces = list(chunks(buffers))
    assert b"".join(b"".join(piece) for piece in pieces) == b"".join(buffers)
    assert max(sum(map(len, piece)) for piece in pieces) <= CHUNK_BYTES
    assert max(map(len, pieces)) <= SLICES_MAX
    assert all(view for piece in pieces for view in piece)
    assert len(pieces) == 1 + 4


def test_the_body_is_a_file_too():
    body = BuffersBody(BUFFERS)
    assert len(body) == len(WHOLE)
    assert body.read(200) + body.read() == WHOLE
    assert body.read() == b""
    assert body.seek(-4, 2) == body.tell() == len(WHOLE) - 4
    assert body.read() == WHOLE[-4:]
    assert body.seek(0) == 0
    assert body.read(10**9) == WHOLE


class TestBodies(BodiesContract):
    def opened(self, server: ScriptedS3) -> AbstractAsyncContextManager[S3ObjectStore]:
        return opened(server)


async def test_who_is_told_of_another_region_before_the_body_asks_there():
    """S3 says so without a word of where that is, which is no redirect to the HTTP library."""
    elsewhere = error(301, "PermanentRedirect")
    elsewhere.headers = {"x-amz-bucket-region": "eu-west-3"}
    async with ScriptedS3(Early(elsewhere), part_taken) as server:
        part = await upload(server)
        assert part.size == len(WHOLE)
        assert [request.method for request in server.requests] == ["PUT", "PUT"]
        assert "/eu-west-3/s3/" in server.requests[1].headers["authorization"]
