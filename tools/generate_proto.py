"""Generates shared/tierlog/proto/v1 from shared/proto/tierlog/v1: messages, services, stubs.

protoc names modules after the path of the .proto file (tierlog.v1); ours live in
tierlog.proto.v1, so the imports are rewritten. With --check nothing is written, and the exit code
says whether the committed code is what would be written.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "shared" / "proto"
TARGET = ROOT / "shared" / "tierlog" / "proto" / "v1"
INIT = '"""Generated from shared/proto/tierlog/v1; not edited by hand."""\n'


def main() -> None:
    """Generate, or compare."""
    sources = sorted(SOURCE.glob("tierlog/v1/*.proto"))
    with tempfile.TemporaryDirectory() as name:
        made = generate(sources, Path(name)) if sources else {}
        made["__init__.py"] = INIT
        if "--check" in sys.argv[1:]:
            compare(made)
        else:
            write(made)


def generate(sources: list[Path], output: Path) -> dict[str, str]:
    """Run protoc with the Python, gRPC and mypy plugins; file names to rewritten texts."""
    plugins = ("python_out=", "grpc_python_out=", "mypy_out=quiet:", "mypy_grpc_out=quiet:")
    options = [f"--{plugin}{output}" for plugin in plugins]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", *options]
    scripts = str(Path(sys.executable).parent)  # where the mypy plugins are
    search = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    environment = dict(os.environ, PATH=search)
    arguments = [str(path.relative_to(SOURCE)) for path in sources]
    if subprocess.run([*command, *arguments], env=environment, check=False).returncode != 0:
        sys.exit("error: protoc refused the sources above; mend shared/proto/tierlog/v1.")
    folder = output / "tierlog" / "v1"
    serving = {path.stem for path in sources if "\nservice " in path.read_text()}
    return {
        path.name: rewrite(path.read_text())
        for path in sorted(folder.iterdir())
        if "_pb2_grpc.py" not in path.name or path.name.split("_pb2_grpc")[0] in serving
    }


def rewrite(text: str) -> str:
    """Import from tierlog.proto.v1 what protoc imports from tierlog.v1."""
    text = re.sub(r"^(from|import) tierlog\.v1\b", r"\1 tierlog.proto.v1", text, flags=re.MULTILINE)
    # Qualified uses in stubs; quoted descriptors and the wire names of services stay.
    return re.sub(r"(?<![\w./\"'])tierlog\.v1\.(?=\w+_pb2)", "tierlog.proto.v1.", text)


def write(made: dict[str, str]) -> None:
    """Replace the generated folder."""
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    for name, text in made.items():
        (TARGET / name).write_text(text)
    print(f"wrote {len(made)} files to {TARGET.relative_to(ROOT)}")


def compare(made: dict[str, str]) -> None:
    """Exit non-zero and name the files that differ from the committed ones."""
    committed = {path.name: path.read_text() for path in TARGET.glob("*.py*")}
    names = sorted(made.keys() | committed.keys())
    stale = [name for name in names if made.get(name) != committed.get(name)]
    if stale:
        sys.exit(f"error: generated code is stale: {', '.join(stale)}\nremedy: make proto")
    print(f"generated code is up to date ({len(made)} files)")


if __name__ == "__main__":
    main()
