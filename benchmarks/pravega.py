"""Pravega's cache, from ``peers/pravega``: what of it is asked, and what it answers."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from common import MIB
from maven import Program

PROGRAM: Final = Program(Path(__file__).with_name("peers") / "pravega", "Pravega's cache")
# Without the last two Netty allocates what it calls direct memory on the heap.
JAVA_OPTIONS: Final = (
    "-Xmx1g",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
)

missing = PROGRAM.missing
build = PROGRAM.build


async def passes(number: int, parameters: Mapping[str, Any]) -> tuple[list[dict[str, float]], int]:
    """Run the work so many times in one JVM; return the seconds of each, and the peak of memory."""
    limit = parameters["limit_bytes"]
    process = await asyncio.create_subprocess_exec(
        "java", *JAVA_OPTIONS, f"-XX:MaxDirectMemorySize={limit + 256 * MIB}",
        "-cp", PROGRAM.class_path, "tierlog.peers.PravegaCache",
        str(number), str(limit), str(parameters["count"]), str(parameters["entry_size"]),
        str(parameters["large"]), "cpu" if parameters["cpu"] else "wall",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise SystemExit(f"Pravega's cache ended with {process.returncode}, see above")
    lines = [json.loads(line) for line in out.splitlines()]
    peak = max(int(line.pop("rss_peak_bytes")) for line in lines)
    return lines, peak
