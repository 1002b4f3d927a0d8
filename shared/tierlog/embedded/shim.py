"""Becomes a child that dies with its parent: `python shim.py PARENT_PID NICE PROGRAM ARGUMENT…`.

Owns the steps between fork and exec that no Python API offers safely: ask the kernel for a SIGKILL
when the parent dies, check that it did not die before we asked, give way to others, exec. Run as a
script with -I -S, so that it costs a few milliseconds; it imports nothing of Tierlog.

The kernel sends the signal when the *thread* that forked us ends: parents spawn from their main
thread.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
AUTOGROUP = "/proc/self/autogroup"
TRIES = 50


def main() -> None:
    """Tie this process to its parent and exec the program."""
    parent, niceness, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    # Python ignores SIGPIPE, and what is ignored stays so over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    give_way(niceness)
    try:
        os.execv(command[0], command)  # noqa: S606 - becoming another program is its purpose
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


def give_way(niceness: int) -> None:
    """Let others have the CPU first: this process, and all of its session, which must be its own.

    Linux shares the CPU out by session first, where it groups them at all (`man 7 sched`,
    autogroup), and by process within one.
    """
    if niceness == 0:
        return
    os.nice(niceness)
    try:
        group = os.open(AUTOGROUP, os.O_WRONLY)
    except OSError:
        return  # no groups here
    with contextlib.suppress(OSError):
        for _ in range(TRIES):
            try:
                os.write(group, str(niceness).encode())
                break
            except BlockingIOError:  # the kernel takes one such change in 100 ms, of all processes
                time.sleep(0.1)
    os.close(group)


if __name__ == "__main__":
    main()
