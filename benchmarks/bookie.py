"""BookKeeper's bookies and client, from ``peers/bookie``: built by Maven when needed, run by Java.

Owns what is needed for that and how it is asked. What the program measures, it says itself.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common import Result, say

HOME: Final = Path(__file__).with_name("peers") / "bookie"
BUILD: Final = HOME / "build"
JAVA_OPTIONS: Final = (
    "-Xmx2g",
    "-XX:MaxDirectMemorySize=2g",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=off",
)
WARMUP_ENTRIES: Final = 30_000


def missing() -> str | None:
    """Say what is not there that a bookie needs; None: it can run."""
    wanted = ["java"] if _built() else ["java", "mvn"]
    gone = [name for name in wanted if shutil.which(name) is None]
    if not gone:
        return None
    return f"no {' and no '.join(gone)} on the PATH: a JDK 17 and Maven are needed for the bookie"


def _built() -> bool:
    made = next(iter((BUILD / "classes").rglob("*.class")), None)
    sources = (HOME / "src").rglob("*.java")
    return made is not None and all(
        one.stat().st_mtime <= made.stat().st_mtime for one in [HOME / "pom.xml", *sources]
    )


async def build() -> str | None:
    """Compile the program and fetch what it stands on; say what went wrong, if it did."""
    if _built():
        return None
    say("building the bookie's program with Maven")
    process = await asyncio.create_subprocess_exec(
        "mvn", "-B", "-q", "-f", str(HOME / "pom.xml"), "package",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    if process.returncode == 0:
        return None
    shutil.rmtree(BUILD, ignore_errors=True)
    return f"Maven could not build the bookie:\n{out.decode(errors='replace')[-1000:]}"


async def bookie_adds(
    folder: Path, way: str, works: Sequence[tuple[int, ...]]
) -> dict[tuple[int, int], Result]:
    """Add to fresh bookies in a fresh JVM.

    Works are entry size, entries, how many unanswered, and entries a second if they are paced.
    Returns results by size and how many were unanswered.
    """
    made = Path(tempfile.mkdtemp(dir=folder))
    process = await asyncio.create_subprocess_exec(
        "java", *JAVA_OPTIONS, "-cp", f"{BUILD / 'classes'}:{BUILD / 'lib'}/*",
        "tierlog.peers.Bookie", str(made), way, str(WARMUP_ENTRIES),
        *(":".join(map(str, work)) for work in works),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shutil.rmtree(made, ignore_errors=True)
    if process.returncode != 0:
        raise SystemExit(f"the bookie ended with {process.returncode}, see above")
    results: list[Result] = [json.loads(line) for line in out.splitlines()]
    return {(int(one["entry_size"]), int(one["outstanding"])): one for one in results}
