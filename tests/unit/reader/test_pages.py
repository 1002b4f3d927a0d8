"""Entries over HTTP: pages, their types, following, ranges of raw ledgers, times, explanations."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from tests.unit.compression.test_compressed_events import COMPRESSORS, packed
from tests.unit.reader.asgi import AsgiClient
from tests.unit.reader.test_source import numbered
from tests.unit.reader.test_tail import closed, tails_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time
from tierlog.adapters.memory.clock import SimClock
from tierlog.cli.read import document_of as cli_document_of
from tierlog.client.reading import ReadEntry, events_of
from tierlog.format.entry import Codec, StructuredEvent, encode_entry
from tierlog.model.access import Grant, Role
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.ports.access import TokenClaims
from tierlog.runtime.access import Gate
from tierlog.runtime.http import build_http_app
from tierlog.runtime.http_access import guard_http
from tierlog.wiring.compression import decompressors
from tierlog_reader.access import HTTP_RULES
from tierlog_reader.app import add_all_routes
from tierlog_reader.documents import (
    ARROW,
    BODY_TYPES,
    NDJSON,
    OCTETS,
    FoundEntry,
    Unpacking,
    document_of,
    wanted_type,
)
from tierlog_reader.documents import events_of as found_events_of
from tierlog_reader.http_entries import COPIES
from tierlog_reader.limits import ReadLimits
from tierlog_reader.pages import read_page
from tierlog_reader.seek import TimeSeek
from tierlog_reader.served import ROOM_BYTES_MIN, ServedReads
from tierlog_reader.shares import Shares
from tierlog_reader.trace import tracing

MIB = 1024 * 1024
URL = f"/v1/streams/{STREAM}"
RAW = numbered(0, 30)
UNPACKING = Unpacking(decompressors=decompressors(), events_len_max=MIB)


def stamped(number: int, publish_ms: int, **named) -> bytes:
    event = StructuredEvent(payload=b"event %d" % number, **named)
    return encode_entry([event], publish_time_ms=publish_ms)


@asynccontextmanager
async def served(
    world, *, tails=None, room_bytes=64 * MIB, send_s_max=30.0, gate=None, wait_ms_max=30_000
):
    """Give an HTTP client of the reader's own routes, without a socket, and its shares."""
    shares = Shares(room_bytes, wait_s_max=5)
    limits = ReadLimits(response_bytes_max=MIB, wait_ms_max=wait_ms_max, send_s_max=send_s_max)
    async with world.reader(tails=tails or tails_of()) as source:
        app = build_http_app("reader", checks={})
        reads = ServedReads(source, shares)
        add_all_routes(app, reads, TimeSeek(reads), limits, UNPACKING)
        guard_http(app, HTTP_RULES, gate)
        yield AsgiClient(app), shares


async def two_tiers(entries, *, raw=False):
    """Half of the entries in tier 2 alone, the rest in an open ledger."""
    world = ReaderWorld()
    await world.start(raw=raw)
    half = len(entries) // 2
    first = await world.sealed(entries[:half])
    await world.offloaded(first)
    await world.gone_locally(first)
    second = await world.opened(entries[half:])
    return world, first, second


ENTRIES = [
    stamped(number, 1_000_000 + 10 * number, key=b"k%d" % number, properties={"a": "b"})
    for number in range(30)
]


@on_virtual_time
async def test_pages_go_on_with_their_token_over_ledgers_and_tiers():
    world, first, second = await two_tiers(ENTRIES)
    async with served(world) as (client, shares):
        token, found, sizes = "earliest", [], []
        while True:
            answer = await client.get(f"{URL}/entries", params={"from": token, "limit": 7})
            assert shares.used_bytes == 0, "room is given back once it was sent"
            token = answer.headers["Tierlog-Next"]
            if answer.status_code == 204:
                break
            lines = [json.loads(line) for line in answer.text.splitlines()]
            sizes.append(len(lines))
            found += lines
        assert sizes == [7, 7, 7, 7, 2]
        assert [one["payload"] for one in found] == [f"event {n}" for n in range(30)]
        assert [one["tier"] for one in found] == ["tier2"] * 15 + ["tier1"] * 15
        assert found[0]["position"] == f"{first}:0"
        assert found[-1]["position"] == f"{second}:14"
        assert token == f"{second}:15"
        until = await client.get(
            f"{URL}/entries", params={"from": f"{first}:13", "to": f"{second}:2"}
        )
        assert [json.loads(line)["position"] for line in until.text.splitlines()] == [
            f"{first}:13", f"{first}:14", f"{second}:0", f"{second}:1",
        ]  # fmt: skip
        few = await client.get(f"{URL}/entries", params={"bytes_max": 1})
        assert few.headers["Tierlog-Entry-Count"] == "1"


@on_virtual_time
async def test_each_type_has_the_same_events():
    world, *_ = await two_tiers(ENTRIES)
    payloads = [f"event {n}".encode() for n in range(30)]
    async with served(world) as (client, _):
        answers = {
            kind: await client.get(f"{URL}/entries", headers={"Accept": kind})
            for kind in BODY_TYPES
        }
    for kind, answer in answers.items():
        assert answer.headers["Content-Type"] == kind
        assert answer.headers["Tierlog-Tier"] == "tier1,tier2"
    octets, found = answers[OCTETS].content, []
    while octets:
        length = int.from_bytes(octets[:4], "big")
        found.append(octets[4 : 4 + length])
        octets = octets[4 + length :]
    assert found == payloads
    table = pa.ipc.open_stream(answers[ARROW].content).read_all()
    assert table.column("payload").to_pylist() == payloads
    assert table.column("key").to_pylist() == [b"k%d" % n for n in range(30)]
    published = table.column("publish_time").to_pylist()
    assert published[3] == datetime.fromtimestamp(1000.03, UTC)
    assert table.column("entry_id").to_pylist() == [*range(15), *range(15)]
    assert len(answers[NDJSON].text.splitlines()) == 30


@on_virtual_time
@pytest.mark.parametrize("codec", COMPRESSORS)
async def test_compressed_events_are_served_as_plain_ones(codec):
    def entries(codec):
        return [packed(codec, [b"%d" % n * 40, b"\xff" * 9]) for n in range(6)]

    async def told(entries):
        world, *_ = await two_tiers(entries)
        async with served(world) as (client, shares):
            bodies = [
                (await client.get(f"{URL}/entries", headers={"Accept": kind})).content
                for kind in BODY_TYPES
            ]
            following = {"Accept": "text/event-stream"}
            events = await client.get(f"{URL}/entries", params={"limit": 6}, headers=following)
            assert shares.used_bytes == 0
        return [*bodies, events.content]

    assert await told(entries(codec)) == await told(entries(Codec.NONE))


@on_virtual_time
@pytest.mark.parametrize("codec", COMPRESSORS)
async def test_a_page_is_as_long_as_its_events_are_decompressed(codec):
    long, short = packed(codec, [bytes(30_000)]), packed(codec, [bytes(300_000)])
    world, *_ = await two_tiers([*[long] * 4, short, *[long] * 3])
    async with served(world) as (client, shares):
        found, token = [], "earliest"
        while True:
            asked = {"from": token, "bytes_max": ROOM_BYTES_MIN}
            answer = await client.get(f"{URL}/entries", params=asked, headers={"Accept": OCTETS})
            token = answer.headers["Tierlog-Next"]
            if answer.status_code == 204:
                break
            found.append(len(answer.content))
            assert shares.used_bytes == 0
    # Two of them fit into what was asked for; one that is longer alone gets room for itself.
    assert found == [2 * 30_004, 2 * 30_004, 300_004, 2 * 30_004, 30_004]
    assert shares.most_used_bytes >= COPIES[OCTETS] * 300_004


@on_virtual_time
@pytest.mark.parametrize("codec", COMPRESSORS)
async def test_events_that_would_take_all_memory_are_refused(codec):
    bomb, good = packed(codec, [bytes(20 * MIB)]), packed(codec, [b"good"])
    world, _, second = await two_tiers([good, bomb, good])
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/entries", params={"from": f"{second}:0", "limit": 1})
        assert shares.used_bytes == 0
        assert shares.most_used_bytes < shares.bytes_max, "no room is taken for what is refused"
        after = await client.get(f"{URL}/entries", params={"from": f"{second}:1"})
    assert answer.json()["reason"] == "TOO_LARGE"
    assert f"{second}:0" in answer.text
    assert json.loads(after.text)["payload"] == "good"


def test_a_line_is_what_the_command_line_prints():
    binary = encode_entry([b"\xff\x00", b"plain"], publish_time_ms=7)
    for data, raw in ((ENTRIES[3], False), (binary, False), (b"just bytes", True)):
        where = at(3, 4)
        entry = FoundEntry(position=where, data=data, tier="tier2", raw=raw)
        mine = [document_of(one) for one in found_events_of(entry, UNPACKING)]
        theirs = events_of(
            ReadEntry(where.ledger_id, where.entry_id, memoryview(data), "tier2", raw)
        )
        assert mine == [cli_document_of(one) for one in theirs]
    bad = FoundEntry(position=at(3, 4), data=b"x" * 40, tier="t", raw=False)
    with pytest.raises(CorruptError) as caught:
        list(found_events_of(bad, UNPACKING))
    assert caught.value.details["position"] == "3:4"


def test_the_best_type_is_chosen_and_unknown_ones_are_refused():
    cases = {
        None: NDJSON,
        "*/*": NDJSON,
        "application/*": NDJSON,
        ARROW: ARROW,
        f"text/html, {OCTETS};q=0.5, {ARROW};q=0.9": ARROW,
        f"{NDJSON};q=0, {OCTETS}": OCTETS,
        f"*/*, {NDJSON};q=0": OCTETS,
        f"application/*;q=0.5, {OCTETS};Q=0.1, {NDJSON};Q=0.2": ARROW,
        f"{OCTETS}, {NDJSON}": OCTETS,
    }
    for accept, kind in cases.items():
        assert wanted_type(accept, BODY_TYPES) == kind, accept
    for accept in ("text/html", f"{NDJSON};q=0", f"{NDJSON};q=nan", "nonsense"):
        with pytest.raises(RefusedError) as caught:
            wanted_type(accept, BODY_TYPES)
        assert ARROW in caught.value.remedy


async def _events(client, world, count, *, headers=None, **params):
    """Follow with server-sent events until so many came; return token and document of each."""
    found, token = [], None
    headers = {"Accept": "text/event-stream", **(headers or {})}
    pages = {"limit": count, **params}
    answer = await client.get(f"{URL}/entries", params=pages, headers=headers)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    for message in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in message.splitlines() if ": " in line)
        if "data" in fields:
            token = fields.get("id", token)
            found.append((token, json.loads(fields["data"])))
    return found


@on_virtual_time
async def test_server_sent_events_follow_into_the_tail_and_go_on_with_the_last_event_id():
    world, first, second = await two_tiers(ENTRIES[:20])
    async with served(world) as (client, shares), asyncio.TaskGroup() as group:
        following = group.create_task(_events(client, world, 30))
        await asyncio.sleep(3)
        assert shares.used_bytes == 0, "who waits at the tail holds no room"
        for number in range(20, 30):
            await world.write(second, [ENTRIES[number]], first=number - 10)
            await asyncio.sleep(0.3)
        found = await following
        assert [one["payload"] for _, one in found] == [f"event {n}" for n in range(30)]
        assert found[4][0] == f"{first}:5"
        again = await _events(
            client, world, 25, headers={"Last-Event-ID": found[4][0]}, **{"from": "latest"}
        )
        assert [one["payload"] for _, one in again] == [f"event {n}" for n in range(5, 30)]


@on_virtual_time
async def test_a_problem_ends_what_is_followed_and_is_told():
    world, *_ = await two_tiers(ENTRIES)
    async with served(world) as (client, shares):
        headers = {"Accept": "text/event-stream"}
        answer = await client.get(f"{URL}/entries", params={"from": "999:0"}, headers=headers)
        assert "event: error" in answer.text
        assert '"reason":"LEDGER_NOT_FOUND"' in answer.text
        assert shares.used_bytes == 0


class OneToken:
    """Believes every token until a time."""

    def __init__(self, until_ms: int) -> None:
        self._until_ms = until_ms

    def verify(self, token: str) -> TokenClaims:
        grant = Grant(roles=frozenset({Role.CONSUMER}), streams=("*",))
        return TokenClaims("alice", grant, self._until_ms)


@on_virtual_time
async def test_what_is_followed_ends_with_the_token_that_was_shown():
    world, *_ = await two_tiers(ENTRIES)
    clock = SimClock()
    began_ms = clock.wall_ms()
    verifier = OneToken(began_ms + 60_000)
    gate = Gate(grants={}, verifier=verifier, clock=clock, actions_per_s=1)
    async with served(world, gate=gate) as (client, shares), asyncio.timeout(300):
        headers = {"Accept": "text/event-stream", "Authorization": "Bearer x"}
        answer = await client.get(f"{URL}/entries", headers=headers)
        assert 60_000 <= clock.wall_ms() - began_ms <= 75_000
        assert answer.text.count("\ndata: ") == len(ENTRIES) + 1
        assert "event: error" in answer.text
        assert '"reason":"UNAUTHENTICATED"' in answer.text
        assert shares.used_bytes == 0


@on_virtual_time
async def test_ranges_of_a_raw_ledger():
    world, first, second = await two_tiers(RAW, raw=True)
    async with served(world) as (client, shares):
        url = f"{URL}/ledgers/{first}"
        # A range in units that nobody knows here is as none (RFC 9110, 14.2).
        for unasked in ({}, {"Range": "bytes=0-5"}, {"Range": "bytes=3-, -5"}):
            whole = await client.get(url, headers=unasked)
            assert (whole.status_code, whole.content) == (200, b"".join(RAW[:15]))
            assert whole.headers["Tierlog-Next"] == f"{first}:15"
            assert whole.headers["Accept-Ranges"] == "entries"
            assert "Content-Range" not in whole.headers
        for asked in ("entries=3-5", "Entries=3-5"):
            part = await client.get(url, headers={"Range": asked})
            assert (part.status_code, part.content) == (206, b"".join(RAW[3:6]))
            assert part.headers["Content-Range"] == "entries 3-5/15"
        rest = await client.get(url, headers={"Range": "entries=13-99"})
        assert (rest.content, rest.headers["Content-Range"]) == (
            b"".join(RAW[13:15]),
            "entries 13-14/15",
        )
        still_open = await client.get(f"{URL}/ledgers/{second}", headers={"Range": "entries=14-"})
        assert still_open.content == RAW[29]
        assert still_open.headers["Content-Range"] == "entries 14-14/*"
        behind = await client.get(url, headers={"Range": "entries=15-"})
        assert (behind.status_code, behind.json()["reason"]) == (404, "NO_SUCH_ENTRY")
        for bad in ("entries", "entries=5-3", "entries=-3", "entries=0-1,4-5"):
            answer = await client.get(url, headers={"Range": bad})
            assert (answer.status_code, answer.json()["reason"]) == (400, "INVALID_ARGUMENT")
        assert shares.used_bytes == 0


@on_virtual_time
async def test_a_range_of_entries_with_append_headers_is_refused():
    world, first, _ = await two_tiers(ENTRIES)
    async with served(world) as (client, _):
        answer = await client.get(f"{URL}/ledgers/{first}")
        assert (answer.status_code, answer.json()["reason"]) == (400, "INVALID_ARGUMENT")


async def timed_world():
    """Three ledgers at 1000 s, 2000 s, 3000 s: in tier 2 alone, in tier 1 and closed, open."""
    world = ReaderWorld()
    await world.start()
    ledgers, all_entries = [], []
    for number in range(3):
        entries = [stamped(n, 1_000_000 * (number + 1) + 10 * n) for n in range(200)]
        ledger = await world.opened()
        for first in range(0, 200, 8):
            part = entries[first : first + 8]
            base = 1_000_000 * (number + 1) + 10 * first
            await world.write(ledger, part, first=first, times=(base, base + 70))
        if number < 2:
            await closed(world, ledger, entries)
        ledgers.append(ledger)
        all_entries.append(entries)
    return world, ledgers


@on_virtual_time
async def test_a_time_is_found_in_either_tier_with_few_reads():
    world, ledgers = await timed_world()
    await world.offloaded(ledgers[0])
    await world.gone_locally(ledgers[0])
    async with world.reader(tails=tails_of()) as source:
        shares = Shares(64 * MIB, wait_s_max=5)
        seek = TimeSeek(ServedReads(source, shares))
        for number, ledger in enumerate(ledgers):
            base = 1_000_000 * (number + 1)
            for entry in (0, 1, 7, 8, 100, 199):
                found = await seek.position_at(STREAM, base + 10 * entry)
                assert found == at(ledger, entry)
                assert await seek.position_at(STREAM, base + 10 * entry - 9) == found
            with tracing() as trace:
                await seek.position_at(STREAM, base + 1990)
            # Of 200 entries in 25 runs: a search by halves, and the last steps.
            asked = [one for one in trace.steps if one.what in {"tier1", "tier2", "GET range"}]
            assert len(asked) <= 12
        assert await seek.position_at(STREAM, 0) == at(ledgers[0], 0)
        assert await seek.position_at(STREAM, 9_000_000) == at(ledgers[2], 200)
        assert shares.used_bytes == 0
        assert shares.most_used_bytes > 0, "a search has room for what it reads"


@on_virtual_time
async def test_a_read_is_explained():
    world, first, second = await two_tiers(ENTRIES)
    async with served(world) as (client, shares):
        cold = (await client.get(f"{URL}/explain", params={"from": f"{first}:7"})).json()
        assert (cold["tier"], cold["entries"], cold["first"]) == ("tier2", 1, f"{first}:7")
        assert "only tier2 has it" in cold["tier_reason"]
        assert cold["requests"] >= 2
        assert cold["requested_bytes"] > 0
        steps = [(one["what"], one["where"]) for one in cold["steps"]]
        assert ("tier2", f"ledger {first}") in steps
        assert any(what == "GET" and where.endswith("-index") for what, where in steps)
        assert all(one["took_us"] >= 0 for one in cold["steps"])
        open_ledger = (await client.get(f"{URL}/explain", params={"from": f"{second}:0"})).json()
        assert (open_ledger["tier"], open_ledger["requests"]) == ("tier1", 0)
        assert open_ledger["tier_reason"] == "the ledger is open"
        timed = (await client.get(f"{URL}/explain", params={"from": "time:9000000000000"})).json()
        looked = [one["where"] for one in timed["steps"] if one["what"] == "times"]
        assert looked[-1] == f"ledger {second} in tier1"
        nothing = (await client.get(f"{URL}/explain", params={"from": f"{second}:15"})).json()
        assert (nothing["tier"], nothing["entries"]) == (None, 0)
        assert shares.used_bytes == 0


@pytest.mark.covers("C15")
@on_virtual_time
async def test_slow_clients_hold_their_part_of_the_memory_and_nobody_else_waits_for_them():
    entries = numbered(0, 600, size=2000)
    world = ReaderWorld()
    await world.start(raw=True)
    ledger = await world.opened(entries)
    runs = {"from": f"{ledger}:0", "bytes_max": 300_000}
    async with (
        served(world, room_bytes=4_000_000, send_s_max=10) as (quick, shares),
        asyncio.TaskGroup() as group,
    ):
        slow = [AsgiClient(quick.app, piece_s=4.0, host="slow") for _ in range(20)]
        stuck = [AsgiClient(quick.app, piece_s=1000.0, host="stuck") for _ in range(20)]
        others = [
            group.create_task(client.get(f"{URL}/runs", params=runs)) for client in slow + stuck
        ]
        await asyncio.sleep(2)
        assert shares.waiting > 0
        loop = asyncio.get_running_loop()
        for _ in range(10):
            begun_s = loop.time()
            answer = await quick.get(f"{URL}/runs", params=runs)
            assert (answer.status_code, len(answer.content) > 250_000) == (200, True)
            assert loop.time() - begun_s < 0.5
        await asyncio.sleep(60)
        assert shares.used_bytes == 0, "who takes nothing is left, and its room is free again"
        done = [await one for one in others]
    statuses = [one.status_code for one in done]
    assert set(statuses) == {200, 429}
    assert shares.most_used_bytes <= 4_000_000


@on_virtual_time
async def test_a_page_holds_its_room_until_it_is_given_back():
    world, _, second = await two_tiers(ENTRIES)
    shares = Shares(10 * MIB, wait_s_max=5)
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        # Somebody follows, so that the end of the page is where others wait.
        where = at(second, 15)
        following = group.create_task(source.read(STREAM, where, budget(wait_s=60)))
        await asyncio.sleep(1)
        room = ServedReads(source, shares).room("a", 100_000)
        page = await read_page(source, STREAM, at(second, 0), budget(room=room))
        assert (len(page.entries), page.at_end) == (15, True)
        assert shares.used_bytes == 200_000
        room.leave()
        room.leave()
        assert shares.used_bytes == 0
        following.cancel()
        await closed(world, second, ENTRIES[15:])
        await asyncio.sleep(1)
        room = ServedReads(source, shares).room("a", 100_000)
        page = await read_page(source, STREAM, at(second, 0), budget(room=room))
        assert (len(page.entries), page.at_end, shares.used_bytes) == (15, True, 200_000)
        room.leave()


@on_virtual_time
async def test_who_follows_and_takes_nothing_is_left_and_holds_nothing():
    world, *_ = await two_tiers(ENTRIES)
    headers = {"Accept": "text/event-stream"}
    async with served(world, send_s_max=10) as (quick, shares), asyncio.TaskGroup() as group:
        stuck = AsgiClient(quick.app, piece_s=1.0, host="stuck")
        following = group.create_task(stuck.get(f"{URL}/entries", headers=headers))
        await asyncio.sleep(1.5)
        stuck.piece_s = 10.0**6
        await asyncio.sleep(5)
        assert shares.used_bytes > 0
        answer = await following
        assert shares.used_bytes == 0
        assert answer.text.count("data: ") == 1
        slow = AsgiClient(quick.app, piece_s=9.0, host="slow")
        answer = await slow.get(f"{URL}/entries", params={"limit": 5}, headers=headers)
        assert answer.text.count("data: ") == 5
        assert shares.used_bytes == 0


@pytest.mark.parametrize("kind", ["runs", "entries", "followed"])
@pytest.mark.parametrize("tier", ["tier1", "tier2"])
def test_an_entry_longer_than_was_asked_for_has_room_of_its_length(kind, tier):
    @on_virtual_time
    async def main():
        world = ReaderWorld(block_size=MIB)
        await world.start(raw=True)
        entries = [bytes([65 + number]) * 270_000 for number in range(6)]
        ledger = await world.sealed(entries)
        if tier == "tier2":
            await world.offloaded(ledger)
            await world.gone_locally(ledger)
        url = f"{URL}/runs" if kind == "runs" else f"{URL}/entries"
        headers = {"Accept": "text/event-stream" if kind == "followed" else OCTETS}
        async with (
            served(world, room_bytes=20_000_000) as (quick, shares),
            asyncio.TaskGroup() as group,
        ):
            tasks = []
            for number in range(6):
                client = AsgiClient(quick.app, piece_s=3.0, host=f"client {number}")
                params = {"from": f"{ledger}:{number}", "bytes_max": 1, "to": f"{ledger}:99"}
                if kind != "runs":
                    params["limit"] = 1
                tasks.append(group.create_task(client.get(url, params=params, headers=headers)))
            await asyncio.sleep(5)
            assert shares.used_bytes >= 6 * 2 * 270_000
            answers = [await one for one in tasks]
        assert all(one.status_code == 200 and len(one.content) > 270_000 for one in answers)
        assert shares.used_bytes == 0

    main()


@on_virtual_time
async def test_an_entry_that_can_not_be_decoded_ends_what_is_followed_with_a_problem():
    world, *_ = await two_tiers([*ENTRIES[:3], b"x" * 40, *ENTRIES[4:6]])
    async with served(world) as (client, shares):
        headers = {"Accept": "text/event-stream"}
        answer = await client.get(f"{URL}/entries", params={"limit": 6}, headers=headers)
        assert "event: error" in answer.text
        assert '"reason":"CORRUPT"' in answer.text
        assert shares.used_bytes == 0


HOSTILE = [
    ("ledgers/-1", {}, {}),
    (f"ledgers/{2**63 - 1}", {}, {}),
    (f"ledgers/{2**63}", {}, {}),
    ("ledgers/" + "9" * 5000, {}, {}),
    (f"ledgers/{2**63 - 2}", {}, {}),
    ("ledgers/x", {}, {}),
    ("ledgers/0", {}, {"Range": "entries=" + "9" * 400 + "-"}),
    ("ledgers/0", {}, {"Range": f"entries=0-{'9' * 18}"}),
    ("ledgers/0", {}, {"Range": "entries=0-1,3-4"}),
    ("entries", {"limit": "0"}, {}),
    ("entries", {"limit": "-1"}, {}),
    ("entries", {"limit": str(2**70)}, {}),
    ("entries", {"bytes_max": "0"}, {}),
    ("entries", {"wait_ms": "nan"}, {}),
    ("entries", {"from": f"{2**63}:0"}, {}),
    ("entries", {"from": f"{2**63 - 1}:{2**63 - 1}"}, {}),
    ("entries", {"from": "0:\u0661"}, {}),
    ("entries", {"from": "time:0001-01-01T00:00:00+23:59"}, {}),
    ("entries", {"from": "time:9999-12-31T23:59:59-23:59"}, {}),
    ("entries", {"from": "time:" + "9" * 5000}, {}),
    ("entries", {"from": f"time:{2**63 - 1}"}, {}),
    ("entries", {"to": "latest"}, {}),
    ("entries", {"to": f"{2**63 - 1}:{2**63 - 1}"}, {}),
    ("entries", {}, {"Accept": "text/html;q=nan,;;;,=,"}),
    ("entries", {}, {"Accept": "*/*;q=" + "9" * 4000}),
    ("entries", {}, {"Accept": "text/event-stream", "Last-Event-ID": "'; drop"}),
    ("runs", {"bytes_max": str(2**80), "from": "earliest"}, {}),
    ("runs", {"from": f"{2**63 - 1}:{2**63 - 1}", "entries_max": "1000000"}, {}),
    ("runs", {"entries_max": "1000001"}, {}),
    ("explain", {"from": "time:"}, {}),
    ("position", {"time": "-1"}, {}),
    ("position", {"time": f"{2**63}"}, {}),
]


@pytest.mark.parametrize(("path", "params", "headers"), HOSTILE)
def test_hostile_requests_are_answered_or_refused_and_are_no_bug(path, params, headers):
    @on_virtual_time
    async def main():
        world, *_ = await two_tiers(ENTRIES[:4], raw=path.startswith("ledgers"))
        async with served(world) as (client, shares):
            answer = await client.get(f"{URL}/{path}", params=params, headers=headers)
            assert answer.status_code < 500
            if answer.status_code >= 400:
                assert answer.json()["reason"]
            assert shares.used_bytes == 0

    main()
