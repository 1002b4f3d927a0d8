"""Child processes that never outlive their supervisor.

Owns starting, stopping and remembering a child. Does not own what the child is or when it is
ready: `server` and `services` do.

Invariants:
    * A child dies when its supervisor does, however that dies (the exec shim).
    * A pid file names a process beyond doubt (pid, start time, boot): a recycled pid is never hit.
    * stop() returns only when the process is reaped.

Crash (leaks): a supervisor killed between spawn and pid file leaves no file, and the shim ends the
child; a pid file without a process is removed at the next start.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tierlog.model.errors import RetryableError

SHIM: Final = Path(__file__).with_name("shim.py")
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
KILL_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run, and where its output goes."""

    argv: Sequence[str]
    cwd: Path
    log: Path
    env: Mapping[str, str]
    niceness: int = 0
    """How much it gives way to others (0 to 19)."""


class Child:
    """One running (or ended) child process."""

    def __init__(
        self, name: str, process: "subprocess.Popen[bytes]", pid_file: Path, *, log_from: int = 0
    ) -> None:
        self.name = name
        self.log_from = log_from
        """Where in its log file its own words begin."""
        self._process = process
        self._pid_file = pid_file

    @classmethod
    def spawn(cls, name: str, launch: Launch, *, run_dir: Path) -> Self:
        """Start a child from the main thread and write its pid file."""
        assert threading.current_thread() is threading.main_thread(), "see shim.py"
        rotate(launch.log)
        shim = [sys.executable, "-I", "-S", str(SHIM), str(os.getpid()), str(launch.niceness)]
        with launch.log.open("ab") as log:
            log_from = log.tell()
            process = subprocess.Popen(
                [*shim, *launch.argv],
                cwd=launch.cwd,
                env=dict(launch.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the supervisor's, who stops in order
            )
        pid_file = run_dir / f"{name}.pid"
        identity = identify(process.pid)
        pid_file.write_text(json.dumps({"name": name, **(identity or {})}), encoding="utf-8")
        return cls(name, process, pid_file, log_from=log_from)

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} exit={self._process.returncode}>"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended, or None."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait until the process ended, and reap it."""
        while (code := self._process.poll()) is None:
            await _process_end(self.pid)
        self._pid_file.unlink(missing_ok=True)
        return code

    async def stop(self, *, deadline_s: float) -> bool:
        """Ask it to end; kill it when the deadline has passed. Says whether it ended by itself."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline_s):
                await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()
            return False
        return True

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self._process.wait(KILL_S_MAX)
        self._pid_file.unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        self._process.send_signal(number)


async def first_end(children: Mapping[str, Child]) -> str:
    """Wait until any of the children ends, and return its name."""
    names: list[str] = []
    ended = asyncio.Event()

    async def watch(name: str, child: Child) -> None:
        await child.wait()
        names.append(name)
        ended.set()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch(name, child)) for name, child in children.items()]
        await ended.wait()
        for task in tasks:
            task.cancel()
    return names[0]


async def _process_end(pid: int) -> None:
    """Wait for the end of a process without polling, where the kernel has pidfd (5.3)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # an older kernel, or a sandbox without it
        await asyncio.sleep(0.05)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def rotate(log: Path) -> None:
    """Keep at most one old log file beside the present one."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".1.log"))


def log_tail(log: Path, *, since: int = 0, bytes_max: int = 2000) -> str:
    """Read the end of a log, for error messages."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(since, size), size - bytes_max))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def identify(pid: int) -> dict[str, int | str] | None:
    """Name a process so that no later one has the same name; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command name may hold spaces and parentheses
    if fields[0] == "Z":
        return None
    start_ticks = int(fields[19])  # field 22 of proc(5); the first one here is field 3
    return {"pid": pid, "start_ticks": start_ticks, "boot": boot}


async def end_leftovers(run_dir: Path) -> list[str]:
    """Kill what the pid files name and is still there; return the names of those."""
    ended = []
    for path in sorted(run_dir.glob("*.pid")):
        try:
            noted = json.loads(path.read_text(encoding="utf-8"))
            pid = int(noted["pid"])
        except (ValueError, KeyError, TypeError):  # cut by a crash in mid-write
            path.unlink()
            continue
        name = str(noted.pop("name", path.stem))
        if identify(pid) == noted:
            await _end_stranger(pid, name)
            ended.append(name)
        path.unlink()
    return ended


async def _end_stranger(pid: int, name: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(KILL_S_MAX):
            while identify(pid) is not None:
                await _process_end(pid)
    except TimeoutError:
        raise RetryableError(
            f"a {name} of an earlier run (pid {pid}) does not end after SIGKILL",
            remedy=f"It hangs in the kernel, mostly on a disk: look at /proc/{pid}/stack",
        ) from None
