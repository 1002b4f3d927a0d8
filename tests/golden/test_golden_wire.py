"""A message of two runs and its answer, byte for byte, by hand.

From the tables of ``tierlog.wire.codec`` and ``tierlog.format.run``, and from protobuf's encoding
of ``WireFrame``. Checksums were computed bit by bit from the polynomial, not by this repository's
code. Never regenerate these bytes from the code.
"""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.format.versions import Format, current
from tierlog.model.ids import NodeId
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.codec import FrameDecoder, encode_head
from tierlog.wire.connection import ClientLimits, WireClient
from tierlog.wire.messages import Welcome
from tierlog.wire.server import WireServer

CLUSTER = UUID(bytes=b"clusterclusterid")
FIRST_RUN = bytes.fromhex(
    "544c524e 01 00 0050"  # 0  magic "TLRN", version, flags, header_len 80
    "00000001 00000010"  #   8  count 1, frames_len 16
    "0000000000000009"  #   16  ledger_id 9
    "0000000000000004"  #   24  first_entry_id 4
    "0000000000000003"  #   32  last_add_confirmed 3
    "0000000000000002"  #   40  owner_epoch 2
    "0000018bcfe56800"  #   48  publish_ms_min
    "0000018bcfe56801"  #   56  publish_ms_max
    "0000000000000064"  #   64  ledger_len 100
    "00000000 7bc16084"  #  72  zeros, crc32c
    "00000000"  #           80  offset of the frame
    "00000004 0000000000000004 31323334"  # entry 4, "1234"
)
SECOND_RUN = bytes.fromhex(
    "544c524e 01 00 0050 00000001 0000000d"  # frames_len 13
    "000000000000000a 0000000000000000"  #     ledger_id 10, first_entry_id 0
    "ffffffffffffffff 0000000000000007"  #     last_add_confirmed -1, owner_epoch 7
    "0000000000000000 0000000000000000"  #     no publish times
    "0000000000000001 00000000 9416c571"  #    ledger_len 1, zeros, crc32c
    "00000000"
    "00000001 0000000000000000 58"  #          entry 0, "X"
)
MESSAGE = (
    bytes.fromhex(
        "000000d1"  #      0  frame_len: 4 + 8 + 100 + 97
        "00000008"  #      4  header_len
        "08 01"  #         8  request_id (1, varint): 1
        "3a 04 08 02 10 01"  # add_runs (7, 4 bytes): count (1) 2, recovery (2) true
    )
    + FIRST_RUN
    + SECOND_RUN
)
ANSWER = bytes.fromhex(
    "0000000a 00000006"  # frame_len 4 + 6, header_len
    "08 02 10 01 52 00"  # request_id (1) 2, cumulative (2) true, added (10) empty
)
HELLO = bytes.fromhex(
    "00000021 0000001d"
    "1a 1b"  # hello (3, 27 bytes):
    "08 03"  # version (1) 3
    "12 10 636c7573746572636c75737465726964"  # cluster_id (2)
    "1a 05 6f776e6572"  # role (3) "owner"
)


class Script:
    """A channel whose other side says what was written down, and then nothing."""

    def __init__(self, said=b""):
        self.peer, self.frame_len_max = "peer", 1_000_000
        self.certificate_names = ()
        self.sent = bytearray()
        self._decoder = FrameDecoder()
        self._decoder.feed(said)
        self._closed = asyncio.Event()

    def send(self, header, body=()):
        head = encode_head(header_len=len(header), body_len=sum(map(len, body)))
        self.sent += b"".join((head, header, *body))

    async def drain(self):
        """Everything is taken."""

    async def receive(self):
        await asyncio.sleep(0.1)
        if self._decoder.frames:
            return self._decoder.frames.popleft()
        await self._closed.wait()
        return None

    def hang_up(self):
        self.close()

    def close(self):
        self._closed.set()


def runs():
    return [
        build_run(
            *pack_entries([b"1234"], 4),
            ledger_id=9,
            first_entry_id=4,
            last_add_confirmed=3,
            owner_epoch=2,
            publish_ms_min=0x18BCFE56800,
            publish_ms_max=0x18BCFE56801,
            ledger_len=100,
        ),
        build_run(*pack_entries([b"X"]), ledger_id=10, owner_epoch=7, ledger_len=1),
    ]


def test_runs_that_wait_together_are_sent_so():
    async def main():
        channel = Script(ANSWER)
        welcome = Welcome(node_id=NodeId("n"), credit_bytes=10**6, frame_len_max=10**6)
        client = WireClient(channel, welcome, ClientLimits())
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(client._read())
            answers = [client.add(run, recovery=True) for run in runs()]
            for answer in answers:
                await answer
            await client.close()
            await reading
        assert bytes(channel.sent) == MESSAGE

    run_virtual(main())


class Handler:
    """Stores nothing, at once."""

    def __init__(self):
        self.seen = []

    async def ready(self, *, appends):
        """It always is."""

    def append(self, stream, draft, *, deadline_s, condition):
        raise AssertionError((stream, draft, deadline_s))

    def lac(self, ledger_id, last_add_confirmed):
        raise AssertionError((ledger_id, last_add_confirmed))

    def add_run(self, run, *, recovery):
        self.seen.append((run, recovery))
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        return answer


def test_they_are_taken_and_answered_so():
    async def main():
        handler, channel = Handler(), Script(HELLO + MESSAGE)
        server = WireServer(
            handler, cluster_id=CLUSTER, node_id=NodeId("n"), authenticator=OpenAuthenticator()
        )
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(channel))
            await asyncio.sleep(1)
            channel.close()
            await serving
        assert handler.seen == [(run, True) for run in runs()]
        assert [bytes(run.encoded) for run, _ in handler.seen] == [FIRST_RUN, SECOND_RUN]
        welcome = FrameDecoder()
        welcome.feed(channel.sent)
        assert bytes(channel.sent).endswith(ANSWER)
        assert len(welcome.frames) == 2

    run_virtual(main())


@pytest.mark.parametrize("version", [1, 2])
def test_a_peer_of_an_older_version_is_told_so_in_its_hello(version):
    async def main():
        old = HELLO.replace(b"\x08\x03\x12", bytes([8, version, 0x12]))
        handler, channel = Handler(), Script(old + MESSAGE)
        server = WireServer(
            handler, cluster_id=CLUSTER, node_id=NodeId("n"), authenticator=OpenAuthenticator()
        )
        await server.serve(channel)
        assert not handler.seen
        assert f"version {version}".encode() in channel.sent

    assert current(Format.WIRE) == 3
    run_virtual(main())
