"""A Produce request by hand: what no client library would send, and every broker takes.

request   length i32, api 0 i16, version 3 i16, correlation i32, client id (string),
          transactional id (-1 i16), acks i16, timeout i32,
          topics (i32): name, partitions (i32): number i32, records (bytes)
batch     base offset i64, length i32, leader epoch i32, magic 2 i8, CRC-32C u32 of what follows,
          attributes i16, last offset delta i32, times i64 i64, producer i64 i16 i32,
          records (i32): length, 0 i8, time delta, offset delta, key, value, headers
"""

import asyncio
import struct
import time
from collections.abc import Sequence

from tierlog.format.checksum import crc32c


def varint(number: int) -> bytes:
    """Return a signed number as records have it."""
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*out, left])


def counted(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def batch_of(
    key: bytes | None, value: bytes | None, headers: Sequence[tuple[bytes, bytes | None]]
) -> bytes:
    """Return a batch of one record."""
    now_ms = round(time.time() * 1000)
    body = b"\0" + varint(0) + varint(0) + counted(key) + counted(value) + varint(len(headers))
    for name, content in headers:
        body += counted(name) + counted(content)
    record = varint(len(body)) + body
    rest = struct.pack(">hiqqqhii", 0, 0, now_ms, now_ms, -1, -1, -1, 1) + record
    checked = struct.pack(">I", crc32c(rest)) + rest
    return struct.pack(">qiib", 0, 4 + 1 + len(checked), -1, 2) + checked


async def produce(
    bootstrap: str,
    topic: str,
    partition: int,
    *,
    key: bytes | None = None,
    value: bytes | None = None,
    headers: Sequence[tuple[bytes, bytes | None]] = (),
) -> None:
    """Have the one broker of a test take one record."""
    records = batch_of(key, value, headers)
    name = topic.encode()
    body = struct.pack(">hhih", 0, 3, 1, 3) + b"raw" + struct.pack(">hhi", -1, -1, 10_000)
    body += struct.pack(">ih", 1, len(name)) + name
    body += struct.pack(">iii", 1, partition, len(records)) + records
    host, port = bootstrap.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(struct.pack(">i", len(body)) + body)
        (length,) = struct.unpack(">i", await reader.readexactly(4))
        answer = await reader.readexactly(length)
    finally:
        writer.close()
        await writer.wait_closed()
    # correlation i32, topics i32, name, partitions i32, partition i32, error i16, …
    _, error = struct.unpack_from(">ih", answer, 4 + 4 + 2 + len(name) + 4)
    assert error == 0, f"the broker's error code is {error}"
