"""The proxies' knowledge of frames: what is asked, what answers it, what is sent on."""

import asyncio
import struct

import pytest

from tests.faults.frames import CONNECT, KafkaFraming, ZooKeeperFraming, parse_http
from tests.faults.proxy import Act, Asked, FaultProxy, Judge, Place


def jute(text: str) -> bytes:
    return struct.pack(">i", len(text)) + text.encode()


class TestZooKeeper:
    framing = ZooKeeperFraming()

    def test_the_first_frame_has_no_number(self):
        assert self.framing.request(bytes(44), first=True) == (CONNECT, "connect", "")
        assert self.framing.reply_to(bytes(36), first=True) == CONNECT

    @pytest.mark.parametrize(
        ("kind", "name"), [(1, "create"), (5, "set"), (14, "multi"), (11, "ping"), (77, "type 77")]
    )
    def test_requests_have_a_kind_and_a_path(self, kind, name):
        frame = struct.pack(">ii", 9, kind) + jute("/tierlog/contexts/1") + b"rest"
        about = "/tierlog/contexts/1"
        assert self.framing.request(frame, first=False) == (9, name, about)

    @pytest.mark.parametrize("rest", [b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\x09abc"])
    def test_what_has_no_path_has_none(self, rest):
        frame = struct.pack(">ii", 9, 4) + rest
        assert self.framing.request(frame, first=False) == (9, "get", "")

    def test_events_answer_nothing(self):
        assert self.framing.reply_to(struct.pack(">iqi", -1, 5, 0), first=False) is None
        assert self.framing.reply_to(struct.pack(">iqi", 9, 5, 0), first=False) == 9


def test_kafka_s_replies_name_the_proxy():
    framing = KafkaFraming(("127.0.0.1", 20500), ("127.0.0.1", 61000))
    frame = struct.pack(">hhi", 0, 9, 77) + b"client"
    assert framing.request(frame, first=False) == (77, "produce", "")
    assert framing.request(struct.pack(">hhi", 99, 0, 1), first=False).kind == "api 99"
    told = struct.pack(">i", 77) + b"\x0a127.0.0.1" + struct.pack(">i", 20500) + b"rack"
    assert framing.reply_to(told, first=False) == 77
    seen = framing.for_client(told)
    assert seen == told.replace(struct.pack(">i", 20500), struct.pack(">i", 61000))


@pytest.mark.parametrize(
    ("line", "kind", "repeatable"),
    [
        ("PUT /b/key?partNumber=2&uploadId=u", "upload_part", True),
        ("POST /b/key?uploads", "create_upload", False),
        ("POST /b/key?uploadId=u", "complete_upload", False),
        ("DELETE /b/key?uploadId=u", "abort_upload", True),
        ("GET /b?list-type=2&prefix=x", "list", True),
        ("GET /b/key", "get", True),
    ],
)
def test_s3_requests_are_told_apart(line, kind, repeatable):
    head = f"{line} HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n"
    found = parse_http(head.encode())
    assert (found.kind, found.body_len, found.repeatable) == (kind, 5, repeatable)
    assert found.head.endswith(b"Content-Length: 5\r\nConnection: close\r\n\r\n")
    assert b"keep-alive" not in found.head


def test_what_is_put_once_is_not_put_twice():
    head = b"PUT /b/key HTTP/1.1\r\nIf-None-Match: *\r\nExpect: 100-continue\r\n\r\n"
    found = parse_http(head)
    assert not found.repeatable
    assert found.expects
    assert b"Expect" not in found.head


async def answered(act: Act | None, *, cut: bool = False) -> tuple[bytes, list[bytes], Judge]:
    """Send one request through a proxy; return its answer, what came to the server, the judge."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        came.append(head[:9] + await reader.readexactly(4))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nyes")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    judge = Judge()
    if act is not None:
        judge.arm(Place("s3", "put", 0), act)
    async with FaultProxy("s3", f"127.0.0.1:{port}", judge) as proxy:
        host, _, at = proxy.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(at))
        writer.write(b"PUT /b/k HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
        if act in {Act.HOLD_REQUEST, Act.HOLD_REPLY}:
            await judge.met.wait()
            assert len(came) == (act is Act.HOLD_REPLY)
            judge.let_go(cut=cut)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        writer.close()
    server.close()
    assert judge.asked == [Asked(Place("s3", "put", 0), "/b/k")]
    return answer, came, judge


@pytest.mark.parametrize(
    ("act", "cut", "gets_answer", "times"),
    [
        (None, False, True, 1),
        (Act.DROP_REQUEST, False, False, 0),
        (Act.DROP_REPLY, False, False, 1),
        (Act.TWICE, False, True, 2),
        (Act.HOLD_REQUEST, True, False, 0),
        (Act.HOLD_REQUEST, False, True, 1),
        (Act.HOLD_REPLY, True, False, 1),
        (Act.HOLD_REPLY, False, True, 1),
    ],
)
async def test_a_request_gets_what_it_is_to_get(act, cut, gets_answer, times):
    answer, came, judge = await answered(act, cut=cut)
    assert answer.endswith(b"yes") == gets_answer
    assert came == [b"PUT /b/k body"] * times
    assert judge.met.is_set() == (act is not None)


def test_of_what_clients_always_send_the_first_is_a_place():
    judge = Judge()
    for server, kind in [("zookeeper", "ping"), ("kafka", "fetch"), ("s3", "get")] * 3:
        assert judge.ask(server, kind, "") is Act.PASS
    places = [(place.kind, place.nth) for place in judge.places()]
    assert places == [("ping", 0), ("fetch", 0), ("get", 0), ("get", 1), ("get", 2)]
