"""Compiles the reader's streaming cache, where Cython and a C compiler are: ``make compiled``.

The same file runs as it is where they are not. What is made lies beside it, named by the Python
that it is for, and is never committed; it holds the digest of its sources, and a reader takes no
other (``tierlog_reader.cache.store``). With ``--if-possible`` a machine that can't is told so, and
that is no failure.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tierlog_reader.cache import store

FOLDER = Path(store.__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
PACKAGE = Path("tierlog_reader", "cache")
NAME = "blocks_compiled"
COMPILERS = ("cc", "gcc", "clang")
# As a Python with types in another file: what annotations say is not what C is told.
DIRECTIVES = {
    "annotation_typing": False,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
}
# The last two as Python itself is compiled.
FLAGS = ("-O3", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing")


def missing() -> str | None:
    """Say what is not there that compiling needs; None: it can be done."""
    if not installed("Cython"):
        return "Cython is not installed: `make venv` installs what requirements.lock names"
    if compiler() is None:
        return f"no C compiler: none of {', '.join(COMPILERS)} on the PATH, no ziglang, no $CC"
    if not (include() / "Python.h").exists():
        return f"no Python.h in {include()} (Debian: apt install python3-dev)"
    return None


def installed(module: str) -> bool:
    """Say whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def include() -> Path:
    """Return where Python's headers are."""
    return Path(sysconfig.get_paths()["include"])


def compiler() -> list[str] | None:
    """Return the command of a C compiler: the one that $CC names before others."""
    if named := os.environ.get("CC"):
        return shlex.split(named)
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    if installed("ziglang"):  # a wheel that is one
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def build(folder: Path) -> Path:
    """Make the module in an empty folder, or exit with what the compilers said."""
    package = folder / PACKAGE
    package.mkdir(parents=True)
    for one in (package, package.parent):
        (one / "__init__.py").touch()
    source = (FOLDER / "blocks.py").read_text(encoding="utf-8")
    digest = store.source_digest()
    (package / f"{NAME}.py").write_text(f'{source}\n\nMADE_OF = "{digest}"\n', encoding="utf-8")
    shutil.copyfile(FOLDER / "blocks.pxd", package / f"{NAME}.pxd")
    options = [word for name, value in DIRECTIVES.items() for word in ("-X", f"{name}={value}")]
    cython = [sys.executable, "-m", "cython", "-3", *options, str(PACKAGE / f"{NAME}.py")]
    run([*cython, "-o", f"{NAME}.c"], folder)
    made = folder / f"{NAME}{SUFFIX}"
    command = compiler()
    assert command is not None
    run([*command, *FLAGS, f"-I{include()}", f"{NAME}.c", "-o", made.name], folder)
    return made


def run(command: list[str], folder: Path) -> None:
    """Run a command, or exit with what it said."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        sys.exit(f"error: {shlex.join(command)} failed, see above")


def install(made: Path) -> None:
    """Put the module beside its source, in one step: who runs another keeps that."""
    with tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".part", delete=False) as target:
        target.write(made.read_bytes())
    Path(target.name).chmod(0o644)
    Path(target.name).replace(FOLDER / made.name)


def main() -> None:
    """Compile, unless that was done."""
    parser = argparse.ArgumentParser(description="compile the streaming cache")
    parser.add_argument("--if-possible", action="store_true", help="it is no failure if it can't")
    arguments = parser.parse_args()
    if store.COMPILED:
        print("the streaming cache is compiled")
        return
    if (why := missing()) is not None:
        print(f"the streaming cache runs as plain Python: {why}")
        sys.exit(0 if arguments.if_possible else 1)
    print("compiling the streaming cache (10 s)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        install(build(Path(folder)))
    check = (
        f"from {store.__name__} import compiled_blocks as f; import sys; sys.exit(f().why_not or 0)"
    )
    if subprocess.run([sys.executable, "-c", check], check=False).returncode != 0:
        sys.exit("error: the compiled streaming cache can't be used, see above")


if __name__ == "__main__":
    main()
