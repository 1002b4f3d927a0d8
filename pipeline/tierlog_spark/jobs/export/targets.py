"""Where an export is written: a folder that all executors see, or a bucket.

Owns whole files under names with slashes. Does not own what they mean (``log``).

Invariants:
    * When ``put`` or ``put_new`` returns, the file is there to stay.
    * ``put_new`` never changes a file, and never shows half of one. In a folder, whoever is killed
      in it leaves one beside the name, hidden (``log`` knows these by their names).
    * A target is pickled to tasks: it holds where it is, and no connection.
"""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from tierlog.model.errors import RefusedError
from tierlog.offload.groups import plain_errors
from tierlog.ports.files import Buffer
from tierlog.ports.objects import ObjectExistsError, ObjectStore
from tierlog.runtime.settings import S3Settings, Settings
from tierlog.wiring.objects import open_bucket

_T = TypeVar("_T")
REQUESTS_IN_FLIGHT: Final = 16


class Target(Protocol):
    """A place for files. Nothing here may be called on a running loop."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        ...

    def below(self, name: str) -> "Target":
        """Return the part of it whose names begin so, with a slash behind."""
        ...

    def names(self) -> list[str]:
        """Return the names of all files, in order, or raise what keeps them from being known."""
        ...

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Return whole files, None for each that is not there."""
        ...

    def unseen(self, lengths: Mapping[str, int]) -> list[str]:
        """Return which of the files, that others wrote at these lengths, are not there for us."""
        ...

    def put(self, name: str, body: Buffer) -> None:
        """Write a file under a name that nobody else uses."""
        ...

    def put_new(self, name: str, body: bytes) -> bool:
        """Write a file unless another one has the name; False: another one has."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there is as good."""
        ...


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """A folder of this machine, or one that all machines mount."""

    folder: Path

    @property
    def place(self) -> str:
        return str(self.folder)

    def below(self, name: str) -> "FolderTarget":
        return replace(self, folder=self.folder / name)

    def names(self) -> list[str]:
        return sorted(
            Path(folder, name).relative_to(self.folder).as_posix()
            for folder, _, files in os.walk(self.folder, onerror=self._not_listed)
            for name in files
        )

    def _not_listed(self, error: OSError) -> None:
        """Raise what keeps a folder from being listed: it is not empty for that."""
        if not isinstance(error, FileNotFoundError):
            raise error

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._get(name) for name in names]

    def _get(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def unseen(self, lengths: Mapping[str, int]) -> list[str]:
        return [name for name, length in lengths.items() if self._length(name) != length]

    def _length(self, name: str) -> int | None:
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def put(self, name: str, body: Buffer) -> None:
        path = self.folder / name
        made = _made_folders(path.parent)
        _write(path, body)
        for folder in made:
            _sync_folder(folder)

    def put_new(self, name: str, body: bytes) -> bool:
        path = self.folder / name
        made = _made_folders(path.parent)
        # Beside it first: under its name there is never half of it.
        beside = path.with_name(f".{path.name}.{hashlib.sha256(body).hexdigest()[:16]}")
        _write(beside, body)
        try:
            os.link(beside, path)
        except (FileExistsError, FileNotFoundError):
            # Who took the name since may have cleaned away what lay beside it.
            return self._get(name) == body
        finally:
            beside.unlink(missing_ok=True)
        for folder in made:
            _sync_folder(folder)
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def _made_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; return all whose entries have to be synced."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return [folder, *(one.parent for one in missing)]


def _write(path: Path, body: Buffer) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@dataclass(frozen=True, slots=True)
class BucketTarget:
    """Part of a bucket, through Tierlog's own object port: Spark needs no library for it.

    ``prefix`` is empty, or ends with a slash.
    """

    s3: S3Settings
    prefix: str

    @property
    def place(self) -> str:
        return f"s3://{self.s3.bucket}/{self.prefix}".rstrip("/")

    def below(self, name: str) -> "BucketTarget":
        return replace(self, prefix=f"{self.prefix}{name}/")

    def names(self) -> list[str]:
        async def find(objects: ObjectStore) -> list[str]:
            found = [info.key async for info in objects.list(self.prefix)]
            return sorted(key.removeprefix(self.prefix) for key in found)

        return self._ask(find)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        async def read(objects: ObjectStore, name: str) -> bytes | None:
            found = await objects.get(self.prefix + name)
            return None if found is None else found[1]

        return self._each(names, read)

    def unseen(self, lengths: Mapping[str, int]) -> list[str]:
        # A bucket is the same one for everybody.
        del lengths
        return []

    def put(self, name: str, body: Buffer) -> None:
        async def write(objects: ObjectStore) -> None:
            await objects.put(self.prefix + name, bytes(body), metadata={})

        self._ask(write)

    def put_new(self, name: str, body: bytes) -> bool:
        async def write(objects: ObjectStore) -> bool:
            key = self.prefix + name
            try:
                await objects.put(key, body, metadata={}, if_none_match=True)
            except ObjectExistsError:
                found = await objects.get(key)
                return found is not None and found[1] == body
            return True

        return self._ask(write)

    def delete(self, names: Iterable[str]) -> None:
        async def remove(objects: ObjectStore, name: str) -> None:
            await objects.delete(self.prefix + name)

        self._each(list(names), remove)

    def _ask(self, work: Callable[[ObjectStore], Coroutine[None, None, _T]]) -> _T:
        async def run() -> _T:
            async with self._opened() as objects:
                return await work(objects)

        return asyncio.run(run())

    def _each(
        self,
        names: Sequence[str],
        work: Callable[[ObjectStore, str], Coroutine[None, None, _T]],
    ) -> list[_T]:
        """Do the same with each name, several at a time."""

        async def all_of(objects: ObjectStore) -> list[_T]:
            slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

            async def one(name: str) -> _T:
                async with slots:
                    return await work(objects, name)

            with plain_errors():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(name)) for name in names]
            return [task.result() for task in tasks]

        return self._ask(all_of) if names else []

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[ObjectStore]:
        # Nothing else is needed, least of all the environment of an executor.
        settings = Settings.model_construct(s3=self.s3)
        async with open_bucket(settings, self.s3.bucket) as objects:
            yield objects


def target_of(text: str, s3: S3Settings) -> Target:
    """Return the place that a user names: a folder, or s3://BUCKET/PREFIX at the same store."""
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        if not text.strip():
            raise RefusedError("the export has no place", remedy="Give a folder or s3://BUCKET")
        # One folder has one name: a table says by it which export it is of.
        return FolderTarget(Path(os.path.normpath(Path(text).absolute())))
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if scheme != "s3" or not bucket:
        raise RefusedError(
            f"{text!r} is no place for an export", remedy="Give a folder, or s3://BUCKET/PREFIX"
        )
    return BucketTarget(s3.model_copy(update={"bucket": bucket}), f"{prefix}/" if prefix else "")
