"""What every metadata store must do (ports/metadata.py), whoever it is.

A module that runs the suite subclasses ``MetadataContract`` and gives a fixture ``connect``: a
function that makes a client of one and the same server; and ``root``, a path of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tierlog.model.errors import RefusedError, RetryableError, TierlogError
from tierlog.ports.metadata import (
    REQUEST_BYTES_MAX,
    Check,
    Create,
    Delete,
    MetadataStore,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Put,
    VersionConflictError,
    Versioned,
)

Connect = Callable[[], Awaitable[MetadataStore]]


class MetadataContract:
    async def test_create_get_set_delete(self, connect: Connect, root: str):
        store = await connect()
        path = f"{root}/a"
        assert await store.get(path) is None
        await store.create(path, b"one")
        assert await store.get(path) == Versioned(b"one", 0)
        assert await store.set(path, b"two", version=0) == 1
        assert await store.set(path, b"three", version=-1) == 2
        assert await store.get(path) == Versioned(b"three", 2)
        await store.delete(path, version=2)
        assert await store.get(path) is None

    async def test_create_makes_empty_parents(self, connect: Connect, root: str):
        store = await connect()
        await store.create(f"{root}/a/b/c", b"leaf")
        assert await store.get(f"{root}/a/b") == Versioned(b"", 0)
        assert await store.children(f"{root}/a") == ["b"]
        await store.create(f"{root}/a/b/d", b"")
        assert await store.children(f"{root}/a/b") == ["c", "d"]

    async def test_children_of_nothing_is_none_and_of_a_leaf_is_empty(
        self, connect: Connect, root: str
    ):
        store = await connect()
        assert await store.children(f"{root}/a") is None
        await store.create(f"{root}/a", b"")
        assert await store.children(f"{root}/a") == []

    async def test_refusals_change_nothing_and_are_told_apart(self, connect: Connect, root: str):
        store = await connect()
        path = f"{root}/a"
        with pytest.raises(NoNodeError):
            await store.set(path, b"", version=-1)
        with pytest.raises(NoNodeError):
            await store.delete(path, version=-1)
        await store.create(path, b"one")
        with pytest.raises(NodeExistsError):
            await store.create(path, b"other")
        with pytest.raises(VersionConflictError):
            await store.set(path, b"other", version=7)
        with pytest.raises(VersionConflictError):
            await store.delete(path, version=7)
        await store.create(f"{path}/below", b"")
        with pytest.raises(NotEmptyError):
            await store.delete(path, version=0)
        assert await store.get(path) == Versioned(b"one", 0)

    async def test_ones_own_successful_set_sent_again_is_a_conflict(
        self, connect: Connect, root: str
    ):
        store = await connect()
        path = f"{root}/a"
        await store.create(path, b"one")
        await store.set(path, b"two", version=0)
        with pytest.raises(VersionConflictError):
            await store.set(path, b"two", version=0)
        assert await store.get(path) == Versioned(b"two", 1)

    async def test_too_much_data_is_refused_and_the_session_lives(
        self, connect: Connect, root: str
    ):
        store = await connect()
        await store.create(f"{root}/a", b"x" * REQUEST_BYTES_MAX)
        with pytest.raises(RefusedError, match="Split it"):
            await store.create(f"{root}/b", b"x" * (REQUEST_BYTES_MAX + 1))
        half = b"x" * (REQUEST_BYTES_MAX // 2 + 1)
        with pytest.raises(RefusedError, match="Split it"):
            await store.transact([Create(f"{root}/c", half), Create(f"{root}/d", half)])
        assert await store.children(root) == ["a"]
        assert not store.session_lost.is_set()

    async def test_transaction_does_all(self, connect: Connect, root: str):
        store = await connect()
        await store.create(f"{root}/checked", b"")
        await store.create(f"{root}/put", b"old")
        await store.create(f"{root}/deleted", b"")
        await store.transact(
            [
                Check(f"{root}/checked", 0),
                Create(f"{root}/made", b"new"),
                Create(f"{root}/made/below", b"newer"),
                Put(f"{root}/put", b"new", 0),
                Put(f"{root}/put", b"newer", 1),
                Delete(f"{root}/deleted", 0),
            ]
        )
        assert await store.children(root) == ["checked", "made", "put"]
        assert await store.get(f"{root}/made/below") == Versioned(b"newer", 0)
        assert await store.get(f"{root}/put") == Versioned(b"newer", 2)

    @pytest.mark.parametrize(
        ("last", "error"),
        [
            (lambda root: Check(f"{root}/a", 7), VersionConflictError),
            (lambda root: Check(f"{root}/missing", 0), NoNodeError),
            (lambda root: Put(f"{root}/a", b"", 7), VersionConflictError),
            (lambda root: Put(f"{root}/missing", b"", 0), NoNodeError),
            (lambda root: Delete(f"{root}/a", 7), VersionConflictError),
            (lambda root: Delete(f"{root}/missing", 0), NoNodeError),
            (lambda root: Delete(f"{root}/full", 0), NotEmptyError),
            (lambda root: Create(f"{root}/a", b""), NodeExistsError),
            (lambda root: Create(f"{root}/missing/b", b""), NoNodeError),
        ],
    )
    async def test_a_refused_transaction_leaves_nothing_changed(
        self, connect: Connect, root: str, last, error
    ):
        store = await connect()
        await store.create(f"{root}/a", b"one")
        await store.create(f"{root}/gone", b"one")
        await store.create(f"{root}/full/below", b"")
        with pytest.raises(error):
            await store.transact(
                [
                    Create(f"{root}/new", b""),
                    Put(f"{root}/a", b"two", 0),
                    Delete(f"{root}/gone", 0),
                    # the version that /a has by now is 1, so that 7 and 0 are both wrong
                    last(root),
                    Create(f"{root}/after", b""),
                ]
            )
        assert await store.children(root) == ["a", "full", "gone"]
        assert await store.get(f"{root}/a") == Versioned(b"one", 0)
        assert await store.get(f"{root}/gone") == Versioned(b"one", 0)

    async def test_of_two_who_change_one_version_one_wins(self, connect: Connect, root: str):
        first, second = await connect(), await connect()
        await first.create(f"{root}/a", b"")
        results: list[str] = []

        async def compare_and_set(store: MetadataStore, data: bytes) -> None:
            try:
                await store.set(f"{root}/a", data, version=0)
                results.append("won")
            except VersionConflictError:
                results.append("lost")

        async with asyncio.TaskGroup() as group:
            group.create_task(compare_and_set(first, b"1"))
            group.create_task(compare_and_set(second, b"2"))
        assert sorted(results) == ["lost", "won"]
        await first.sync(root)
        found = await first.get(f"{root}/a")
        assert found is not None
        assert found.version == 1

    async def test_sync_then_read_sees_what_another_wrote(self, connect: Connect, root: str):
        writer, reader = await connect(), await connect()
        await writer.create(f"{root}/a", b"0")
        for number in range(10):
            await writer.set(f"{root}/a", b"%d" % number, version=number)
            await reader.sync(f"{root}/a")
            assert await reader.get(f"{root}/a") == Versioned(b"%d" % number, number + 1)

    async def test_sync_of_a_path_that_is_not_there(self, connect: Connect, root: str):
        await (await connect()).sync(f"{root}/nothing")

    async def test_watches_fire_once_made_changed_removed(self, connect: Connect, root: str):
        watcher, other = await connect(), await connect()
        path = f"{root}/a"
        found, made = await watcher.watch(path)
        assert found is None
        assert not made.is_set()
        await other.create(path, b"one")
        await _soon(made)
        found, changed = await watcher.watch(path)
        assert found == Versioned(b"one", 0)
        await other.transact([Put(path, b"two", 0)])
        await _soon(changed)
        found, removed = await watcher.watch(path)
        assert found == Versioned(b"two", 1)
        assert not removed.is_set()
        await other.delete(path, version=1)
        await _soon(removed)

    async def test_child_watches_fire_for_children_only(self, connect: Connect, root: str):
        watcher, other = await connect(), await connect()
        names, made = await watcher.watch_children(f"{root}/a")
        assert names is None
        await other.create(f"{root}/a", b"")
        await _soon(made)
        names, changed = await watcher.watch_children(f"{root}/a")
        assert names == []
        await other.set(f"{root}/a", b"new data", version=0)
        await other.create(f"{root}/b", b"")
        await watcher.sync(root)
        assert not changed.is_set()
        await other.create(f"{root}/a/x", b"")
        await _soon(changed)
        names, changed = await watcher.watch_children(f"{root}/a")
        assert names == ["x"]
        await other.delete(f"{root}/a/x", version=-1)
        await _soon(changed)

    async def test_ephemeral_nodes_go_with_close(self, connect: Connect, root: str):
        holder, other = await connect(), await connect()
        assert await holder.create_ephemeral(f"{root}/locks/a", b"me") == f"{root}/locks/a"
        found, gone = await other.watch(f"{root}/locks/a")
        assert found == Versioned(b"me", 0)
        with pytest.raises(NodeExistsError):
            await other.create_ephemeral(f"{root}/locks/a", b"you")
        with pytest.raises(RefusedError):
            await other.create(f"{root}/locks/a/below", b"")
        await holder.close()
        await _soon(gone)
        await other.sync(root)
        assert await other.get(f"{root}/locks/a") is None

    async def test_sequence_numbers_rise_and_never_repeat(self, connect: Connect, root: str):
        store, other = await connect(), await connect()
        paths = [
            await client.create_ephemeral(f"{root}/ids/id-", b"", sequential=True)
            for client in (store, other, store, other)
        ]
        numbers = [int(path.removeprefix(f"{root}/ids/id-")) for path in paths]
        assert all(len(path) == len(f"{root}/ids/id-") + 10 for path in paths)
        assert numbers == sorted(set(numbers))
        for path in paths:
            await store.delete(path, version=-1)
        path = await store.create_ephemeral(f"{root}/ids/id-", b"", sequential=True)
        assert int(path.removeprefix(f"{root}/ids/id-")) > numbers[-1]

    async def test_a_sequence_position_is_the_next_number_and_looking_takes_none(
        self, connect: Connect, root: str
    ):
        store, other = await connect(), await connect()
        ids = f"{root}/ids"
        assert await store.sequence_position(ids) is None

        async def next_number() -> int:
            path = await other.create_ephemeral(f"{ids}/id-", b"", sequential=True)
            made.append(path)
            return int(path.removeprefix(f"{ids}/id-"))

        made: list[str] = []
        assert await next_number() == 0
        for delete in (False, True, True, False, True):
            await store.sync(ids)
            position = await store.sequence_position(ids)
            assert await store.sequence_position(ids) == position
            assert await next_number() == position
            if delete:
                for path in made:
                    await other.delete(path, version=-1)
                made.clear()
        # Others below it count as well, made and gone in a transaction, or refused with one.
        await other.create(f"{ids}/other", b"")
        await other.transact([Create(f"{ids}/a", b""), Delete(f"{ids}/a", 0)])
        with pytest.raises(NoNodeError):
            await other.transact([Create(f"{ids}/b", b""), Check(f"{ids}/missing", 0)])
        await store.sync(ids)
        position = await store.sequence_position(ids)
        assert position is not None
        assert await next_number() == position
        # Nor do those go back that go with a session.
        await other.close()
        await store.sync(ids)
        assert await store.children(ids) == ["other"]
        assert await store.sequence_position(ids) == position + 1

    async def test_a_closed_client_says_so(self, connect: Connect, root: str):
        store = await connect()
        await store.close()
        await store.close()
        with pytest.raises(RetryableError):
            await store.get(root)
        with pytest.raises(TierlogError):
            await store.create(f"{root}/a", b"")

    async def test_expiry_ends_the_session_and_a_new_one_follows(
        self, connect: Connect, root: str, expire
    ):
        holder, other = await connect(), await connect()
        await holder.create_ephemeral(f"{root}/leader", b"me")
        lost = holder.session_lost
        _, gone = await other.watch(f"{root}/leader")
        _, own_watch = await holder.watch(f"{root}/other")
        await expire(holder)
        await _soon(lost)
        await _soon(gone)
        await _soon(own_watch)  # whoever waits on a watch of a lost session must look again
        await _until_works(holder, root)
        assert holder.session_lost is not lost
        assert not holder.session_lost.is_set()
        assert await holder.get(f"{root}/leader") is None
        await holder.create_ephemeral(f"{root}/leader", b"me again")


async def _soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(15):
        await event.wait()


async def _until_works(store: MetadataStore, root: str) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                return await store.sync(root)
            except RetryableError:
                await asyncio.sleep(0.1)
