"""Claim: the streaming cache keeps up with a dict of bytes, inside a bound that a dict has not.

plain       the reader's streaming cache as plain Python
compiled    the same, when ``make compiled`` was run
dict        a dict of bytes with the same copies: in, since who sends keeps its buffer, and out
nothing     neither keeps nor copies: what of each time the loop around it takes, which is Python
pravega     Pravega's own cache in Java, when a JDK 17 and Maven are there
rocksdict   RocksDB, when requirements-bench.lock is installed

Sequential: entries of ``--entry-size`` are put in, read, deleted. Random: as many operations, 60 %
put and 40 % delete, an entry read after each, lengths uniform below 10 KB and below 100 KB. Large:
entries of 1 MiB, as a range of an object is, half of ``--size`` in all; not in RocksDB. Every
read copies into one buffer. The first pass of a run is not counted, since it touches fresh memory
and Java has not compiled yet.

"Elsewhere" are numbers that others measured of the same work, for a million operations: nothing
here is divided by them.
"""

import asyncio
import contextlib
import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import pravega
from common import (
    MB,
    MIB,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    median_claim,
    parse,
    ratio_claim,
    report,
    rss_peak_bytes,
    run_child,
    say,
    take_turns,
)
from tierlog_reader.cache import blocks
from tierlog_reader.cache.store import compiled_blocks

TESTS: Final = ("insert", "get", "delete", "random_10", "random_100")
RANDOM_BYTES: Final = {"random_10": 10 * 1024, "random_100": 100 * 1024}
LARGE_TESTS: Final = ("insert_1m", "get_1m", "delete_1m")
ALL_TESTS: Final = (*TESTS, *LARGE_TESTS)
WARM_PASSES: Final = 3
SLOW_WARM_PASSES: Final = 1
"""RocksDB takes minutes for one."""
SOURCE_BYTES: Final = 8 * MIB
TARGET_BYTES: Final = MIB
STORES: Final = ("plain", "compiled", "dict", "nothing", "pravega", "rocksdict")

# Operations a second / the other's, at least. What is not named is told without a target.
TARGETS: Final[Mapping[tuple[str, str], Mapping[str, float]]] = {
    ("plain", "dict"): {"insert": 1 / 1.3, "get": 1 / 1.3},
    ("plain", "rocksdict"): dict.fromkeys(TESTS, 1.0),
    ("plain", "pravega"): dict.fromkeys(LARGE_TESTS, 1.0),
    ("compiled", "dict"): {"insert": 1.0, "get": 1.0, "random_10": 1.0, "random_100": 1.0},
    ("compiled", "rocksdict"): dict.fromkeys(TESTS, 1.0),
    ("compiled", "pravega"): {
        "insert": 1.0, "get": 1.0, "delete": 1.0, "random_10": 1 / 1.5, "random_100": 1 / 1.1,
        **dict.fromkeys(LARGE_TESTS, 1.0),
    },
    ("compiled", "plain"): {},
}  # fmt: skip

# Milliseconds for a million operations: insert, get, delete, random 10 KB, random 100 KB.
ELSEWHERE: Final = {
    "article, i7-6700: Streaming Cache": (890, 830, 84, 3188, 9440),
    "article, i7-6700: HashMap": (2516, 2201, 35, 3633, 22008),
    "article, i7-6700: RocksDB": (25234, 12283, 577, 21399, 314369),
    "Pravega 0.13's cache, Java 17, another day on 2 cores": (1423, 1179, 115, 1771, 9605),
}


@dataclass(frozen=True, slots=True)
class Store:
    """What is measured: three calls. What ``put`` returns is what the others take.

    ``runs``: in how many runs of neighbouring blocks an entry lies.
    """

    put: Callable[[memoryview], Any]
    read: Callable[[Any], object]
    drop: Callable[[Any], object]
    runs: Callable[[Any], int] | None = None


def cache_class(name: str) -> Any:  # noqa: ANN401 - the compiled one is known to nobody
    """Return the cache in one of its two ways."""
    if name == "plain":
        return blocks.StreamingCache
    module = compiled_blocks().module
    assert module is not None, "the streaming cache is not compiled"
    return module.StreamingCache


@contextlib.contextmanager
def opened(name: str, limit_bytes: int) -> Iterator[Store]:
    """Open a store by its name; the limit is the cache's alone."""
    target = memoryview(bytearray(TARGET_BYTES))
    if name in {"plain", "compiled"}:
        cache = cache_class(name)(limit_bytes)
        read_into = cache.read_into
        yield Store(
            cache.insert,
            lambda key: read_into(key, target),
            cache.delete,
            runs=lambda key: len(cache.runs(key)),
        )
        assert cache.free_blocks == cache.buffers * cache.layout.data_blocks, "blocks are lost"
        cache.close()
    elif name == "dict":
        kept: dict[int, bytes] = {}
        numbers = iter(range(2**62))

        def put(data: memoryview) -> int:
            key = next(numbers)
            kept[key] = bytes(data)
            return key

        def read(key: int) -> None:
            data = kept[key]
            target[: len(data)] = data

        yield Store(put, read, kept.__delitem__)
    elif name == "nothing":
        keys = iter(range(2**62))
        yield Store(lambda _data: next(keys), lambda _key: None, lambda _key: None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield from _rocks(folder, target)


def _rocks(folder: str, target: memoryview) -> Iterator[Store]:
    module = cast("Any", importlib.import_module("rocksdict"))
    rocks = module.Rdict(folder, module.Options(raw_mode=True))
    options = module.WriteOptions()
    options.disable_wal = True  # a cache needs no recovery
    rocks.set_write_options(options)
    numbers = iter(range(2**62))

    def put(data: memoryview) -> bytes:
        key = next(numbers).to_bytes(8, "big")
        rocks[key] = bytes(data)
        return key

    def read(key: bytes) -> None:
        data = rocks[key]
        target[: len(data)] = data

    yield Store(put, read, rocks.__delitem__)
    rocks.close()


Clock = Callable[[], float]


def sequential(
    store: Store, clock: Clock, source: memoryview, count: int, size: int
) -> dict[str, float]:
    """Put all in, read all, delete all; seconds of each."""
    pieces = [source[at * 64 : at * 64 + size] for at in range(1000)]
    keys: list[Any] = [None] * count
    put, read, drop = store.put, store.read, store.drop
    start = clock()
    for number in range(count):
        keys[number] = put(pieces[number % 1000])
    inserted = clock()
    for key in keys:
        read(key)
    got = clock()
    for key in keys:
        drop(key)
    done = clock()
    assert all(keys) or keys[0] == 0, "the cache was too small"
    return {"insert": inserted - start, "get": got - inserted, "delete": done - got}


def mixed(
    store: Store, clock: Clock, source: memoryview, count: int, size: int
) -> tuple[float, float]:
    """Do the random mix; seconds of it, and in how many runs an entry lies that is left then.

    What is left is looked at and deleted outside the time.
    """
    rng = random.Random(7)
    puts = [rng.random() < 0.6 for _ in range(count)]
    picks = [rng.random() for _ in range(count)]
    pieces = [source[at : at + rng.randrange(size)] for at in range(0, 64 * 4096, 64)]
    keys: list[Any] = []
    put, read, drop = store.put, store.read, store.drop
    start = clock()
    for number in range(count):
        if puts[number] or not keys:
            keys.append(put(pieces[number % 4096]))
        else:
            at = int(picks[number] * len(keys))
            drop(keys[at])
            keys[at] = keys[-1]
            keys.pop()
        if keys:
            read(keys[int(picks[-number] * len(keys))])
    seconds = clock() - start
    runs = statistics.mean(map(store.runs, keys)) if store.runs else 0.0
    for key in keys:
        drop(key)
    return seconds, runs


async def measure(parameters: Mapping[str, Any]) -> Result:
    """Run all of it on one store (in a child)."""
    name, count, size = parameters["store"], parameters["count"], parameters["entry_size"]
    large = 0 if name == "rocksdict" else parameters["large"]
    source = memoryview(random.Random(1).randbytes(SOURCE_BYTES))
    clock = time.process_time if parameters["cpu"] else time.perf_counter
    passes, runs = [], dict[str, float]()
    with opened(name, parameters["limit_bytes"]) as store:
        for _ in range(1 + (SLOW_WARM_PASSES if name == "rocksdict" else WARM_PASSES)):
            found = sequential(store, clock, source, count, size)
            for test, longest in RANDOM_BYTES.items():
                found[test], runs[test] = mixed(store, clock, source, count, longest)
            if large:
                taken = sequential(store, clock, source, large, MIB)
                found |= {f"{test}_1m": seconds for test, seconds in taken.items()}
            passes.append(found)
    per_entry = {f"{test}_runs": found for test, found in runs.items()}
    return {**summary(passes, parameters), **per_entry, "rss_gib": rss_peak_bytes() / 2**30}


def summary(passes: list[dict[str, float]], parameters: Mapping[str, Any]) -> Result:
    """Return what the warm passes took: the median of each test, for a million, and a second."""
    count, size = parameters["count"], parameters["entry_size"]
    result: Result = {}
    for test in passes[0]:
        of = parameters["large"] if test in LARGE_TESTS else count
        taken = statistics.median(one[test] for one in passes[1:])
        result[f"{test}_ms"] = 1e9 / of * taken
        result[f"{test}_us"] = 1e6 / of * taken
        result[f"{test}_per_s"] = of / taken
    return {**result, "mb_per_s": result["insert_per_s"] * size / MB}


async def measure_pravega(parameters: Mapping[str, Any]) -> Result:
    """Run all of it on Pravega's cache, in a JVM of its own."""
    passes, rss_bytes = await pravega.passes(1 + WARM_PASSES, parameters)
    return {**summary(passes, parameters), "rss_gib": rss_bytes / 2**30}


def claims_of(runs: Mapping[str, list[Result]]) -> list[Claim]:
    """Compare the cache, in its two ways, with the others."""
    found = []
    for (ours, other), targets in TARGETS.items():
        if ours not in runs or other not in runs:
            continue
        for test in ALL_TESTS:
            key = f"{test}_per_s"
            if all(key in runs[name][0] for name in (ours, other)):
                name = f"{test}: {ours} / {other}"
                target = targets.get(test)
                found.append(ratio_claim(name, runs, of=ours, to=other, key=key, target=target))
    for name, results in runs.items():
        found += [
            median_claim(f"{name}: {test}, a million", results, f"{test}_ms", unit="ms")
            for test in TESTS
        ]
        found += [
            median_claim(f"{name}: {test}, each", results, f"{test}_us", unit="µs")
            for test in LARGE_TESTS
            if f"{test}_us" in results[0]
        ]
        found += [
            median_claim(f"{name}: {test}, runs of an entry", results, f"{test}_runs", unit="")
            for test in RANDOM_BYTES
            if name in {"plain", "compiled"}
        ]
        found.append(median_claim(f"{name}: peak of memory", results, "rss_gib", unit="GiB"))
    return found


async def stores_of(wanted: str) -> list[str]:
    """Return which stores can be measured here, and say why others can't."""
    names = []
    for name in wanted.split(","):
        reason = None
        if name == "compiled":
            reason = compiled_blocks().why_not or None
        elif name == "pravega":
            reason = pravega.missing() or await pravega.build()
        elif name == "rocksdict" and importlib.util.find_spec("rocksdict") is None:
            reason = "requirements-bench.lock is not installed"
        elif name not in STORES:
            raise SystemExit(f"no store is called {name}; there are {', '.join(STORES)}")
        if reason is None:
            names.append(name)
        else:
            say(f"without {name}: {reason}")
    return names


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("the streaming cache", size_mb=4096)
    parser.add_argument(
        "--cpu", action="store_true", help="seconds of the CPU, where others use it too"
    )
    parser.add_argument("--stores", default=",".join(STORES), help="which of these to measure")
    parser.set_defaults(entry_size=10_240)
    arguments = parse(parser, quick_mb=200)
    count = arguments.size * MB // arguments.entry_size
    whole = -(-arguments.entry_size // 4096) * 4096
    # A fifth of the mix's operations is alive at its end, each of half the length and half a block.
    limit = int(1.02 * max(count * whole, (0.2 * count + 1000) * 53_500)) + 16 * MB
    large = max(20, arguments.size * MB // 2 // MIB)
    limit = max(limit, large * MIB + 64 * MIB)
    names = await stores_of(arguments.stores)
    say(f"{count:,} entries of {arguments.entry_size:,} bytes; numbers are for a million")
    parameters = {
        "count": count, "entry_size": arguments.entry_size, "large": large,
        "limit_bytes": limit, "cpu": arguments.cpu,
    }  # fmt: skip

    async def child(name: str) -> Result:
        if name == "pravega":
            return await measure_pravega(parameters)
        return await run_child(__file__, "measure", {"store": name, **parameters}, dict(os.environ))

    runs = await take_turns({name: partial(child, name) for name in names}, arguments.runs)
    report("cache", arguments, claims_of(runs), runs)
    if arguments.output == "table":
        for name, numbers in ELSEWHERE.items():
            row = ", ".join(f"{test} {ms:,}" for test, ms in zip(TESTS, numbers, strict=True))
            print(f"  elsewhere: {name}: {row} ms")


if __name__ == "__main__":
    if not child_mode({"measure": measure}):
        asyncio.run(main())
