"""What goes over the wire to ZooKeeper, Kafka and HTTP servers, as far as a proxy must know it.

Owns: where a request begins and ends, what it is called, which reply is its own. Pure functions
of bytes; the proxy (``tests.faults.proxy``) does the moving.

    ZooKeeper  int32 length | int32 xid | int32 type | …        (first: a connect request, no xid)
               int32 length | int32 xid | int64 zxid | int32 err | …   (xid -1: an event, no reply)
    Kafka      int32 length | int16 api key | int16 version | int32 correlation id | …
               int32 length | int32 correlation id | …
    HTTP/1.1   head, then a body of Content-Length bytes

A client of Kafka goes on to the broker that it is told of; so the broker's address in replies is
replaced by the proxy's, which has as many bytes.
"""

import re
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

LENGTH_LEN: Final = 4
FRAME_LEN_MAX: Final = 64 * 1024 * 1024
CONNECT: Final = -(2**40)
"""Stands for the number that ZooKeeper's first frame does not have."""

ZOOKEEPER_KINDS: Final[Mapping[int, str]] = {
    1: "create", 2: "delete", 3: "exists", 4: "get", 5: "set", 8: "children", 9: "sync",
    11: "ping", 12: "children", 14: "multi", 15: "create", 100: "auth", 101: "set_watches",
    -11: "close",
}  # fmt: skip
KAFKA_KINDS: Final[Mapping[int, str]] = {
    0: "produce", 1: "fetch", 2: "list_offsets", 3: "metadata", 8: "commit", 9: "fetch_offsets",
    10: "find_coordinator", 11: "join_group", 12: "heartbeat", 13: "leave_group",
    14: "sync_group", 17: "sasl", 18: "api_versions", 19: "create_topics", 22: "producer_id",
    32: "describe_configs", 36: "sasl", 37: "create_partitions", 60: "describe_cluster",
}  # fmt: skip
IDLE: Final = frozenset(
    {("zookeeper", "ping"), ("kafka", "fetch"), ("kafka", "heartbeat"), ("kafka", "metadata")}
)
"""What clients send all the time, whether or not there is work."""


class Request(NamedTuple):
    """One request: its number on its connection, what it is, and what it is about."""

    number: int
    kind: str
    about: str = ""


class Framing(Protocol):
    """A protocol whose frames begin with their length."""

    def request(self, frame: bytes, *, first: bool) -> Request:
        """Say what a client's frame is."""
        ...

    def reply_to(self, frame: bytes, *, first: bool) -> int | None:
        """Return the number of the request that a server's frame answers; None: of none."""
        ...

    def for_client(self, frame: bytes) -> bytes:
        """Return a reply as the client is to see it."""
        ...


class ZooKeeperFraming:
    """Jute frames."""

    def request(self, frame: bytes, *, first: bool) -> Request:
        if first:
            return Request(CONNECT, "connect")
        xid, kind = struct.unpack_from(">ii", frame)
        name = ZOOKEEPER_KINDS.get(kind, f"type {kind}")
        return Request(xid, name, _path(frame[8:]) if kind > 0 else "")

    def reply_to(self, frame: bytes, *, first: bool) -> int | None:
        if first:
            return CONNECT
        xid: int = struct.unpack_from(">i", frame)[0]
        return None if xid == -1 else xid

    def for_client(self, frame: bytes) -> bytes:
        return frame


def _path(body: bytes) -> str:
    """Return the path that most requests begin with."""
    if len(body) < LENGTH_LEN:
        return ""
    length: int = struct.unpack_from(">i", body)[0]
    if not 0 < length <= len(body) - LENGTH_LEN:
        return ""
    return body[LENGTH_LEN : LENGTH_LEN + length].decode("utf-8", "replace")


class KafkaFraming:
    """Kafka's frames; ``broker`` is what replies name, ``proxy`` what the client is to see."""

    def __init__(self, broker: tuple[str, int], proxy: tuple[str, int]) -> None:
        self._broker, self._proxy = _address(*broker), _address(*proxy)
        assert len(self._broker) == len(self._proxy), "another length would move what follows"

    def request(self, frame: bytes, *, first: bool) -> Request:
        del first
        key, _, number = struct.unpack_from(">hhi", frame)
        return Request(number, KAFKA_KINDS.get(key, f"api {key}"))

    def reply_to(self, frame: bytes, *, first: bool) -> int | None:
        del first
        number: int = struct.unpack_from(">i", frame)[0]
        return number

    def for_client(self, frame: bytes) -> bytes:
        return frame.replace(self._broker, self._proxy)


def _address(host: str, port: int) -> bytes:
    return host.encode("ascii") + struct.pack(">i", port)


# HTTP

_LENGTH: Final = re.compile(r"(?i)\r\ncontent-length: *(\d+)")
_EXPECT: Final = re.compile(r"(?i)\r\nexpect:[^\r]*")
_CONNECTION: Final = re.compile(r"(?i)\r\nconnection:[^\r]*")
_S3_BY_QUERY: Final[Mapping[tuple[str, str], str]] = {
    ("POST", "uploads"): "create_upload",
    ("POST", "uploadId"): "complete_upload",
    ("POST", "delete"): "delete_many",
    ("PUT", "partNumber"): "upload_part",
    ("DELETE", "uploadId"): "abort_upload",
    ("GET", "uploads"): "list_uploads",
    ("GET", "list-type"): "list",
}
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})


class HttpRequest(NamedTuple):
    """The head of an HTTP request."""

    kind: str
    about: str
    body_len: int
    expects: bool
    repeatable: bool
    head: bytes
    """As it is sent on: the server is to close the connection behind its answer."""


def parse_http(head: bytes) -> HttpRequest:
    """Say what a request is; ``head`` ends with the empty line."""
    text = head.decode("latin-1")
    method, target, _ = text.split("\r\n", 1)[0].split(" ", 2)
    split = urlsplit(target)
    query = parse_qs(split.query, keep_blank_values=True)
    named = [n for (verb, key), n in _S3_BY_QUERY.items() if verb == method and key in query]
    sized = _LENGTH.search(text)
    onward = _CONNECTION.sub("", _EXPECT.sub("", text))
    return HttpRequest(
        kind=named[0] if named else method.lower(),
        about=unquote(split.path),
        body_len=int(sized[1]) if sized else 0,
        expects=_EXPECT.search(text) is not None,
        repeatable=method in _IDEMPOTENT and "if-none-match" not in text.lower(),
        head=onward[:-2].encode("latin-1") + b"Connection: close\r\n\r\n",
    )
