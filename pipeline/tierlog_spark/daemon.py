"""What forks Spark's Python workers: PySpark's own, but for the last words of a worker.

When a session stops, or a task is cancelled, Java closes its end. A worker that was about to answer
then printed a stack trace of a broken pipe, beside what the job said; there is nobody to answer.
"""

import socket

from pyspark import daemon

_worker = daemon.worker


def _quiet_worker(sock: socket.socket, authenticated: bool) -> int:  # noqa: FBT001 - as PySpark calls it
    try:
        return _worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    daemon.worker = _quiet_worker
    daemon.manager()
