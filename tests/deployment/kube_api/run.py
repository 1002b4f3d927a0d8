"""Installs, upgrades, rolls back and uninstalls the chart on a real API server: ``make test-kube``.

The namespace enforces Pod Security `restricted`: each pod of each rendering is offered to the API
server, whose own admission refuses what breaks the profile. No pod runs, since nothing here runs
pods; what a cluster would do with them is not shown.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.deployment.kube_api.server import ApiServer, build, running
from tests.deployment.rendering import (
    CHART,
    NAME,
    NAMESPACE,
    RELEASE,
    SECURE,
    Chart,
    find_tool,
    pods,
)
from tests.deployment.values_matrix import MATRIX, Values

Object = dict[str, Any]

CUSTOM: Final = (
    ("monitoring.coreos.com", "v1", "ServiceMonitor"),
    ("monitoring.coreos.com", "v1", "PrometheusRule"),
    ("keda.sh", "v1alpha1", "ScaledObject"),
)
RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}
STAYS: Final = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


class Cluster:
    """What helm and kubectl say to it."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._environ = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
        self._folder = folder

    def kubectl(self, *words: str, given: Object | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, with an object on its standard input."""
        text = json.dumps(given) if given is not None else None
        return self._run("kubectl", *words, text=text)

    def helm(self, *words: str, values: Values | None = None) -> str:
        """Run helm, which must succeed."""
        options = ["--namespace", NAMESPACE]
        if values is not None:
            for name, one in (("secure.json", SECURE), ("values.json", values)):
                path = self._folder / name
                path.write_text(json.dumps(one), encoding="utf-8")
                options += ["--values", str(path)]
        done = self._run("helm", *words, *options)
        assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}"
        return done.stdout

    def create(self, given: Object) -> None:
        """Create an object."""
        done = self.kubectl("create", "-f", "-", given=given)
        assert done.returncode == 0, done.stderr

    def get(self, kind: str, name: str) -> Object:
        """Return an object as it is stored."""
        done = self.kubectl("get", kind, name, "-n", NAMESPACE, "-o", "json")
        assert done.returncode == 0, done.stderr
        found: Object = json.loads(done.stdout)
        return found

    def names(self) -> set[str]:
        """Return what the release has in its namespace."""
        kinds = (
            "all,configmap,serviceaccount,pdb,hpa,networkpolicy,pvc,"
            "servicemonitor,prometheusrule,scaledobject"
        )
        done = self.kubectl("get", kinds, "-n", NAMESPACE, "-o", "name")
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split()) - STAYS

    def _run(
        self, program: str, *words: str, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = find_tool(program)
        assert path is not None, f"{program} is missing: make deploy-tools"
        return subprocess.run(
            [path, *words], env=self._environ, input=text, capture_output=True, text=True,
            check=False,
        )  # fmt: skip


def prepare(cluster: Cluster) -> None:
    """Make the namespace, and the kinds that the chart has of others."""
    labels = {"metadata": {"name": NAMESPACE, "labels": RESTRICTED}}
    cluster.create({"apiVersion": "v1", "kind": "Namespace", **labels})
    for group, version, kind in CUSTOM:
        plural = f"{kind.lower()}s"
        any_fields = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        one = {
            "name": version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": any_fields},
        }
        cluster.create(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                    "versions": [one],
                },
            }
        )
        crd = f"crd/{plural}.{group}"
        done = cluster.kubectl("wait", "--for=condition=Established", crd, "--timeout=30s")
        assert done.returncode == 0, done.stderr


def install_to_uninstall(cluster: Cluster) -> None:
    """Go through the life of a release."""
    cluster.helm("install", RELEASE, str(CHART), values={})
    first = cluster.names()
    ingest = cluster.get("statefulset", f"{NAME}-ingest")
    assert ingest["spec"]["replicas"] == 3
    before = _sum(cluster)
    print(f"installed: {len(first)} objects")

    cluster.helm("upgrade", RELEASE, str(CHART), values=MATRIX["everything"])
    second = cluster.names()
    print(f"upgraded to everything: {len(second)} objects")

    values = {"settings": {"s3": {"bucket": "other"}}, "ingest": {"replicaCount": 4}}
    cluster.helm("upgrade", RELEASE, str(CHART), values=values)
    assert cluster.names() == first
    assert cluster.get("statefulset", f"{NAME}-ingest")["spec"]["replicas"] == 4
    settings = cluster.get("configmap", f"{NAME}-settings")["data"]
    assert settings["TIERLOG_S3__BUCKET"] == "other"
    assert _sum(cluster) != before, "a change of settings starts no pods anew"
    print("upgraded again: fewer objects, other settings")

    cluster.helm("rollback", RELEASE, "1")
    assert cluster.names() == first
    assert cluster.get("statefulset", f"{NAME}-ingest")["spec"]["replicas"] == 3
    print("rolled back")

    cluster.helm("uninstall", RELEASE)
    assert cluster.names() == set()
    print("uninstalled: nothing is left")


def _sum(cluster: Cluster) -> str:
    pod = cluster.get("deployment", f"{NAME}-scheduler")["spec"]["template"]
    found: str = pod["metadata"]["annotations"]["checksum/settings"]
    return found


def admit_every_pod(cluster: Cluster, chart: Chart) -> None:
    """Offer each pod of each rendering to the admission, and worse ones too."""
    different: dict[str, Object] = {}
    for values in MATRIX.values():
        for template in pods(chart(values)).values():
            spec = _placeable(template["spec"])
            different.setdefault(json.dumps(spec, sort_keys=True), spec)
    done = _offer(cluster, list(different.values()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("created") == len(different)
    print(f"admitted: {len(different)} different pods of {len(MATRIX)} renderings")

    sound = _placeable(pods(chart({}))[f"{NAME}-reader"]["spec"])
    host = {"name": "host", "hostPath": {"path": "/"}}
    for field, value in (
        ("hostNetwork", True),
        ("securityContext", {}),
        ("volumes", [*sound["volumes"], host]),
    ):
        done = _offer(cluster, [{**sound, field: value}])
        assert done.returncode != 0, f"the admission took a pod with {field}"
        assert "violates PodSecurity" in done.stderr, done.stderr
    print("refused: pods that are not restricted")


def _placeable(spec: Object) -> Object:
    """Return a pod without what is of a cluster: priority classes, claims."""
    spec = copy.deepcopy(spec)
    spec.pop("priorityClassName", None)
    volumes = spec.setdefault("volumes", [])
    known = {one["name"] for one in volumes}
    mounted = {one["name"] for one in spec["containers"][0].get("volumeMounts", [])}
    volumes += [{"name": one, "emptyDir": {}} for one in sorted(mounted - known)]
    return spec


def _offer(cluster: Cluster, specs: list[Object]) -> subprocess.CompletedProcess[str]:
    items = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": spec}
        for number, spec in enumerate(specs)
    ]
    words = ("create", "-n", NAMESPACE, "--dry-run=server", "-f", "-")
    return cluster.kubectl(*words, given={"apiVersion": "v1", "kind": "List", "items": items})


def main() -> int:
    """Run it all; 0 when it is as it should be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tierlog"
    programs = build(cache)
    with tempfile.TemporaryDirectory(prefix="tierlog-kube-") as name:
        folder = Path(name)
        with running(programs, folder) as server:
            cluster = Cluster(server, folder)
            prepare(cluster)
            install_to_uninstall(cluster)
            admit_every_pod(cluster, Chart(folder))
    print("ok: the chart lives on a real API server")
    return 0


if __name__ == "__main__":
    sys.exit(main())
