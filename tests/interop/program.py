"""Apache Pulsar's offloader as a process that is asked: ``python -m tests.interop.program`` builds.

Owns the building of ``pulsar/src`` with the compiler that is among its jars, and one Java process
that serves requests as JSON lines, so that any number of cases costs one start. Does not own what
is asked, nor the S3 server.

Needs a Java runtime as the embedded servers do, and neither Maven nor a JDK.

Invariant: what is run was compiled from the sources that are there, with the jars that are pinned.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from tests.interop.jars import HOME, InteropError, Tell, pulsar_jars
from tierlog.embedded.java import SMALL_JVM, find_java

COMPILER: Final = "org.eclipse.jdt.internal.compiler.batch.Main"
MAIN: Final = "tierlog.interop.Interop"
JAVA_OPTIONS: Final = (
    "-Xmx2g",
    "-XX:MaxDirectMemorySize=4g",
    "-XX:-UsePerfData",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
)
LOG_TAIL: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The program, ready to be started."""

    java: Path
    class_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Where objects go."""

    endpoint_url: str
    name: str
    access_key: str
    secret_key: str


def build(tell: Tell, environ: Mapping[str, str] | None = None) -> Built:
    """Fetch the jars and compile, as far as that was not done before."""
    environ = os.environ if environ is None else environ
    java = find_java(environ)
    jars = pulsar_jars(java, environ, tell)
    sources = sorted((HOME / "src").rglob("*.java"))
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()
    classes = jars / f"classes-{digest[:12]}"
    if not classes.exists():
        tell("compiling the program")
        _compile(java, jars, sources, classes)
    return Built(java=java, class_path=f"{classes}:{jars}/*")


def _compile(java: Path, jars: Path, sources: list[Path], classes: Path) -> None:
    made = Path(tempfile.mkdtemp(prefix=f"{classes.name}.tmp-", dir=jars))
    try:
        done = subprocess.run(
            [
                str(java), *SMALL_JVM, "-cp", f"{jars}/*", COMPILER,
                "-source", "17", "-target", "17", "-proc:none", "-nowarn",
                "-cp", ":".join(map(str, jars.glob("*.jar"))), "-d", str(made), *map(str, sources),
            ],
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise InteropError(
                f"the program does not compile:\n{done.stdout}{done.stderr[-LOG_TAIL:]}"
            )
        if not classes.exists():  # another process was quicker
            made.replace(classes)
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Pulsar:
    """The running program; ``await pulsar("read", ledger_id=…, …)`` gives its answer."""

    def __init__(self, built: Built, bucket: Bucket) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self._process = subprocess.Popen(
            [
                str(built.java), *JAVA_OPTIONS, "-cp", built.class_path, MAIN,
                bucket.endpoint_url, bucket.name, bucket.access_key, bucket.secret_key,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __call__(self, op: str, **what: object) -> dict[str, Any]:
        """Ask for one thing; raises when the process is gone, never for what it answers."""
        line = json.dumps({"op": op, **{name: _plain(value) for name, value in what.items()}})
        return await asyncio.to_thread(self._ask, line.encode() + b"\n")

    def _ask(self, line: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise InteropError(f"Pulsar's program ended: {self.log_tail()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def log_tail(self) -> str:
        """Return what it said last."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def _plain(value: object) -> object:
    return value if isinstance(value, int | list | dict) else str(value)


def main() -> int:
    """Build it, and say so; the process's exit code."""

    def tell(what: str) -> None:
        print(f"  … {what}", file=sys.stderr, flush=True)

    try:
        built = build(tell)
    except InteropError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Pulsar's program is ready, for {built.java}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
