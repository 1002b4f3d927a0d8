"""Asks helm for renderings of the chart, and takes them apart.

Owns where helm comes from: the PATH, or .venv/bin. Nothing here imitates helm's templates.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "tierlog"
RELEASE: Final = "logs"
NAMESPACE: Final = "storage"
NAME: Final = "logs-tierlog"
COMPONENTS: Final = ("ingest", "reader", "offloader", "scheduler")

Object = dict[str, Any]

SECURE: Final[Object] = {
    "security": {"tls": {"existingSecret": "tls"}, "jwks": {"existingSecret": "issuer"}},
    "settings": {
        "security": {"jwt": {"issuer": "https://issuer.example"}},
        "zookeeper": {"tls": {"enabled": True}},
        "kafka": {"tls": {"enabled": True}},
    },
}
"""What every release has to say, unless it is open."""


def find_tool(name: str) -> str | None:
    """Return the path of a program."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def missing_tool() -> str | None:
    """Return the name of what is needed to render and is not there."""
    if find_tool("helm") is None:
        return "helm"
    return None if importlib.util.find_spec("yaml") else "PyYAML"


class Chart:
    """The chart, rendered with any values."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rendered: dict[str, list[Object]] = {}

    def __call__(self, values: Object | None = None, *options: str) -> list[Object]:
        """Return the objects of a rendering; hooks too."""
        import yaml

        key = json.dumps([values, options], sort_keys=True)
        if key not in self._rendered:
            done = self.helm("template", values, *options)
            assert done.returncode == 0, done.stderr
            documents = yaml.load_all(done.stdout, Loader=_loader())
            self._rendered[key] = [one for one in documents if one]
        return self._rendered[key]

    def refused(self, values: Object) -> str:
        """Return what helm says to values that it does not take."""
        done = self.helm("template", values)
        assert done.returncode != 0, "helm took these values"
        return done.stderr

    def lint(self, values: Object | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``helm lint``."""
        return self._run("lint", str(CHART), "--strict", *self._values(values))

    def helm(
        self, verb: str, values: Object | None = None, *options: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of helm on the chart."""
        words = [verb, RELEASE, str(CHART), "--namespace", NAMESPACE, *self._values(values)]
        return self._run(*words, *options)

    def _values(self, values: Object | None) -> list[str]:
        """Put values over those without which no release is taken."""
        words = []
        for name, one in (("secure.json", SECURE), ("values.json", values)):
            if one is not None:
                path = self._folder / name
                path.write_text(json.dumps(one), encoding="utf-8")
                words += ["--values", str(path)]
        return words

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = find_tool("helm")
        assert program is not None
        return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def kinds(objects: list[Object], kind: str) -> dict[str, Object]:
    """Return the objects of one kind, by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods(objects: list[Object]) -> dict[str, Object]:
    """Return what each workload makes pods of, by the workload's name."""
    found = {}
    for one in objects:
        if one["kind"] == "Pod":
            found[one["metadata"]["name"]] = one
        elif one["kind"] in {"Deployment", "StatefulSet"}:
            found[one["metadata"]["name"]] = one["spec"]["template"]
        elif one["kind"] == "CronJob":
            found[one["metadata"]["name"]] = one["spec"]["jobTemplate"]["spec"]["template"]
    return found


def pod_of(objects: list[Object], component: str) -> tuple[str, Object]:
    """Return a component's workload's name, and what it makes pods of."""
    found = [(name, pod) for name, pod in pods(objects).items() if name.endswith(f"-{component}")]
    assert len(found) == 1
    return found[0]


def environment(objects: list[Object], component: str) -> dict[str, str]:
    """Return the variables that a component's first pod gets, as Kubernetes fills them in.

    What comes from Secrets is left out.
    """
    name, pod = pod_of(objects, component)
    container = pod["spec"]["containers"][0]
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        if "configMapRef" in source:
            settings = kinds(objects, "ConfigMap")[source["configMapRef"]["name"]]
            found |= settings["data"]
    fields = {"metadata.name": f"{name}-0", "metadata.namespace": NAMESPACE}
    for one in container["env"]:
        if "value" in one:
            value = one["value"]
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
            found[one["name"]] = value
        elif "fieldRef" in one["valueFrom"]:
            found[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
    return found
