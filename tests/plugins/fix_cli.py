"""``await cli(...)`` runs the command line in another process and gives its code and output."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER = Path(__file__).with_name("cli_driver.py")


@dataclass(frozen=True)
class Done:
    """What a command line came to."""

    code: int
    stdout: bytes
    stderr: str

    def check(self, code: int, *words: str) -> Done:
        """Check the exit code, what was said, and that it was said without a stack trace."""
        assert self.code == code, self.stderr
        assert "Traceback" not in self.stderr
        for word in words:
            assert word in self.stderr
        if code not in (0, 130):
            assert "error" in self.stderr.lower()
        return self


class CommandLine:
    """One process that runs one command line after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    async def __call__(
        self, *arguments: str, state_dir: Path | str, stdin: bytes = b"", **env: str
    ) -> Done:
        """Run `tierlog` with these arguments."""
        asked = {
            "arguments": arguments,
            "stdin": base64.b64encode(stdin).decode("ascii"),
            "env": {"TIERLOG_STATE_DIR": str(state_dir), **env},
        }
        return await asyncio.to_thread(self._ask, json.dumps(asked).encode() + b"\n")

    def _ask(self, line: bytes) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Done(answer["code"], base64.b64decode(answer["stdout"]), answer["stderr"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=10)


@pytest.fixture(scope="session")
def cli() -> Iterator[CommandLine]:
    running = CommandLine()
    yield running
    running.close()
