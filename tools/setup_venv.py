"""Makes .venv: the pinned requirements and the rooms, editable.

Run by `make venv` with the machine's own Python and its standard library alone. It does nothing
when the stamps say that the locks and the rooms are those of the last run, and each step prints
what it does. A second run beside it waits for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
SYSTEM_CERTIFICATES = Path("/etc/ssl/certs")
PYTHON = VENV / "bin" / "python"
ROOMS = (
    "shared",
    "services/ingest",
    "services/scheduler",
    "services/offloader",
    "services/reader",
    "pipeline",
)


def main() -> None:
    """Bring .venv up to date, or exit with the remedy."""
    with (ROOT / ".venv.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_environment()
        install_requirements()
        install_rooms()


def make_environment() -> None:
    """Step 1: the empty environment with the installer in it."""
    key = digest(ROOT / "requirements-boot.lock", salt=sys.version)
    if PYTHON.exists() and stamped("boot", key):
        return
    say(f"[1/3] making .venv with {sys.executable} ({sys.version.split()[0]})")
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], remedy=VENV_REMEDY)
    say("[1/3] installing the installer (uv) from requirements-boot.lock")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--require-hashes", "-r", "requirements-boot.lock"], remedy=NETWORK_REMEDY)
    stamp("boot", key)


def install_requirements() -> None:
    """Step 2: every pinned requirement, from uv's cache when it is all there."""
    key = digest(ROOT / "requirements.lock")
    if stamped("requirements", key):
        return
    say("[2/3] installing requirements.lock (about 700 MB to download the first time)")
    # pyspark is a source distribution: without this flag its build would fetch setuptools
    # outside the hashes, and uv would rebuild it on every online install.
    pinned = ["--require-hashes", "--no-build-isolation-package", "pyspark"]
    arguments = [*pinned, "-r", "requirements.lock"]
    offline = uv("--offline", *arguments, "--quiet", quiet=True)
    if offline != 0:
        say("[2/3] not all in the local cache: downloading, which may take a minute or two")
        # uv knows the public authorities only; a proxy's own is known to the system.
        certificates = ["--system-certs"] if SYSTEM_CERTIFICATES.exists() else []
        if uv(*certificates, *arguments) != 0:
            sys.exit(f"error: the requirements could not be installed.\nremedy: {NETWORK_REMEDY}")
    stamp("requirements", key)


def install_rooms() -> None:
    """Step 3: this workspace's own distributions, editable."""
    key = digest(*(ROOT / room / "pyproject.toml" for room in ROOMS), salt=str(ROOT))
    if stamped("rooms", key):
        return
    say("[3/3] installing the rooms of this workspace, editable")
    editable = [word for room in ROOMS for word in ("-e", f"./{room}")]
    if uv("--offline", "--no-deps", "--no-build-isolation", "--quiet", *editable) != 0:
        sys.exit("error: the rooms could not be installed.\nremedy: rm -rf .venv and run again.")
    stamp("rooms", key)


VENV_REMEDY = (
    "the Python above cannot make virtual environments; install its venv module "
    "(on Debian: apt install python3-venv), or name another Python: make PYTHON=/path/to/python."
)
NETWORK_REMEDY = (
    "check that the package registry can be reached (pip's own settings apply: PIP_INDEX_URL, "
    "PIP_CERT; for uv: UV_INDEX_URL, SSL_CERT_FILE) and that 3 GB are free, then run again; "
    "what was already downloaded is kept."
)


def uv(*arguments: str, quiet: bool = False) -> int:
    """Run `uv pip install` on .venv; the registry settings of pip count when uv has none."""
    environment = dict(os.environ, VIRTUAL_ENV=str(VENV))
    for theirs, ours in (("PIP_INDEX_URL", "UV_INDEX_URL"), ("PIP_CERT", "SSL_CERT_FILE")):
        if theirs in os.environ:
            environment.setdefault(ours, os.environ[theirs])
    command = [str(VENV / "bin" / "uv"), "--no-config", "pip", "install", *arguments]
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, cwd=ROOT, env=environment, stderr=sink, check=False).returncode


def run(command: list[str], *, remedy: str) -> None:
    """Run a command, or exit with the remedy."""
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed.\nremedy: {remedy}")


def digest(*paths: Path, salt: str = "") -> str:
    """Name the content of some files."""
    total = hashlib.sha256(salt.encode())
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()


def stamped(step: str, key: str) -> bool:
    """Say whether a step was done with this very input."""
    path = VENV / f".stamp-{step}"
    return path.exists() and path.read_text(encoding="utf-8") == key


def stamp(step: str, key: str) -> None:
    """Remember that a step was done."""
    (VENV / f".stamp-{step}").write_text(key, encoding="utf-8")


STARTED_S = time.monotonic()


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"venv {time.monotonic() - STARTED_S:5.1f}s  {text}", flush=True)


if __name__ == "__main__":
    main()
