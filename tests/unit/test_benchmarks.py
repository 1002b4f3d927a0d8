"""Benchmarks take their options before they start anything: what can't be measured is refused."""

import asyncio
import contextlib
import importlib
import itertools
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import SecretStr

from tierlog.adapters.s3 import open_s3
from tierlog.runtime.settings import ReaderSettings, S3Settings
from tierlog.wiring.build import system_clock, system_ids
from tierlog_reader.memory import parts_of

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize(
    "words",
    [
        ("bench_read.py", "--runs", "0"),
        ("bench_node.py", "--sizes", "1000,x"),
        ("bench_read_many.py", "--readers", "1,0"),
        ("bench_read_far.py", "--distances", "near"),
    ],
    ids=" ".join,
)
def test_a_number_that_is_none_is_refused_at_once(words: tuple[str, ...]) -> None:
    program, *options = words
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"argument {options[0]}" in done.stderr
    assert "is not a whole number above 0" in done.stderr


def _benchmark(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.covers("C49", "C50", "C51")
def test_the_cache_is_measured_beside_the_tables_of_the_article() -> None:
    rows = (ROOT / "docs" / "seed-checklist.tsv").read_text("utf-8").splitlines()
    said = {row.split("\t")[0]: row.split("\t")[3] for row in rows}
    beside = _benchmark("bench_cache").ELSEWHERE
    for row, name in (("C49", "HashMap"), ("C50", "RocksDB"), ("C51", "Streaming Cache")):
        numbers = re.findall(r"(?:insert|get|delete|10 KB|100 KB) ([\d,]+)", said[row])
        table = tuple(int(number.replace(",", "")) for number in numbers)
        assert len(table) == 5
        assert beside[f"article, i7-6700: {name}"] == table


@pytest.mark.covers("C49", "C50", "C51", "C67")
def test_a_run_of_it_here_tells_its_ratios_and_the_tables_beside_them() -> None:
    told = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "bench_cache.py")),
            *("--size", "1", "--runs", "1", "--stores", "plain,dict"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    for test in ("insert", "get", "delete", "random_10", "random_100"):
        assert re.search(rf"^  {test}: plain / dict +\d", told, re.MULTILINE), told
        for store in ("plain", "dict"):
            assert re.search(rf"^  {store}: {test}, a million +[\d,.]+ ", told, re.MULTILINE), told
    for name, row in (
        ("HashMap", "insert 2,516, get 2,201, delete 35, random_10 3,633, random_100 22,008"),
        ("RocksDB", "insert 25,234, get 12,283, delete 577, random_10 21,399, random_100 314,369"),
        ("Streaming Cache", "insert 890, get 830, delete 84, random_10 3,188, random_100 9,440"),
    ):
        assert f"elsewhere: article, i7-6700: {name}: {row} ms" in told


@pytest.mark.covers("C46", "C47", "C48")
@pytest.mark.parametrize("name", ["plain", "dict", "nothing"])
def test_the_work_that_is_measured_is_that_of_the_article(name: str) -> None:
    """All in, all read, all deleted; and a mix of 60 and 40 in which each step reads."""
    bench = _benchmark("bench_cache")
    source = memoryview(bytes(range(256)) * 2000)
    ticks = itertools.count()
    with bench.opened(name, 16 * 1024 * 1024) as store:
        counted = _Counted(store)
        seconds = bench.sequential(counted, lambda: float(next(ticks)), source, 500, 10 * 1024)
        assert set(seconds) == {"insert", "get", "delete"}
        assert (counted.puts, counted.reads, counted.drops) == (500, 500, 500)
        counted = _Counted(store)
        _seconds, runs = bench.mixed(counted, lambda: float(next(ticks)), source, 1000, 10 * 1024)
        assert (runs >= 1) is (name == "plain"), "only the cache has runs"
        assert 0.55 < counted.puts / 1000 < 0.65
        assert counted.drops == counted.puts, "what is left is deleted behind the time"
        assert 990 <= counted.reads <= 1000


class _Counted:
    """A store that counts what is asked of it, and that what comes out is what went in."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.puts = self.reads = self.drops = 0
        self.runs = store.runs

    def put(self, data: memoryview) -> object:
        self.puts += 1
        return self._store.put(data)

    def read(self, key: object) -> None:
        self.reads += 1
        self._store.read(key)

    def drop(self, key: object) -> None:
        self.drops += 1
        self._store.drop(key)


@pytest.mark.covers("C67")
def test_one_benchmark_is_run_for_the_change_that_it_measures() -> None:
    chosen = subprocess.run(
        ["make", "-n", "bench", "ONLY=cache", "BENCH=--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "benchmarks/bench_cache.py" in chosen
    assert '"$b" --quick' in chosen
    assert (BENCHMARKS / "bench_cache.py").exists()


def test_memory_is_to_be_flat_whichever_way_many_readers_read() -> None:
    many = _benchmark("bench_read_many")
    assert many.WAYS == ("runs", "ndjson", "arrow", "grpc")
    runs = {
        many._named(number, way): [{"resident_mb": mb, "mb_per_s": 1.0}]
        for way in many.WAYS
        for number, mb in ((1, 300.0), (256, 360.0 if way == "grpc" else 310.0))
    }
    claims = [one for one in many.claims_of(runs, [1, 256]) if " / " in one.name]
    assert [one.met for one in claims] == [True, True, True, False]


def test_the_budget_that_many_readers_share_is_one_that_a_reader_takes() -> None:
    many = _benchmark("bench_read_many")
    limits = ReaderSettings(memory_bytes_max=many.BUDGET_BYTES, cache_bytes_max=many.CACHE_BYTES)
    assert parts_of(limits, limit_paths=()).total == many.BUDGET_BYTES == 256_000_000


def test_each_benchmark_stands_with_the_numbers_that_it_gave() -> None:
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text("utf-8")
    there = {path.name for path in BENCHMARKS.glob("bench_*.py")}
    assert len(there) > 20
    assert {one for one in there if f"benchmarks/{one}" not in page} == set()


async def test_the_proxy_adds_a_round_trip_and_carries_all_of_both_directions() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(_pieces(reader)) as pieces:
            async for piece in pieces:
                writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sent = bytes(range(256)) * 5000
    async with server, _benchmark("delay_proxy").delayed(f"127.0.0.1:{port}", 60) as address:
        host, _, near = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(near))
        started_s = time.perf_counter()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        assert time.perf_counter() - started_s >= 0.06
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


async def _pieces(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while piece := await reader.read(65536):
        yield piece


def test_the_limit_of_a_far_bucket_is_what_is_in_flight_over_a_round_trip() -> None:
    far = _benchmark("bench_read_far")
    limits = far.limited({"near": [{"mb_per_s": 300.0}]}, [1, 20, 100])
    rates = {name: round(of[0]["mb_per_s"]) for name, of in limits.items()}
    assert rates == {"limit 1 ms": 300, "limit 20 ms": 300, "limit 100 ms": 84}


def test_places_are_equally_far_from_each_other() -> None:
    assert _benchmark("reading").places_in(7, 1000, 4) == ["7:0", "7:250", "7:500", "7:750"]


async def test_the_lean_server_is_a_store_to_what_reads_objects_by_ranges(tmp_path: Path) -> None:
    body = bytes(range(256)) * 8
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "one").write_bytes(body)
    async with _benchmark("lean_s3").lean_s3("http://127.0.0.1:1", tmp_path / "objects") as url:
        settings = S3Settings(
            endpoint_url=url, bucket="b", access_key="a", secret_key=SecretStr("s")
        )
        clock, ids = system_clock(), system_ids()
        async with open_s3(settings, clock=clock, ids=ids) as store:
            target = bytearray(1000)
            assert await store.get_range_into("one", 500, [memoryview(target)]) == 1000
    assert target == body[500:1500]
