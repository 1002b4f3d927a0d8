"""seeds/004 over real processes: producers and owners are killed, events are there once."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import ClassVar
from uuid import UUID

import orjson
import pytest

from tierlog.client import Client, open_client
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.core_attributes import CORE_NAMES
from tierlog.model.errors import IndeterminateError
from tierlog.model.policy import Policy
from tierlog.wiring.client import ClientConnections, open_client_connections

pytestmark = pytest.mark.integration

COUNT = 400_000
EVENTS = UUID(bytes=bytes(EVENT_COUNT))
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "resume-a-writer.md"


def line(number: int) -> bytes:
    return b"%07d %s" % (number, b"x" * 60)


async def tierlog(*arguments: str, state_dir: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tierlog.cli.main", *arguments),
        env={**os.environ, "TIERLOG_STATE_DIR": str(state_dir)},
        stdout=PIPE,
        stderr=PIPE,
    )


async def payloads(client, stream):
    return [event.payload async for event in client.reader(stream).events()]


async def append_and_kill(cluster, client, stream, arguments, *, more):
    """Append, and kill the producer once so many more events are there, with some on their way."""
    process = await tierlog(*arguments, state_dir=cluster.state_dir)
    attributes = client.attributes(stream)
    begun = (await attributes.get([EVENTS])).get(EVENTS, 0)

    async def is_far_enough():
        return (await attributes.get([EVENTS])).get(EVENTS, 0) >= begun + more

    try:
        await cluster.until(is_far_enough, what=f"{more} events")
    finally:
        process.send_signal(signal.SIGKILL)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (-signal.SIGKILL, b""), "it was not done yet"


@pytest.mark.covers("E03", "E04")
async def test_a_producer_that_is_killed_in_mid_append_goes_on_from_its_state(cluster, tmp_path):
    source, state = tmp_path / "events", tmp_path / "state"
    source.write_bytes(b"".join(line(number) + b"\n" for number in range(COUNT)))
    arguments = ("append", "resumed", str(source), "--state", str(state), "-o", "json")
    async with open_client(cluster.settings) as client:
        await client.create_stream("resumed", policy=Policy(ledger_bytes_max=4_000_000))
        for more in (1, 20_000, 50_000):
            await append_and_kill(cluster, client, "resumed", arguments, more=more)
        last = await tierlog(*arguments, state_dir=cluster.state_dir)
        out, err = await last.communicate()
        assert last.returncode == 0, err.decode()
        done = orjson.loads(out)
        assert done["events"] + done["passed_over"] == COUNT
        assert done["passed_over"] > 70_000
        assert done["writer_id"] == orjson.loads(state.read_bytes())["writer_id"]
        found = await payloads(client, "resumed")
        assert found == [line(number) for number in range(COUNT)]
        writer = UUID(done["writer_id"])
        assert await client.attributes("resumed").get([writer, EVENTS]) == {
            writer: COUNT,
            EVENTS: COUNT,
        }


class Losing:
    """A connection to an owner that loses each seventh answer, once the append is there."""

    def __init__(self, channel, lost):
        self._channel, self._lost, self._count = channel, lost, 0

    async def append(self, stream, draft, *, deadline_s, condition=None):
        self._count += 1
        number = self._count
        ranges = await self._channel.append(
            stream, draft, deadline_s=deadline_s, condition=condition
        )
        if number % 7 == 0:
            self._lost.append(ranges)
            raise IndeterminateError("the answer was lost", remedy="Send it again")
        return ranges

    async def close(self, *, drain_s_max=5.0):
        await self._channel.close(drain_s_max=drain_s_max)


class LosingConnections(ClientConnections):
    """The connections of a client whose answers get lost."""

    lost: ClassVar[list[object]] = []

    async def connect_owner(self, owner, tasks):
        return Losing(await super().connect_owner(owner, tasks), self.lost)


@pytest.mark.covers("E02", "E03", "E04")
async def test_lost_answers_and_killed_owners_lose_repeat_and_reorder_nothing(cluster):
    addresses = {
        "ingest_grpc": cluster.address("ingest", "grpc"),
        "reader_http": cluster.address("reader", "http"),
        "scheduler_http": cluster.address("scheduler", "http"),
    }
    async with open_client_connections(cluster.settings, **addresses) as connections:
        fields = {
            one.name: getattr(connections, one.name) for one in dataclasses.fields(connections)
        }
        client = Client(LosingConnections(**fields))
        await client.create_stream("owner-killed", policy=Policy(ledger_bytes_max=1_000_000))
        killed = 0
        async with client.writer("owner-killed", batch_bytes=2000) as writer:
            for number in range(30_000):
                await writer.send(line(number))
                if number % 10_000 == 5_000 and writer.in_flight_events:
                    cluster.kill("ingest")
                    killed += 1
                    await cluster.restart("ingest")
            await writer.flush()
        assert (killed, writer.acked_events) == (3, 30_000)
        assert len(LosingConnections.lost) > 20
        assert writer.resolved_count > 10
        assert await payloads(client, "owner-killed") == [line(one) for one in range(30_000)]


async def test_the_guide_to_resuming_runs(cluster, tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL))
    assert "new_writer_state" in code
    for there in (b"0", b"1000"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code),
            env={**os.environ, "TIERLOG_STATE_DIR": str(cluster.state_dir)},
            cwd=tmp_path,
            stdout=PIPE,
            stderr=PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        first, one, other = (row for row in out.splitlines() if b"there" in row)
        assert first == there + b" events are there"
        known = b"200 were there, 0 are new"
        assert (one, other) == (known if there == b"1000" else b"0 were there, 200 are new", known)


async def run_json(cli, *arguments, state_dir, stdin=b"", code=0, words=()):
    done = (await cli(*arguments, "-o", "json", state_dir=state_dir, stdin=stdin)).check(
        code, *words
    )
    return orjson.loads(done.stdout) if code == 0 else None


@pytest.mark.covers("E09", "E12", "E13")
async def test_attributes_on_the_command_line(cli, cluster):
    where = {"state_dir": cluster.state_dir}
    one, other = str(UUID(int=1 << 100)), str(UUID(int=(1 << 100) + 1))
    made = await run_json(cli, "attributes", "set", "kept", f"{one}=7", f"{other}=-3", **where)
    assert made["updated"] == 2
    found = await run_json(cli, "attributes", "get", "kept", one, "event-count", **where)
    assert found == [
        {"key": one, "name": None, "value": 7},
        {"key": str(EVENTS), "name": "event-count", "value": 0},
    ]
    verbs = {
        "replace-if-greater": ("8", (), "8"),
        "replace-if-equals": ("20", ("--expected", "8"), "20"),
        "accumulate": ("5", (), "25"),
    }
    for verb, (value, more, after) in verbs.items():
        given = ("attributes", "set", "kept", f"{one}={value}", "--verb", verb, *more)
        await run_json(cli, *given, **where)
        (row,) = await run_json(cli, "attributes", "get", "kept", one, **where)
        assert row["value"] == int(after)
    for verb, more in {
        "replace-if-greater": (),
        "replace-if-equals": ("--expected", "8"),
        "replace-if-absent": (),
    }.items():
        # All or none: the other one would hold.
        given = ("attributes", "set", "kept", f"{one}=9", "--verb", verb, *more)
        await run_json(cli, *given, **where, code=4, words=("CONDITIONAL_APPEND_FAILED",))
    await run_json(cli, "append", "kept", **where, stdin=b"a\nb\n")
    listed = await run_json(cli, "attributes", "list", "kept", "--from", one, **where)
    assert [(row["key"], row["value"]) for row in listed[:2]] == [(one, 25), (other, -3)]
    (row,) = await run_json(cli, "attributes", "list", "kept", "-n", "1", **where)
    assert (row["name"], row["value"]) == ("event-count", 2)
    core = ("attributes", "set", "kept", "event-count=1")
    await run_json(cli, *core, **where, code=2, words=("core attribute",))
    names = ("scale-policy-type", "roll-over-entries", "index-root-offset")
    for name in names:
        core = ("attributes", "set", "kept", f"{name}=1")
        await run_json(cli, *core, **where, code=2, words=(f"{name} is a core attribute",))
    await run_json(cli, "policy", "set", "kept", "--ledger-entries-max", "77", **where)
    found = await run_json(cli, "attributes", "get", "kept", *names[:2], **where)
    assert [(row["name"], row["value"]) for row in found] == [(names[0], 0), (names[1], 77)]
    between = ("--from", "roll-over-bytes", "--to", "roll-over-age-ms")
    found = await run_json(cli, "attributes", "list", "kept", *between, **where)
    assert [row["name"] for row in found] == [
        "roll-over-bytes",
        "roll-over-entries",
        "roll-over-age-ms",
    ]
    table = (await cli("attributes", "list", "kept", state_dir=cluster.state_dir)).check(0).stdout
    assert all(name.encode() in table for name in CORE_NAMES.values())
    # Entries that changed attributes alone have no events, and count for no limit.
    done = (await cli("read", "kept", "-n", "1", state_dir=cluster.state_dir)).check(0)
    assert done.stdout == b"a\n"


async def test_one_append_under_a_condition_on_the_command_line(cli, cluster):
    where = {"state_dir": cluster.state_dir}
    first = await run_json(cli, "append", "one", "--if-after", "earliest", **where, stdin=b"a\nb\n")
    again = ("append", "one", "--if-after", "earliest")
    await run_json(cli, *again, **where, stdin=b"c", code=4, words=(first["last_position"],))
    behind = ("append", "one", "--if-after", first["last_position"])
    assert (await run_json(cli, *behind, **where, stdin=b"c"))["events"] == 1
    writer = str(UUID(int=(5 << 100) + 5))
    given = ("append", "one", "--writer-id", writer, "--if-last-event-number")
    done = await run_json(cli, *given, "0", **where, stdin=b"d\ne\n")
    assert done["last_event_number"] == 2
    # A number says what is there, not who sent it: nothing is acknowledged by an earlier command's.
    await run_json(cli, *given, "0", **where, stdin=b"d\ne\n", code=4, words=("is 2, not 0",))
    await run_json(cli, *given, "5", **where, stdin=b"f", code=4, words=("is 2, not 5",))
    done = (await cli("read", "one", state_dir=cluster.state_dir)).check(0)
    assert done.stdout == b"a\nb\nc\nd\ne\n"


async def test_perf_tells_what_it_measured(cli, cluster):
    where = {"state_dir": cluster.state_dir}
    given = ("perf", "write", "load", "--duration", "1", "--warmup", "0.2", "--producers", "3")
    for kind in ("--conditional", "--plain"):
        (row,) = await run_json(cli, *given, kind, **where)
        assert row["conditional"] is (kind == "--conditional")
        assert row["events"] > 100
        assert row["bytes"] == 100 * row["events"]
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["p999_ms"] <= row["max_ms"]
    paced = (*given, "--rate", "1000", "--batch-events", "10")
    (row,) = await run_json(cli, *paced, **where)
    assert 800 <= row["events_per_s"] <= 1200
    (row,) = await run_json(cli, "perf", "read", "load", "--duration", "0.5", **where)
    assert row["events"] > 0
    done = (await cli(*given, state_dir=cluster.state_dir)).check(0)
    assert b"p999 ms" in done.stdout
