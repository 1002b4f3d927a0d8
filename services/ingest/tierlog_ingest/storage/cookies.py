"""A node's cookie: which node, of which cluster, a directory belongs to.

The cookie lies in each of the node's directories and in the metadata store, everywhere the same. A
directory that lost its cookie lost its data too (another disk is mounted, or none), and a node
that served it as if it were empty would call acknowledged entries absent.

Owns: formatting a fresh node, and refusing one that is not what it was. Does not own the cookie's
bytes (``tierlog.format.records``).

Invariants:
    * Nothing is opened before directory and metadata store agree.
    * A node id is formatted once: a directory without a cookie never takes over a known id, and
      none takes over the id of a node that was decommissioned.

Crash: the directories' cookies are durable before the metadata store's is made, so a format that
was cut short is directories with nothing but cookies, or less; the next start goes on with it.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog.change import settle
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NodeId
from tierlog.model.node import Cookie
from tierlog.ports.files import Files
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore
from tierlog_ingest.storage.entrylog.entry_log import LOGS_DIRECTORY
from tierlog_ingest.storage.index.index_files import INDEX_DIRECTORY
from tierlog_ingest.storage.journal.segments import JOURNAL_DIRECTORY

log = structlog.get_logger()

COOKIE_PATH: Final = "cookie"
_TEMPORARY_PATH: Final = "cookie.new"
_FOLDERS: Final = frozenset({JOURNAL_DIRECTORY, LOGS_DIRECTORY, INDEX_DIRECTORY})
_NOT_DATA: Final = frozenset({COOKIE_PATH, _TEMPORARY_PATH, "lock", "lost+found"})


async def check_cookie(
    files: Files,
    store: MetadataStore,
    ids: Ids,
    *,
    cluster_id: UUID,
    node_id: NodeId,
    ledger_dirs: Sequence[Files] = (),
) -> Cookie:
    """Return the node's cookie, formatting a fresh node; ``RefusedError`` for any doubt."""
    path = paths.cookie_path(node_id)
    await store.sync(path)
    stored = await store.get(path)
    known = records.decode_cookie(stored.data) if stored is not None else None
    await _check_not_barred(store, node_id)
    directories = (files, *ledger_dirs)
    cookies = [await _read(one) for one in directories]
    has_data = any([await _has_data(one) for one in directories])
    found = next((one for one in cookies if one is not None), None)
    for cookie in filter(None, cookies):
        if (cookie.cluster_id, cookie.node_id) != (cluster_id, node_id):
            raise _refused(
                f"the data directory belongs to node {cookie.node_id} of cluster"
                f" {cookie.cluster_id}, not to node {node_id} of cluster {cluster_id}",
                "Mount the right disk, or set the node id that the directory has",
            )
    missing = [one for one, cookie in zip(directories, cookies, strict=True) if cookie is None]
    if missing:
        if known is not None or has_data:
            raise _refused(
                f"{len(missing)} of {len(directories)} data directories of node {node_id} have"
                " no cookie",
                "Mount the right disk. If its data is lost for good, start the node with an empty"
                " directory and a new node id, and let the other nodes repair what it held",
            )
        found = found or Cookie(cluster_id=cluster_id, node_id=node_id, instance_id=ids.uuid())
        for one in missing:
            await _write(one, found)
        log.info("node.formatted", node_id=node_id, instance_id=str(found.instance_id))
    assert found is not None
    if known is None:
        if has_data:
            raise _refused(
                f"the metadata store does not know node {node_id}, whose directory has data",
                "Check that the metadata store is the right one, and not an older backup",
            )
        known = await _register(store, ids, path, found)
    if any(one not in {None, known} for one in (found, *cookies)):
        raise _refused(
            f"the data directory of node {node_id} is of an older format of that node",
            "Mount the right disk, or remove the directory of the older node",
        )
    return found


async def _check_not_barred(store: MetadataStore, node_id: NodeId) -> None:
    found = await store.get(paths.draining_path(node_id))
    if found is not None and records.decode_draining(found.data).done_ms:
        raise _refused(
            f"node {node_id} was decommissioned, and its id is not used again",
            "Take empty directories, or format these, and start it with a new node id; under"
            " tierlog up remove the node's folder, and start with as many nodes as are wanted",
        )


async def _register(store: MetadataStore, ids: Ids, path: str, cookie: Cookie) -> Cookie:
    """Put the cookie into the metadata store, unless there is one; return what is there."""

    async def one_round() -> Cookie:
        stored = await store.get(path)
        if stored is not None:
            return records.decode_cookie(stored.data)
        await store.create(path, records.encode_cookie(cookie))
        return cookie

    return await settle(store, ids, path, one_round)


async def _has_data(files: Files) -> bool:
    """Tell whether anything lies there; folders that formatting emptied are nothing."""
    for name in sorted(set(await files.list("")) - _NOT_DATA):
        if name not in _FOLDERS:
            return True
        for one in await files.list(name):
            if name != INDEX_DIRECTORY or await files.list(f"{name}/{one}"):
                return True
    return False


async def _read(files: Files) -> Cookie | None:
    try:
        file = await files.open(COOKIE_PATH)
    except FileNotFoundError:
        return None
    try:
        return records.decode_cookie(await file.read(0, await file.size()))
    finally:
        await file.close()


async def _write(files: Files, cookie: Cookie) -> None:
    file = await files.open(_TEMPORARY_PATH, create=True)
    try:
        await file.truncate(0)
        await file.write_and_sync(0, [records.encode_cookie(cookie)])
    finally:
        await file.close()
    await files.rename(_TEMPORARY_PATH, COOKIE_PATH)
    await files.sync_directory("")


def _refused(message: str, remedy: str) -> RefusedError:
    return RefusedError(message, reason=Reason.PERMISSION_DENIED, remedy=remedy)
