"""The health check of the images, as an engine runs it: the very words of the Dockerfile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.deployment.rendering import ROOT

DOCKERFILE = ROOT / "deploy" / "docker" / "service.Dockerfile"


def health_command() -> list[str]:
    """Return what HEALTHCHECK runs."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    (words,) = re.findall(r"^HEALTHCHECK\s.*\sCMD\s+(\[.*\])$", text, re.MULTILINE)
    found: list[str] = json.loads(words)
    return found


async def health_check(kind: str, env: Mapping[str, str]) -> tuple[int, str]:
    """Run it where a service with these settings runs; return the exit code and what it says."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *health_command(), env={**os.environ, **env, "SERVICE": kind, "PATH": path},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()
