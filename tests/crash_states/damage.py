"""Damage to a node's files: flipped bytes, cut files, swapped pages, files that are gone.

Owns: small nodes with a known content, every damage of a kind, and what a node may make of it:

    RIGHT     every entry that was answered is read, the right bytes
    UNKNOWN   some can't be read, and the node says so (CORRUPT or UNKNOWN), and reports damage
    REFUSED   the node does not open, with an error that has a remedy
    LOST      some are called absent; ``ALLOWED`` has it only where nothing on the disk can tell

Anything else is a failure whatever the table says: wrong bytes, an entry twice, another error, a
fence or a freed id that is lost, an entry that can't be read while the log says nothing, no end.

The one exception: a last journal segment that grew (none was filled and ready when it began) and is
cut, or a last segment that is gone, takes its last groups, whatever they held, together with the
marker that would have told. Only other copies can show that.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

import structlog

from tests.crash_states.checker import Expectation, read_ledger
from tests.crash_states.life import ROOTS, TINY, VIRTUAL_S_MAX, Client, open_node, running
from tests.crash_states.ram import RamFiles
from tests.crash_states.recorder import Recording, recorded_ram
from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import make_run, outcome
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import NodeId
from tierlog.ports.files import Files
from tierlog.ports.metadata import MetadataStore
from tierlog_ingest.storage.cookies import check_cookie
from tierlog_ingest.storage.journal.format import SegmentHeader

PAGE_LEN = 4096
QUIET = TINY.model_copy(
    update={
        "journal_segment_bytes": 16 * 1024,
        "checkpoint_interval_s": 1000,
        "checkpoint_journal_bytes": 2**20,
        "gc_interval_s": 1000,
    }
)
"""Nothing happens by itself."""
CLUSTER_ID, NODE_ID = UUID(int=7), NodeId("n1")
HELD, FENCED, FREED = (1, 2, 3), 2, 4
PROBE = 440
HEADER_LEN, ZEROS = 48, bytes(4)
LOUD = frozenset({"warning", "error"})
LOST_IDS = frozenset(f"ledger {one} takes adds again" for one in (FENCED, FREED))


class Verdict(StrEnum):
    """What a node made of a damage."""

    RIGHT = "right"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    LOST = "lost"


R, U, X, L = Verdict.RIGHT, Verdict.UNKNOWN, Verdict.REFUSED, Verdict.LOST

ALLOWED: dict[str, dict[str, set[Verdict]]] = {
    # what file       a byte flipped  cut              a page swapped  gone
    "journal": {"flip": {R, U}, "cut": {R, U}, "swap": {R, U}, "gone": {R, U}},
    "last journal": {"flip": {R, U}, "cut": {R, U}, "swap": {R, U}, "gone": {R, U, L}},
    "growing journal": {"flip": {R, U}, "cut": {R, U, L}, "swap": {R, U}, "gone": {R, U, L}},
    "spare": {"flip": {R}, "cut": {R}, "swap": {R}, "gone": {R}},
    "log": {"flip": {R, U}, "cut": {R, U}, "swap": {R, U}, "gone": {R, U}},
    "index": {"flip": {R}, "cut": {R}, "swap": {R}, "gone": {R}},
    "state": {"flip": {X}, "cut": {X}, "swap": {R, X}, "gone": {X}},
    "one state": {"flip": {R, U}, "cut": {R, U}, "swap": {R, U, X}, "gone": {R, U}},
    "cookie": {"flip": {R, X}, "cut": {X}, "swap": {R, X}, "gone": {X}},
}


@dataclass(frozen=True, slots=True)
class Node:
    """A node's disk, what it holds, and the metadata store that knows its cookie."""

    name: str
    roots: tuple[str, ...]
    files: dict[str, bytes]
    directories: frozenset[str]
    expected: Expectation
    metadata: MemoryMetadata


@dataclass(frozen=True, slots=True)
class Case:
    """One damage: which files it changes (None: it is gone), in words and in bytes."""

    how: str
    where: str
    changes: dict[str, bytes | None]


@dataclass(slots=True)
class Report:
    """What nodes made of damages, by file and kind of damage; and what must not be."""

    counts: Counter[tuple[str, str, Verdict]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = sorted({(kind, how) for kind, how, _ in self.counts})
        rows = [
            f"{kind:14}{how:6}"
            + "".join(f"{one}: {self.counts[kind, how, one]:<9}" for one in Verdict)
            for kind, how in kinds
        ]
        return "\n".join([*rows, *self.failures])


def kind_of(path: str, files: dict[str, bytes]) -> str:
    """Return which row of the table a file belongs to."""
    name = path.partition("/")[2]
    if name.startswith("journal/"):
        if path.endswith(".spare"):
            return "spare"
        if path != _last_segment(files):
            return "journal"
        is_filled = SegmentHeader.unpack(files[path]).filled_len > 0
        return "last journal" if is_filled else "growing journal"
    if name.startswith("logs/"):
        return "log"
    if name == "state" and sum(one.endswith("/state") for one in files) > 1:
        return "one state"
    return "index" if name.startswith("index/") else name


def _last_segment(files: dict[str, bytes]) -> str:
    return max(path for path in files if path.endswith(".journal"))


# Nodes


def crashed_node(*, folder_count: int = 1) -> Node:
    """A node that was killed when idle: much is in the journal alone."""
    return _grown("crashed", ROOTS[:folder_count], in_order=False)


def growing_node() -> Node:
    """As ``crashed_node``, in its first life: its only journal segment was not filled before."""
    return _grown("growing", ROOTS[:1], in_order=False, is_first_life=True)


def stopped_node(*, folder_count: int = 1) -> Node:
    """A node that ended in order: everything is in logs and indexes."""
    return _grown("stopped", ROOTS[:folder_count], in_order=True)


def _grown(
    name: str, roots: tuple[str, ...], *, in_order: bool, is_first_life: bool = False
) -> Node:
    recording, metadata = Recording(), MemoryMetadata()
    folders = recorded_ram(recording, roots)
    image: dict[str, bytes | bytearray] = {}

    async def live() -> None:
        client = Client(recording, random.Random(3))
        store = metadata.connect()
        await _check_cookies(folders, store)
        settings = QUIET
        if is_first_life:
            settings = QUIET.model_copy(update={"journal_segment_bytes": 2**20})
        else:
            async with running(await open_node(folders, settings=QUIET), in_order=True):
                await asyncio.sleep(1)  # so that the next life's segment is filled
        async with running(await open_node(folders, settings=settings), in_order=in_order) as node:
            for size in (100, 700, 10, 1500):
                for ledger_id in (*HELD, FREED):
                    await client.add(node, ledger_id, size=size)
            await node.checkpoint()
            for size in (300, 0, 900):
                async with asyncio.TaskGroup() as tasks:
                    for ledger_id in HELD:
                        tasks.create_task(client.add(node, ledger_id, size=size))
            await client.fence(node, FENCED)
            await client.free(node, FREED)
            for ledger_id in HELD:
                await client.add(node, ledger_id, size=50)
            await asyncio.sleep(1)  # so that the journal's marker is there
            image.update({path: bytes(data) for path, data in folders[0].image().items()})
        if in_order:
            image.clear()
            image.update({path: bytes(data) for path, data in folders[0].image().items()})

    with structlog.testing.capture_logs():
        run_virtual(live(), until_s=VIRTUAL_S_MAX)
    expected = Expectation()
    expected.follow(recording.operations)
    files = {path: bytes(data) for path, data in image.items()}
    directories = frozenset().union(*(one.directories() for one in folders))
    return Node(f"{name}-{len(roots)}", roots, files, directories, expected, metadata)


async def _check_cookies(folders: Sequence[Files], store: MetadataStore) -> None:
    first, *others = folders
    await check_cookie(
        first, store, _ids(), cluster_id=CLUSTER_ID, node_id=NODE_ID, ledger_dirs=others
    )


def _ids() -> SeededIds:
    return SeededIds(random.Random(5))


# Damages


def flips(node: Node, rng: random.Random, *, most: int | None = None) -> Iterator[Case]:
    """Flip each byte of each file, or of large ones the headers and ``most`` bytes drawn."""
    for path, data in sorted(node.files.items()):
        places: list[int] = list(range(len(data)))
        if most is not None and len(data) > most:
            pages = (at for at in range(0, len(data), PAGE_LEN) if data[at : at + 4] != ZEROS)
            headers = {at + more for at in pages for more in range(HEADER_LEN)}
            headers &= set(places)
            places = sorted(headers | set(rng.sample(places, most)))
        for at in places:
            damaged = bytearray(data)
            damaged[at] ^= rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 255))
            yield Case("flip", f"{path} at byte {at}", {path: bytes(damaged)})


def truncations(node: Node, *, step: int) -> Iterator[Case]:
    """Cut each file at each length: near the ends of pages by 1, otherwise by ``step``."""
    for path, data in sorted(node.files.items()):
        for length in range(len(data)):
            near = min(length % PAGE_LEN, -length % PAGE_LEN)
            if length % step == 0 or near <= 1 or length < HEADER_LEN or len(data) - length < 40:
                yield Case("cut", f"{path} to {length} bytes", {path: data[:length]})


def swaps(node: Node) -> Iterator[Case]:
    """Swap every two pages of 4 KB, within a file and across files; the last may be short."""
    pages = [
        (path, at)
        for path, data in sorted(node.files.items())
        for at in range(0, len(data), PAGE_LEN)
    ]
    for (one, one_at), (other, other_at) in itertools.combinations(pages, 2):
        length = min(PAGE_LEN, len(node.files[one]) - one_at, len(node.files[other]) - other_at)
        changed = {path: bytearray(node.files[path]) for path in (one, other)}
        piece = changed[one][one_at : one_at + length]
        if piece == changed[other][other_at : other_at + length]:
            continue
        changed[one][one_at : one_at + length] = changed[other][other_at : other_at + length]
        changed[other][other_at : other_at + length] = piece
        where = f"{one} at {one_at} with {other} at {other_at}"
        yield Case("swap", where, {path: bytes(data) for path, data in changed.items()})


def losses(node: Node) -> Iterator[Case]:
    """Remove each file."""
    for path in sorted(node.files):
        yield Case("gone", path, {path: None})


# Verdicts


def judge(node: Node, cases: Iterator[Case]) -> Report:
    """Open a node on each damage and compare what it makes of it with the table."""
    report = Report()
    for case in cases:
        kinds = sorted({kind_of(path, node.files) for path in case.changes})
        allowed = set().union(*(ALLOWED[kind][case.how] for kind in kinds))
        verdict, wrong = _open(node, case)
        if Verdict.LOST in allowed:
            wrong = [what for what in wrong if what not in LOST_IDS]
        report.counts[" + ".join(kinds), case.how, verdict] += 1
        if verdict not in allowed:
            wrong.append(f"{verdict} is not what the table has")
        for what in wrong:
            report.failures.append(f"{node.name} {case.how} {case.where}: {what}")
    return report


def _open(node: Node, case: Case) -> tuple[Verdict, list[str]]:
    files = {path: data for path, data in node.files.items() if path not in case.changes}
    files.update({path: data for path, data in case.changes.items() if data is not None})
    with structlog.testing.capture_logs() as events:
        try:
            verdict, wrong = run_virtual(_read(node, case, files), until_s=VIRTUAL_S_MAX)
        except TierlogError as error:
            verdict = Verdict.REFUSED
            wrong = [] if error.remedy else [f"an error without a remedy: {error}"]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            verdict, wrong = Verdict.REFUSED, [f"it ends with {error!r}"]
    if verdict is Verdict.UNKNOWN and not LOUD & {one["log_level"] for one in events}:
        wrong.append("nothing is said of it in the log")
    return verdict, wrong


async def _read(node: Node, case: Case, files: dict[str, bytes]) -> tuple[Verdict, list[str]]:
    image: dict[str, bytes | bytearray] = dict(files)
    folders = [RamFiles(image, root=root) for root in node.roots]
    for folder in folders:
        folder.directories.update(node.directories)
    if any(path.endswith("/cookie") for path in case.changes):
        store = node.metadata.connect()
        await _check_cookies(folders, store)
    async with running(await open_node(folders, settings=QUIET), in_order=False) as opened:
        wrong = []
        refusals = {one: await outcome(opened.add(make_run(one, PROBE))) for one in (FENCED, FREED)}
        for ledger_id, answer in refusals.items():
            if not isinstance(answer, TierlogError) or answer.reason is not Reason.FENCED:
                wrong.append(f"ledger {ledger_id} takes adds again")
        seen = {one: await read_ledger(opened, one, node.expected.asked) for one in HELD}
        listed = set(await opened.list_ledgers())
    lost, unknown = set(), set()
    for ledger_id, one in seen.items():
        kept = {key for key in node.expected.stored if key[0] == ledger_id}
        wrong += [f"ledger {ledger_id}: {what}" for what in one.wrong]
        unknown |= kept & set(one.unknown)
        lost |= kept - set(one.runs) - set(one.unknown)
        if set(one.runs) and ledger_id not in listed:
            wrong.append(f"ledger {ledger_id} is not listed")
        if one.gone:
            wrong.append(f"ledger {ledger_id} is called deleted")
    if lost:
        return Verdict.LOST, wrong
    return (Verdict.UNKNOWN if unknown else Verdict.RIGHT), wrong
