"""A writer's state in a file, for ``tierlog append --state``.

Invariant: at the file's name there is always a whole state, or nothing: a new one is written beside
it, made durable, and moved there.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.client import SyncClient, WriterState


def writer_state(
    client: "SyncClient", path: Path | None, writer_id: UUID | None
) -> "WriterState | None":
    """Return the state to resume from; one of a new writer is in the file before it is used."""
    from tierlog.client import WriterState

    if path is None:
        return WriterState(writer_id=writer_id) if writer_id is not None else None
    state = _read(path)
    if state is None:
        state = client.new_writer_state() if writer_id is None else WriterState(writer_id=writer_id)
        save_state(path, state)
    elif writer_id not in {None, state.writer_id}:
        raise RefusedError(
            f"{path} is of writer {state.writer_id}",
            remedy="Leave out --writer-id, or name another file",
        )
    return state


def save_state(path: Path, state: "WriterState") -> None:
    """Put a state into its file."""
    import orjson

    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb") as file:
        file.write(orjson.dumps(state.document()) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> "WriterState | None":
    import orjson

    from tierlog.client import WriterState

    try:
        document = orjson.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise RefusedError(f"{path} holds no writer's state", remedy="Name another file")
        return WriterState.of_document(document)
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise RefusedError(
            f"{path} holds no writer's state: {error}", remedy="Name another file"
        ) from error
