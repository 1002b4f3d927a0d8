"""Makes an environment beside .venv's own: all that .venv has, and obstore, which an extra brings.

Run by `make test-obstore`. obstore in .venv itself would change what other tests and benchmarks run
from then on. It lies within .venv, so that whatever leaves that out, or removes it, does so with
this one too. It does nothing when the stamp says that all is there.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

from tools.setup_venv import NETWORK_REMEDY, ROOT, VENV, digest, stamp, stamped, uv

LOCK: Final = "requirements-obstore.lock"
PATH: Final = VENV / "with-obstore"


def main() -> None:
    """Bring it up to date, or exit with the remedy."""
    key = digest(ROOT / LOCK, salt=sys.version)
    if python_of(PATH).exists() and stamped("obstore", key):
        return
    make_beside(PATH)
    certificates = ["--system-certs"] if Path("/etc/ssl/certs").exists() else []
    into = ["--python", str(python_of(PATH))]
    if uv(*into, *certificates, "--require-hashes", "--quiet", "-r", LOCK) != 0:
        sys.exit(f"error: obstore could not be installed.\nremedy: {NETWORK_REMEDY}")
    stamp("obstore", key)


def make_beside(path: Path) -> None:
    """Make an environment at ``path`` that has what the running one has, the rooms too."""
    venv.create(path, clear=True)
    folder = "python{}.{}".format(*sys.version_info)
    beside = path / "lib" / folder / "site-packages" / "beside.pth"
    # Editable rooms are such files themselves, which only `addsitedir` follows.
    beside.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    programs = path / "bin"
    for one in Path(sysconfig.get_path("scripts")).iterdir():
        # Servers of packages are looked for beside the interpreter.
        if not (programs / one.name).exists():
            (programs / one.name).symlink_to(one)


def python_of(path: Path) -> Path:
    """Return the interpreter of an environment."""
    return path / "bin" / "python"


if __name__ == "__main__":
    main()
