"""Which disks a power cut may leave, given what a process did to its disk until then.

After ALICE (application-level crash states from a log of system calls) and CrashMonkey/ACE (small
workloads, a cut after every operation). The rules are a POSIX disk's, a little kinder than its
letter and harsher than ext4 in its default mode:

    write       since the file's last sync, each by itself: lost, kept, or torn, any of its
                sectors of 512 bytes kept; or lost, but the file has grown (zeros)
    truncate    since the file's last sync: lost or kept
    name        made, renamed or removed since the folder's last sync: any of these survive,
                but none without the earlier ones that meant the same path or the same file
    rename      both names change or neither; whether the file's bytes are durable is another
                matter: a new name may be visible without them
    sync        what came before it began is durable; what came while it ran is not

Owns: the choices at a cut, all of them when they are few, otherwise corners and a seeded sample;
and the bytes of each. Does not own what is right to find (``checker``).

Invariant: states of one cut are told apart by ``State.digest``, which covers names and bytes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tests.crash_states.ram import apply_truncate, apply_write
from tests.crash_states.recorder import (
    MakeDirectory,
    Mark,
    Names,
    Operation,
    Recording,
    Sync,
    SyncDirectory,
    Truncate,
    Write,
)

SECTOR_LEN = 512
FEW_SECTORS = 3
FEW_NAMES = 6
GROWN = -1
"""Instead of a mask of sectors: nothing of the write survived but the file's length."""


@dataclass(frozen=True, slots=True)
class State:
    """One legal disk."""

    files: dict[str, bytes]
    directories: frozenset[str]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """The power went after ``operations[:first]``; ``last`` counts the marks right behind, too.

    Whatever holds after either holds for the disk, which is the same.
    """

    first: int
    last: int


@dataclass(slots=True)
class _File:
    """A file: what is durable, and the changes since, with their places in the log."""

    durable: bytes = b""
    pending: list[tuple[int, Write | Truncate]] = field(default_factory=list)
    contents: dict[tuple[int, ...], tuple[bytes, bytes]] = field(default_factory=dict)
    """By choice: the bytes and their digest. Forgotten when ``durable`` or ``pending`` change."""

    def add(self, index: int, change: Write | Truncate) -> None:
        self.pending.append((index, change))
        self.contents.clear()

    def sync(self, since: int) -> None:
        ready = [change for index, change in self.pending if index < since]
        if ready:
            self.durable = _applied(self.durable, ready, [_everything(one) for one in ready])
            self.pending = self.pending[len(ready) :]
            self.contents.clear()

    def content(self, choice: tuple[int, ...]) -> tuple[bytes, bytes]:
        found = self.contents.get(choice)
        if found is None:
            data = _applied(self.durable, [change for _, change in self.pending], choice)
            found = self.contents[choice] = data, blake2b(data, digest_size=16).digest()
        return found


class DiskModel:
    """The disk of one recording, as far as the log was followed."""

    def __init__(self, recording: Recording) -> None:
        inodes = recording.base_inodes()
        self._files = {inode: _File(recording.base[path]) for path, inode in inodes.items()}
        self._names: dict[str, int] = dict(inodes)
        self._pending_names: list[tuple[int, Names]] = []
        self._directories = set(recording.directories)

    def follow(self, index: int, operation: Operation) -> None:
        """Take the next operation of the log."""
        match operation:
            case Write() | Truncate():
                self._files[operation.inode].add(index, operation)
            case Sync():
                self._files[operation.inode].sync(operation.since)
            case Names():
                for _, inode in operation.changes:
                    if inode is not None:
                        self._files.setdefault(inode, _File())
                self._pending_names.append((index, operation))
            case SyncDirectory():
                self._sync_directory(operation)
            case MakeDirectory():
                names = operation.directory.split("/")
                self._directories.update("/".join(names[:end]) for end in range(1, len(names) + 1))
            case Mark():
                pass

    def states(self, rng: random.Random, *, states_max: int) -> Iterator[State]:
        """Iterate over legal disks, each once; over all of them when there are few."""
        folders, files, axes = self._axes(rng)
        count = math.prod(map(len, axes))
        seen: set[bytes] = set()
        chosen = itertools.product(*axes) if count <= states_max else _sample(axes, rng, states_max)
        for point in chosen:
            state = self._state(list(folders.values()), files, point)
            if state.digest not in seen:
                seen.add(state.digest)
                yield state

    def count_states(self, rng: random.Random) -> int:
        """Return how many choices there are; some may lead to the same disk."""
        _, _, axes = self._axes(rng)
        return math.prod(map(len, axes))

    def everything(self) -> State:
        """Return the disk on which nothing at all was lost."""
        folders = self._folders()
        files = {inode: one for inode, one in self._files.items() if one.pending}
        point = [2 ** len(one) - 1 for one in folders.values()]
        point += [_everything(change) for one in files.values() for _, change in one.pending]
        return self._state(list(folders.values()), list(files), tuple(point))

    def _axes(
        self, rng: random.Random
    ) -> tuple[dict[str, list[Names]], list[int], list[Sequence[int]]]:
        """Return what can be chosen: first for each folder, then for each write of each file."""
        folders = self._folders()
        inodes = set(self._names.values())
        for _, names in self._pending_names:
            inodes |= {inode for _, inode in names.changes if inode is not None}
        files = [inode for inode in sorted(inodes) if self._files[inode].pending]
        axes: list[Sequence[int]] = [_closed_subsets(one, rng) for one in folders.values()]
        axes += [_options(one) for inode in files for _, one in self._files[inode].pending]
        return folders, files, axes

    def _sync_directory(self, operation: SyncDirectory) -> None:
        waiting = []
        for index, change in self._pending_names:
            if index < operation.since and operation.directory in _folders_of(change):
                _apply_names(self._names, change)
            else:
                waiting.append((index, change))
        self._pending_names = waiting

    def _folders(self) -> dict[str, list[Names]]:
        folders: dict[str, list[Names]] = {}
        for _, change in self._pending_names:
            folders.setdefault(_folders_of(change)[0], []).append(change)
        return folders

    def _state(self, folders: list[list[Names]], inodes: list[int], point: Sequence[int]) -> State:
        names = dict(self._names)
        for changes, kept in zip(folders, point, strict=False):
            for number, change in enumerate(changes):
                if kept >> number & 1:
                    _apply_names(names, change)
        choices: dict[int, tuple[int, ...]] = {}
        at = len(folders)
        for inode in inodes:
            end = at + len(self._files[inode].pending)
            choices[inode] = tuple(point[at:end])
            at = end
        assert at == len(point)
        whole = blake2b(digest_size=16)
        files = {}
        for path in sorted(names):
            data, digest = self._files[names[path]].content(choices.get(names[path], ()))
            files[path] = data
            whole.update(path.encode() + b"\0" + digest)
        whole.update("\n".join(sorted(self._directories)).encode())
        return State(files, frozenset(self._directories), whole.digest())


def cuts(recording: Recording) -> Iterator[tuple[Cut, DiskModel]]:
    """Iterate over a power cut after each operation; the model is good until the next one."""
    model, operations = DiskModel(recording), recording.operations
    for index, operation in enumerate(operations):
        model.follow(index, operation)
        if isinstance(operation, Mark):
            continue
        last = index + 1
        while last < len(operations) and isinstance(operations[last], Mark):
            last += 1
        yield Cut(index + 1, last), model


def _options(change: Write | Truncate) -> list[int]:
    """Return what may become of a change: masks of sectors that survive, or GROWN."""
    if isinstance(change, Truncate):
        return [0, 1]
    count = _sector_count(change)
    everything = 2**count - 1
    if count <= FEW_SECTORS:
        return [*range(everything + 1), GROWN]
    half = 2 ** (count // 2) - 1
    some = (half, everything ^ half, 1, everything ^ 1, everything >> 1, 2 ** (count - 1))
    return [0, everything, *some, everything ^ (1 << count // 2), GROWN]


def _sample(axes: list[Sequence[int]], rng: random.Random, count: int) -> Iterator[list[int]]:
    """Corners first (all lost, all kept, one lost, one kept), then points drawn with a bias."""
    lost = [0] * len(axes)
    kept = [max(options) for options in axes]
    yield lost
    yield kept
    near = list(range(len(axes)))
    rng.shuffle(near)
    for axis in near[: count // 4]:
        yield [*lost[:axis], rng.choice(axes[axis]), *lost[axis + 1 :]]
        yield [*kept[:axis], rng.choice(axes[axis]), *kept[axis + 1 :]]
    for _ in range(count - 2 - 2 * len(near[: count // 4])):
        share = rng.choice((0.1, 0.5, 0.9))
        yield [
            rng.choice(options)
            if rng.random() < 0.3
            else (max(options) if rng.random() < share else 0)
            for options in axes
        ]


def _closed_subsets(changes: list[Names], rng: random.Random) -> list[int]:
    """Return masks of changes such that each comes with the earlier ones that it builds on."""
    needs = []
    for at, change in enumerate(changes):
        earlier = [number for number in range(at) if _related(changes[number], change)]
        needs.append(sum(1 << number for number in earlier))
    if len(changes) <= FEW_NAMES:
        masks: set[int] = set(range(2 ** len(changes)))
    else:
        masks = {2**end - 1 for end in range(len(changes) + 1)}
        masks |= {rng.getrandbits(len(changes)) for _ in range(40)}
    return sorted(
        mask
        for mask in masks
        if all(need & ~mask == 0 for at, need in enumerate(needs) if mask >> at & 1)
    )


def _related(one: Names, other: Names) -> bool:
    paths = {path for path, _ in one.changes} & {path for path, _ in other.changes}
    inodes = {inode for _, inode in one.changes} & {inode for _, inode in other.changes}
    return bool(paths or inodes - {None})


def _folders_of(change: Names) -> list[str]:
    return sorted({path.rpartition("/")[0] for path, _ in change.changes})


def _apply_names(names: dict[str, int], change: Names) -> None:
    for path, inode in change.changes:
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def _sector_count(change: Write) -> int:
    first = change.offset // SECTOR_LEN
    return -(-(change.offset + len(change.data)) // SECTOR_LEN) - first


def _everything(change: Write | Truncate) -> int:
    return 1 if isinstance(change, Truncate) else 2 ** _sector_count(change) - 1


def _applied(durable: bytes, changes: Sequence[Write | Truncate], choice: Sequence[int]) -> bytes:
    if not changes:
        return durable
    data = bytearray(durable)
    for change, kept in zip(changes, choice, strict=True):
        if isinstance(change, Truncate):
            if kept:
                apply_truncate(data, change.length)
        elif kept == GROWN:
            apply_truncate(data, max(len(data), change.offset + len(change.data)))
        elif kept == _everything(change):
            apply_write(data, change.offset, change.data)
        elif kept:
            _apply_torn(data, change, kept)
    return bytes(data)


def _apply_torn(data: bytearray, change: Write, kept: int) -> None:
    first = change.offset // SECTOR_LEN
    for sector in range(_sector_count(change)):
        if kept >> sector & 1:
            start = max(change.offset, (first + sector) * SECTOR_LEN)
            end = min(change.offset + len(change.data), (first + sector + 1) * SECTOR_LEN)
            piece = change.data[start - change.offset : end - change.offset]
            apply_write(data, start, piece)
