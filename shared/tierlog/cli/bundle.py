"""What a debug bundle has in it: files of what this machine can see of a deployment.

Owns what is gathered and how much of it. Invariants:
    * All goes through the redactor, which knows this process's secrets and those of the file that
      ``tierlog up`` wrote. The list of settings has no secret either.
    * Of each log only its end is taken, ``LOG_BYTES_MAX`` of it, of answers ``ANSWER_BYTES_MAX``,
      of streams ``STREAMS_MAX``; the bundle says what was cut and what could not be had.
    * No entries, no objects: events of users are in none of it.
"""

import io
import json
import platform
import sys
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tierlog.cli.checks import (
    LIBRARIES,
    OWN,
    Addresses,
    http_session,
    installed,
    service_addresses,
)
from tierlog.model.errors import TierlogError
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.redaction import Redactor

if TYPE_CHECKING:
    import aiohttp

    from tierlog.runtime.settings import Settings

LOG_BYTES_MAX: Final = 256 * 1024
LOGS_MAX: Final = 40
ANSWER_BYTES_MAX: Final = 2 * 1024 * 1024
STREAMS_MAX: Final = 200
PATHS: Final = {
    "ingest": ("/readyz", "/metrics", "/v1/status"),
    "scheduler": ("/readyz", "/metrics", "/v1/offloads"),
}
PATHS_OF_ALL: Final = ("/readyz", "/metrics")
SECRET_SERVER: Final = "s3_secret_key"  # noqa: S105 - the name of one


class Bundle:
    """Files by name, each without secrets."""

    def __init__(self, redactor: Redactor, *, name: str, time_s: int) -> None:
        self._redactor = redactor
        self._name = name
        self._time_s = time_s
        self.files: dict[str, bytes] = {}
        self.troubles: list[str] = []

    def add_text(self, name: str, text: str) -> None:
        """Add a text."""
        self.files[name] = self._redactor.text(text).encode(errors="replace")

    def add_json(self, name: str, value: object) -> None:
        """Add a document."""
        shown = self._redactor.value(value)
        self.files[name] = json.dumps(shown, indent=1, default=str).encode() + b"\n"

    async def gather(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Add a document that somebody is asked for, or say why there is none."""
        try:
            self.add_json(name, await work())
        except (TierlogError, OSError, TimeoutError, ModuleNotFoundError) as error:
            self.troubles.append(f"{name}: {type(error).__name__}: {error}")

    def packed(self) -> bytes:
        """Return all as a tar.gz, with a list of what could not be had."""
        self.add_text("troubles.txt", "".join(f"{one}\n" for one in self.troubles))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, raw in sorted(self.files.items()):
                info = tarfile.TarInfo(f"{self._name}/{name}")
                info.size, info.mtime, info.mode = len(raw), self._time_s, 0o600
                archive.addfile(info, io.BytesIO(raw))
        return packed.getvalue()


def redactor_for(settings: "Settings") -> Redactor:
    """Return what knows every secret that may turn up on this machine."""
    from tierlog.client.endpoints import FILE_NAME, read_endpoints_file
    from tierlog.runtime.redaction import process_redactor, secrets_of

    # It learns what this process reads from files of secrets, too.
    redactor = process_redactor()
    redactor.learn(secrets_of(settings))
    written = read_endpoints_file(settings.state_dir / FILE_NAME)
    if written is not None:
        redactor.learn([written.servers.get(SECRET_SERVER, "")])
    return redactor


async def gather_all(bundle: Bundle, settings: "Settings", config_file: Path | None) -> None:
    """Fill a bundle."""
    from tierlog.cli.checks import check_all
    from tierlog.runtime.origins import redacted_settings
    from tierlog.wiring.security import calling_of

    bundle.add_json("settings.json", redacted_settings(settings, config_file))
    bundle.add_json("versions.json", versions())

    async def doctor() -> object:
        return [one.row() for one in await check_all(settings)]

    await bundle.gather("doctor.json", doctor)
    await bundle.gather("metadata.json", lambda: metadata_summary(settings))
    await add_services(bundle, service_addresses(settings), calling_of(settings.security))
    add_logs(bundle, settings.state_dir / "logs")


def versions() -> dict[str, object]:
    """Return what runs this command."""
    from tierlog.format.versions import GATE

    return {
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": {**installed(OWN), **installed(LIBRARIES)},
        "formats": {kind.name: versions.current for kind, versions in GATE.items()},
    }


async def metadata_summary(settings: "Settings") -> dict[str, object]:
    """Return counts and states, of nodes, of ledgers that lack copies, and of streams."""
    from tierlog.client.cluster import node_documents, open_cluster, underreplicated_documents

    async with open_cluster(settings) as catalog:
        cluster = await catalog.nodes.cluster()
        names = await catalog.streams.names()
        streams: list[dict[str, object]] = []
        for name in names[:STREAMS_MAX]:
            try:
                snapshot = await catalog.streams.snapshot(name)
            except TierlogError as error:
                streams.append({"stream": name, "error": str(error)})
                continue
            closed = [one for one in snapshot.ledgers if one.closed]
            owner = snapshot.stream.owner
            streams.append(
                {
                    "stream": name,
                    "lifecycle": snapshot.stream.lifecycle.name,
                    "owner": owner.node_id if owner is not None else None,
                    "owner_epoch": snapshot.stream.owner_epoch,
                    "ledgers": len(snapshot.ledgers),
                    "closed": len(closed),
                    "bytes": sum(one.length for one in closed),
                }
            )
        return {
            "cluster_id": str(cluster.cluster_id) if cluster is not None else None,
            "nodes": await node_documents(catalog),
            "underreplicated": (await underreplicated_documents(catalog))[:STREAMS_MAX],
            "streams_in_all": len(names),
            "streams": streams,
        }


async def add_services(bundle: Bundle, services: Addresses, calling: Calling = PLAIN) -> None:
    """Add what each service says of itself."""
    import aiohttp

    async with http_session(calling) as session:
        for name, addresses in services.items():
            if "http" not in addresses:
                continue
            kind = name.partition("-")[0]
            for path in PATHS.get(kind, PATHS_OF_ALL):
                file = f"services/{name}{path.replace('/', '-')}.txt"
                try:
                    text = await _ask(session, f"{calling.scheme}://{addresses['http']}{path}")
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    bundle.troubles.append(f"{file}: {type(error).__name__}: {error}")
                else:
                    bundle.add_text(file, text)


async def _ask(session: "aiohttp.ClientSession", url: str) -> str:
    async with session.get(url, allow_redirects=False) as answer:
        raw = b""
        async for piece in answer.content.iter_chunked(64 * 1024):
            raw += piece
            if len(raw) > ANSWER_BYTES_MAX:
                return raw[:ANSWER_BYTES_MAX].decode(errors="replace") + "\n… cut\n"
        return raw.decode(errors="replace")


def add_logs(bundle: Bundle, folder: Path) -> None:
    """Add the ends of logs, whole lines, of the newest files."""
    if not folder.is_dir():
        bundle.troubles.append(f"logs: {folder} is not there; add those of your services")
        return
    files = [path for path in folder.glob("*.log") if path.is_file() and not path.is_symlink()]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[:LOGS_MAX]:
        try:
            bundle.add_text(f"logs/{path.name}", tail_of(path))
        except OSError as error:
            bundle.troubles.append(f"logs/{path.name}: {error.strerror}")
    if len(files) > LOGS_MAX:
        bundle.troubles.append(f"logs: {len(files) - LOGS_MAX} older files were left out")


def tail_of(path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> str:
    """Return the last whole lines of a file.

    A line that is cut is left out: half a secret in it would be found by nobody.
    """
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        begin = max(0, size - bytes_max)
        file.seek(max(0, begin - 1))
        raw = file.read(bytes_max + 1)
    if begin:
        raw = raw.partition(b"\n")[2]
    return raw.decode(errors="replace")


def write_private(path: Path, raw: bytes) -> None:
    """Write a file that only its owner may read, and that was not there."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(raw)


def summary_of(bundle: Bundle, path: Path, length: int) -> dict[str, Any]:
    """Return what is printed of a bundle that was written."""
    return {
        "file": str(path),
        "bytes": length,
        "files": len(bundle.files),
        "troubles": bundle.troubles,
    }
