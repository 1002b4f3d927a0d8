"""Every rendering of the chart, checked by kubeconform over schemas that are on this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.deployment.custom_resources import SCHEMAS
from tests.deployment.rendering import Chart, Object
from tests.deployment.values_matrix import MATRIX
from tests.histories.checker import CheckerMissingError, build_go

PROGRAM = "github.com/yannh/kubeconform"
VERSION = "v0.8.0"
SCHEMA = "{{ .ResourceKind }}{{ .KindSuffix }}.json"


@pytest.fixture(scope="module")
def kubeconform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kubeconform")
    (folder / "go.mod").write_text(f"module tools\n\ngo 1.24\n\nrequire {PROGRAM} {VERSION}\n")
    package = f"{PROGRAM}/cmd/kubeconform"
    try:
        return build_go(folder, folder / "program", modules="mod", package=package)
    except CheckerMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of those that come with kubernetes-validate, as kubeconform wants them."""
    validate = pytest.importorskip("kubernetes_validate", reason="make deploy-tools")
    every = Path(validate.__file__).parent / "kubernetes-json-schema"
    versions = {one.name.partition("-")[0]: one for one in every.glob("v*-local-strict")}
    newest = max(versions, key=lambda name: tuple(map(int, name[1:].split("."))))
    folder = tmp_path_factory.mktemp("schemas")
    for path in versions[newest].glob("*.json"):
        text = path.read_text().replace("/api/_definitions.json", "_definitions.json")
        schema = json.loads(text)
        schema.pop("$id", None)
        schema.pop("$schema", None)
        (folder / path.name).write_text(json.dumps(schema))
    return folder


def said(kubeconform: Path, schemas: Path, files: Path) -> Object:
    done = subprocess.run(
        [
            str(kubeconform), "-strict", "-summary", "-output", "json",
            "-schema-location", f"{schemas}/{SCHEMA}", str(files),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: Object = json.loads(done.stdout)
    assert (done.returncode == 0) == (found["resources"] == []), done.stderr
    return found


def test_every_rendering_conforms(chart: Chart, kubeconform: Path, schemas: Path, tmp_path: Path):
    objects = {
        json.dumps(one, sort_keys=True)
        for values in MATRIX.values()
        for one in chart(values)
        if one["kind"] not in SCHEMAS
    }
    for number, text in enumerate(sorted(objects)):
        (tmp_path / f"{number}.json").write_text(text)
    found = said(kubeconform, schemas, tmp_path)
    assert found["resources"] == []
    assert found["summary"] == {"valid": len(objects), "invalid": 0, "errors": 0, "skipped": 0}


@pytest.mark.parametrize("field", ["replicas", "replica"])
def test_a_wrong_field_does_not(
    chart: Chart, kubeconform: Path, schemas: Path, tmp_path: Path, field: str
):
    found = next(one for one in chart(MATRIX["defaults"]) if one["kind"] == "StatefulSet")
    broken = json.loads(json.dumps(found))
    broken["spec"][field] = "three"
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    assert said(kubeconform, schemas, tmp_path)["summary"]["invalid"] == 1
