"""Claim: the attribute index keeps less, and at most a little more is written for that.

The two tables of the article (seeds/004), and of the load test that they come from:

insert      attributes in the order of their keys, ``batch`` an update
update      all of them in one update, then as many draws of one of them, with replacement,
            ``batch`` an update; draws of one key in one update are one change. Keys are those
            that the load test draws (Java's generator, seed 0)

*with* and *without* compaction, on a medium in memory. After every update is counted what was ever
written, and what is kept: from the lowest page that is needed to the end ("exact"), and the same
from the start of the chunk with that page ("chunks"), of 16 MiB as in the load test and of 32 MiB.
Pages are verified whenever they are read, also here.

With ``--share 0.02`` so much of the draws is made, and what all of them would write is worked out
from that: the tree neither grows nor changes its shape by them, so that one draw costs as much as
any other. What is kept is counted, as always: it goes up and down all the time, but no further.

Lookups: of one random key, pages kept in memory: none ("cold"), index pages ("index"), all
("warm"). Numbers of the tables are the same in each run; times are not.

"Elsewhere" is what the article says and what Pravega's class does here: its bytes are goals, its
times were taken another day.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from common import (
    MB,
    MIB,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    median_claim,
    parse,
    report,
    rss_peak_bytes,
    run_child,
    say,
    take_turns,
)
from tierlog.attributes.compaction import PROGRESSIVE
from tierlog.attributes.tree import PageRef, drive, lookup
from tierlog.attributes.update import Shape, update
from tierlog.format.attribute_page import LEAF_ENTRY_LEN, Page
from tierlog.model.attributes import AttributeKey, IndexRoot

BATCHES: Final = (10, 100, 1000)
CHUNKS: Final = {"chunks": 16 * MIB, "chunks_32": 32 * MIB}
LOOKUPS: Final = 20_000
WHOLE: Final = 1_000_000


class Peer(NamedTuple):
    """A row of the article, and what ``BTreeIndex`` of Pravega 0.13.0 does with it, in MiB.

    Pages of 32,767 bytes, chunks of 16 MiB, Java 17 on two cores.
    """

    article: float
    article_without: float
    written: float
    exact: float
    chunks: float
    peak: float
    batch_ms: float


ELSEWHERE: Final = {
    ("insert", 10): Peer(115, 3_991, 5_977.0, 99.4, 105.0, 123.7, 0.103),
    ("insert", 100): Peer(97, 416, 615.3, 93.8, 103.3, 107.7, 0.270),
    ("insert", 1000): Peer(54, 60, 84.6, 46.2, 52.6, 53.8, 1.94),
    ("update", 10): Peer(72, 32_990, 36_486.8, 63.0, 70.8, 85.2, 0.201),
    ("update", 100): Peer(103, 29_402, 29_715.5, 99.0, 99.5, 133.4, 1.55),
    ("update", 1000): Peer(91, 17_083, 17_098.7, 66.7, 74.7, 128.7, 9.38),
}
WRITTEN_MORE: Final = {("update", 10): 1.2, ("update", 100): 1.1, ("update", 1000): 1.1}


class Pages:
    """A medium that has those pages alone that the newest version needs, and counts the others."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}
        self.reads = 0

    def read(self, ref: PageRef) -> Page:
        """Return a page, verified."""
        self.reads += 1
        return Page(self.pages[ref.offset], ref.offset)


class Index:
    """An index on such a medium, and the peaks of what it keeps."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.root = IndexRoot()
        self.medium = Pages()
        self.moved = 0
        self.peaks: dict[str, int] = {}

    def update(self, changes: Mapping[AttributeKey, int]) -> None:
        """Make the next version."""
        done = drive(update(self.root, changes, self.shape), self.medium.read)
        pages, offset = self.medium.pages, self.root.end
        for page in done.pages:
            pages[offset] = page
            offset += len(page)
        for ref in done.replaced:
            del pages[ref.offset]
        assert offset == done.root.end
        self.root = done.root
        self.moved += done.moved
        for name, size in self.kept().items():
            if size > self.peaks.get(name, 0):
                self.peaks[name] = size

    def kept(self) -> dict[str, int]:
        """Return the bytes that are kept, as they are counted."""
        start, end = self.root.start, self.root.end
        return {
            "exact": end - start,
            **{name: end - start // size * size for name, size in CHUNKS.items()},
        }


def key_of(number: int) -> AttributeKey:
    """Return a key as in the load test: the number twice."""
    return AttributeKey(number.to_bytes(8, "big") * 2)


def draws(count: int) -> Iterator[int]:
    """Return what ``new java.util.Random(0).nextInt(count)`` does, so many times."""
    state = 0x5DEECE66D
    mask = (1 << 48) - 1
    for _ in range(count):
        while True:
            state = (state * 0x5DEECE66D + 0xB) & mask
            bits = state >> 17
            if count & (count - 1) == 0:
                yield count * bits >> 31
                break
            value = bits % count
            if bits - value + count - 1 < 1 << 31:
                yield value
                break


def changes_of(keys: Sequence[AttributeKey], batch: int) -> Iterator[dict[AttributeKey, int]]:
    """Return what each update changes."""
    for start in range(0, len(keys), batch):
        some = keys[start : start + batch]
        yield dict(zip(some, range(start, start + len(some)), strict=True))


async def measure_table(parameters: Mapping[str, Any]) -> Result:
    """Make one row of a table (in a child)."""
    count, batch, table = parameters["count"], parameters["batch"], parameters["table"]
    share = parameters["share"] if table == "update" else 1.0
    policy = PROGRESSIVE if parameters["compacts"] else None
    index = Index(Shape(compaction=policy))
    keys = [key_of(number) for number in range(count)]
    if table == "update":
        index.update(dict(zip(keys, range(count), strict=True)))
        index.peaks = {}
        keys = [keys[number] for number in islice(draws(count), int(share * count))]
    loaded, updates = index.root.end, -(-len(keys) // batch)
    started, started_cpu = time.perf_counter(), time.process_time()
    for changes in changes_of(keys, batch):
        index.update(changes)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    found = drive(lookup(index.root, keys[::997]), index.medium.read)
    assert len(found) == len(set(keys[::997])), "attributes are lost"
    kept = {f"{name}_mib": size / MIB for name, size in index.kept().items()}
    return {
        "written_mib": (loaded + (index.root.end - loaded) / share) / MIB,
        **kept,
        **{f"peak_{name}_mib": size / MIB for name, size in index.peaks.items()},
        "live_mib": sum(map(len, index.medium.pages.values())) / MIB,
        "moved_per_update": index.moved / updates,
        "batch_ms": 1000 * seconds / updates,
        "batch_cpu_ms": 1000 * cpu_s / updates,
        "attributes_per_s": len(keys) / seconds,
        "mb_per_s": (index.root.end - loaded) / MB / seconds,
    }


class Cache:
    """Pages in memory: of which levels, up to how many bytes; the oldest go first."""

    def __init__(self, medium: Pages, *, lowest_level: int, limit_bytes: int) -> None:
        self._medium = medium
        self._lowest_level = lowest_level
        self._left = limit_bytes
        self._pages: dict[int, Page] = {}

    def read(self, ref: PageRef) -> Page:
        """Return a page, from the medium if it must be."""
        page = self._pages.get(ref.offset)
        if page is None:
            page = self._medium.read(ref)
            if page.level >= self._lowest_level:
                self._pages[ref.offset] = page
                self._left -= ref.length
                while self._left < 0:
                    oldest = next(iter(self._pages))
                    self._left += len(self._pages.pop(oldest).raw)
        return page


async def measure_lookups(parameters: Mapping[str, Any]) -> Result:
    """Look up single keys, and keys by the hundred (in a child)."""
    count = parameters["count"]
    index = Index(Shape())
    for start in range(0, count, WHOLE):
        stop = min(count, start + WHOLE)
        index.update({key_of(number): number for number in range(start, stop)})
    rng = random.Random(3)
    numbers = [rng.randrange(count) for _ in range(LOOKUPS)]
    wanted = [key_of(number) for number in numbers]
    result: Result = {"rss_gib": rss_peak_bytes() / 2**30}
    medium = index.medium
    clock = time.process_time if parameters["cpu"] else time.perf_counter
    for name, lowest_level in {"cold": 99, "index": 1, "warm": 0}.items():
        cache = Cache(medium, lowest_level=lowest_level, limit_bytes=512 * MIB)
        passes = 1 if name == "cold" else 2
        seconds, reads = 0.0, 0
        for _ in range(passes):
            reads, started = medium.reads, clock()
            for number, key in zip(numbers, wanted, strict=True):
                assert drive(lookup(index.root, (key,)), cache.read)[key] == number
            seconds, reads = clock() - started, medium.reads - reads
        result[f"{name}_per_s"] = LOOKUPS / seconds
        result[f"{name}_reads"] = reads / LOOKUPS
        started = clock()
        for at in range(0, LOOKUPS, 100):
            assert drive(lookup(index.root, wanted[at : at + 100]), cache.read)
        result[f"{name}_by_100_per_s"] = LOOKUPS / (clock() - started)
    result["mb_per_s"] = result["warm_per_s"] * LEAF_ENTRY_LEN / MB
    return result


def row_claims(table: str, batch: int, results: Sequence[Result], *, is_whole: bool) -> list[Claim]:
    """Compare a row with the article and with Pravega's class."""
    peer, name = ELSEWHERE[table, batch], f"{table} {batch}"
    goals = {
        "written_mib": peer.written * WRITTEN_MORE.get((table, batch), 1.0),
        "exact_mib": peer.exact,
        "peak_exact_mib": None,
        "chunks_mib": min(peer.article, peer.chunks),
        "peak_chunks_mib": 0.9 * peer.peak,
        "chunks_32_mib": None,
        "peak_chunks_32_mib": None,
    }
    claims = [
        median_claim(
            f"{name}: {key[:-4].replace('_', ' ')}",
            results,
            key,
            unit="MiB",
            target=goal if is_whole else None,
            at_most=True,
        )
        for key, goal in goals.items()
    ]
    claims.append(median_claim(f"{name}: pages moved an update", results, "moved_per_update"))
    claims.append(median_claim(f"{name}: a batch", results, "batch_ms", unit="ms"))
    claims.append(median_claim(f"{name}: a batch's CPU", results, "batch_cpu_ms", unit="ms"))
    return claims


def claims_of(runs: Mapping[str, list[Result]], *, is_whole: bool) -> list[Claim]:
    """Say what came out, and whether it is what it has to be."""
    claims: list[Claim] = []
    for table, batch in ELSEWHERE:
        if f"{table} {batch}" not in runs:
            continue
        claims += row_claims(table, batch, runs[f"{table} {batch}"], is_whole=is_whole)
        without = runs[f"{table} {batch} without"]
        name = f"{table} {batch} without compaction"
        claims.append(median_claim(f"{name}: written", without, "written_mib", unit="MiB"))
        claims.append(median_claim(f"{name}: a batch", without, "batch_ms", unit="ms"))
    for name, results in runs.items():
        if not name.startswith("lookups"):
            continue
        for cache in ("cold", "index", "warm"):
            reads = f"{name}: {cache}: pages read for a lookup"
            target = 1.0 if cache == "index" else 4.0
            claims.append(
                median_claim(reads, results, f"{cache}_reads", target=target, at_most=True)
            )
            claims.append(median_claim(f"{name}: {cache}", results, f"{cache}_per_s", unit="/s"))
            by_100 = f"{name}: {cache}, by the hundred"
            claims.append(median_claim(by_100, results, f"{cache}_by_100_per_s", unit="/s"))
    return claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("the attribute index", size_mb=WHOLE * LEAF_ENTRY_LEN // MB)
    parser.add_argument(
        "--rows", default="", help="those alone whose name begins with: insert, update 10, lookups"
    )
    parser.add_argument("--share", type=float, default=1.0, help="so much of the draws is made")
    parser.add_argument(
        "--cpu", action="store_true", help="lookups by seconds of the CPU, where others use it too"
    )
    parser.set_defaults(entry_size=LEAF_ENTRY_LEN, runs=1)
    arguments = parse(parser, quick_mb=1)
    count = arguments.size * MB // LEAF_ENTRY_LEN
    say(f"{count:,} attributes")

    async def child(mode: str, parameters: Mapping[str, object]) -> Result:
        return await run_child(__file__, mode, parameters, dict(os.environ))

    variants = {}
    for table, batch in ELSEWHERE:
        for compacts in (True, False):
            parameters = {"table": table, "batch": batch, "compacts": compacts, "count": count}
            parameters["share"] = arguments.share
            name = f"{table} {batch}{'' if compacts else ' without'}"
            variants[name] = partial(child, "table", parameters)
    for size in (count, 10 * count):
        parameters = {"count": size, "cpu": arguments.cpu}
        variants[f"lookups in {size:,}"] = partial(child, "lookups", parameters)
    variants = {
        name: run
        for name, run in variants.items()
        if f"{name} ".startswith(f"{arguments.rows} ".lstrip())
    }
    if not variants:
        raise SystemExit(f"there is no row {arguments.rows!r}")
    runs = await take_turns(variants, arguments.runs)
    report("attribute index", arguments, claims_of(runs, is_whole=count == WHOLE), runs)
    if arguments.output == "table":
        for (table, batch), peer in ELSEWHERE.items():
            print(f"  elsewhere: {table} {batch}: {_told(peer)}")


def _told(peer: Peer) -> str:
    return (
        f"article {peer.article:,.0f} MiB, without compaction {peer.article_without:,.0f};"
        f" Pravega's class: written {peer.written:,.1f}, exact {peer.exact}, chunks {peer.chunks},"
        f" peak {peer.peak} MiB, {peer.batch_ms} ms a batch"
    )


if __name__ == "__main__":
    if not child_mode({"table": measure_table, "lookups": measure_lookups}):
        asyncio.run(main())
