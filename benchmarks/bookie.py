"""BookKeeper's bookies and client, from ``peers/bookie``: how they are asked.

What the program measures, it says itself.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common import Result
from maven import Program

PROGRAM: Final = Program(Path(__file__).with_name("peers") / "bookie", "the bookie")
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


missing = PROGRAM.missing
build = PROGRAM.build


async def bookie_adds(
    folder: Path, way: str, works: Sequence[tuple[int, ...]]
) -> dict[tuple[int, int], Result]:
    """Add to fresh bookies in a fresh JVM.

    Works are entry size, entries, how many unanswered, and entries a second if they are paced.
    Returns results by size and how many were unanswered.
    """
    made = Path(tempfile.mkdtemp(dir=folder))
    process = await asyncio.create_subprocess_exec(
        "java", *JAVA_OPTIONS, "-cp", PROGRAM.class_path,
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
