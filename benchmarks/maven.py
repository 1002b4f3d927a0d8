"""Peers in Java, from ``peers``: built by Maven when needed, run by Java.

Owns what is needed for that. Where artifacts come from is Maven's settings.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from common import say


@dataclass(frozen=True, slots=True)
class Program:
    """A folder with a pom.xml, and what it is called."""

    home: Path
    name: str

    @property
    def build_dir(self) -> Path:
        """Where it is built."""
        return self.home / "build"

    @property
    def class_path(self) -> str:
        """What Java is told to find it."""
        return f"{self.build_dir / 'classes'}:{self.build_dir / 'lib'}/*"

    def missing(self) -> str | None:
        """Say what is not there that it needs; None: it can run."""
        wanted = ["java"] if self._built() else ["java", "mvn"]
        gone = [name for name in wanted if shutil.which(name) is None]
        if not gone:
            return None
        tools = " and no ".join(gone)
        return f"no {tools} on the PATH: a JDK 17 and Maven are needed for {self.name}"

    def _built(self) -> bool:
        made = next(iter((self.build_dir / "classes").rglob("*.class")), None)
        sources = (self.home / "src").rglob("*.java")
        return made is not None and all(
            one.stat().st_mtime <= made.stat().st_mtime for one in [self.home / "pom.xml", *sources]
        )

    async def build(self) -> str | None:
        """Compile it and fetch what it stands on; say what went wrong, if it did."""
        if self._built():
            return None
        say(f"building {self.name}'s program with Maven")
        process = await asyncio.create_subprocess_exec(
            "mvn", "-B", "-q", "-f", str(self.home / "pom.xml"), "package",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        if process.returncode == 0:
            return None
        shutil.rmtree(self.build_dir, ignore_errors=True)
        said = out.decode(errors="replace")[-1000:]
        return f"Maven could not build {self.name}:\n{said}"
