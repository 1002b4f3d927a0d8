"""Becomes a child that dies with its parent: `python shim.py PARENT_PID PROGRAM ARGUMENT…`.

Owns the three steps between fork and exec that no Python API offers safely: ask the kernel for a
SIGKILL when the parent dies, check that it did not die before we asked, exec. Run as a script with
-I -S, so that it costs a few milliseconds; it imports nothing of Tierlog.

The kernel sends the signal when the *thread* that forked us ends: parents spawn from their main
thread.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and exec the program."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    # Python ignores SIGPIPE, and what is ignored stays so over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(command[0], command)  # noqa: S606 - becoming another program is its purpose
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
