"""A real API server of Kubernetes, and its etcd, on this machine: no kubelet, no controllers.

Owns building the two from Go modules of fixed versions (ten minutes once, kept in the user's cache
folder), starting them on free loopback ports, and ending them. What it stores it has checked, with
Kubernetes' own validation and admission; Pod Security is among that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.histories.checker import find_go

if TYPE_CHECKING:
    from collections.abc import Iterator

KUBERNETES: Final = "1.36.3"
ETCD: Final = "3.6.8"
GO: Final = "1.26.0"
PROGRAMS: Final = {
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "etcd": "go.etcd.io/etcd/server/v3",
}
# Kubernetes publishes its parts apart, under versions of their own, and names them by no version.
PARTS: Final = (
    "api", "apiextensions-apiserver", "apimachinery", "apiserver", "cli-runtime", "client-go",
    "cloud-provider", "cluster-bootstrap", "code-generator", "component-base",
    "component-helpers", "controller-manager", "cri-api", "cri-client", "cri-streaming",
    "csi-translation-lib", "dynamic-resource-allocation", "endpointslice", "externaljwt", "kms",
    "kube-aggregator", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl",
    "kubelet", "metrics", "mount-utils", "pod-security-admission", "sample-apiserver",
    "sample-cli-plugin", "sample-controller", "streaming",
)  # fmt: skip
# Set by Kubernetes' own build; without it the server calls itself 0.0.0.
VERSION: Final = f"-X k8s.io/component-base/version.gitVersion=v{KUBERNETES}"
READY_S_MAX: Final = 60.0
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where a running one is."""

    kubeconfig: Path


def build(cache: Path) -> dict[str, Path]:
    """Return the two programs, built if they are not there."""
    folder = cache / f"kube-api-{KUBERNETES}"
    programs = {name: folder / name for name in PROGRAMS}
    if all(path.exists() for path in programs.values()):
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    print(f"building kube-apiserver {KUBERNETES} and etcd {ETCD}: some ten minutes", flush=True)
    (folder / "go.mod").write_text(_go_mod(), encoding="utf-8")
    imports = "\n".join(f'import _ "{module}"' for module in PROGRAMS.values())
    text = f"//go:build tools\n\npackage tools\n\n{imports}\n"
    (folder / "tools.go").write_text(text, encoding="utf-8")
    environ = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod"}
    for name, module in PROGRAMS.items():
        beside = folder / f"{name}.new"
        done = subprocess.run(
            [find_go(), "build", "-buildvcs=false", "-ldflags", VERSION, "-o", str(beside), module],
            cwd=folder, env=environ, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{name} does not build, see above")
        beside.rename(programs[name])
    return programs


def _go_mod() -> str:
    minor = KUBERNETES.partition(".")[2]
    replaced = "".join(f"replace k8s.io/{one} => k8s.io/{one} v0.{minor}\n" for one in PARTS)
    return (
        f"module tools\n\ngo {GO}\n\n"
        f"require k8s.io/kubernetes v{KUBERNETES}\nrequire go.etcd.io/etcd/server/v3 v{ETCD}\n\n"
        f"{replaced}"
    )


@contextlib.contextmanager
def running(programs: dict[str, Path], folder: Path) -> Iterator[ApiServer]:
    """Run both for the length of the context; their logs lie in ``folder``."""
    client, peer, port = _free_ports(3)
    token = secrets.token_hex(16)
    _sign_with(folder)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n", encoding="utf-8")
    etcd = [
        str(programs["etcd"]), "--data-dir", str(folder / "etcd"),
        "--listen-client-urls", f"http://{LOOPBACK}:{client}",
        "--advertise-client-urls", f"http://{LOOPBACK}:{client}",
        "--listen-peer-urls", f"http://{LOOPBACK}:{peer}",
        "--initial-advertise-peer-urls", f"http://{LOOPBACK}:{peer}",
        "--initial-cluster", f"default=http://{LOOPBACK}:{peer}", "--unsafe-no-fsync",
    ]  # fmt: skip
    server = [
        str(programs["kube-apiserver"]), f"--etcd-servers=http://{LOOPBACK}:{client}",
        f"--bind-address={LOOPBACK}", f"--advertise-address={LOOPBACK}",
        f"--secure-port={port}", f"--cert-dir={folder / 'certs'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=AlwaysAllow",
        "--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none",
        # Accounts are made by a controller, of which there are none here.
        "--disable-admission-plugins=ServiceAccount",
    ]  # fmt: skip
    with _child(etcd, folder / "etcd.log"), _child(server, folder / "api.log") as api:
        _wait_ready(f"https://{LOOPBACK}:{port}/readyz", token, api, folder / "api.log")
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(port, token), encoding="utf-8")
        yield ApiServer(kubeconfig)


def _sign_with(folder: Path) -> None:
    for words in (
        ["genrsa", "-out", "sa.key", "2048"],
        ["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"],
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def _child(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        process = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(url: str, token: str, process: subprocess.Popen[bytes], log: Path) -> None:
    unchecked = ssl._create_unverified_context()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    deadline_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(request, context=unchecked, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the API server is not ready: {log.read_text()[-2000:]}")


def _kubeconfig(port: int, token: str) -> str:
    return (
        "apiVersion: v1\nkind: Config\n"
        "clusters: [{name: c, cluster: {insecure-skip-tls-verify: true, "
        f'server: "https://{LOOPBACK}:{port}"}}}}]\n'
        f"users: [{{name: u, user: {{token: {token}}}}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
    )
