"""Every rendering of the chart: valid for Kubernetes, `restricted`, and settings that are read.

The values are those of ``values_matrix``. helm renders, and checks them against the schema.
"""

from __future__ import annotations

import copy
import json
import os
import re
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.deployment import pod_security
from tests.deployment.custom_resources import SCHEMAS
from tests.deployment.rendering import (
    CHART,
    COMPONENTS,
    ROOT,
    Chart,
    Object,
    environment,
    kinds,
    missing_tool,
    pod_of,
    pods,
)
from tests.deployment.values_matrix import MATRIX
from tierlog.runtime.security_check import check_security
from tierlog.runtime.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

KUBERNETES = "1.33"
EVERY = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
NAME_LEN_MAX = 63


def test_there_are_enough_values():
    assert len(MATRIX) >= 50


@pytest.mark.parametrize("name", ["defaults", "everything", "one-node", "mirror"])
def test_helm_finds_no_fault(chart: Chart, name: str):
    done = chart.lint(MATRIX[name])
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Objects that were found right."""
    return set()


@EVERY
def test_kubernetes_takes_it(chart: Chart, values: Object, seen: set[str]):
    validate = pytest.importorskip("kubernetes_validate", reason="make deploy-tools")
    objects = chart(values)
    assert len(objects) > 10
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    for one in objects:
        assert len(one["metadata"]["name"]) <= NAME_LEN_MAX
        # Renderings have most of their objects in common.
        text = json.dumps(one, sort_keys=True)
        if text in seen:
            continue
        if one["kind"] in SCHEMAS:
            SCHEMAS[one["kind"]](one)
        else:
            validate.validate(one, KUBERNETES, strict=True)
        seen.add(text)


@EVERY
def test_each_pod_is_restricted(chart: Chart, values: Object):
    found = pods(chart(values))
    assert len(found) >= len(COMPONENTS)
    assert {
        name: faults for name, pod in found.items() if (faults := pod_security.broken(pod))
    } == {}


@EVERY
def test_services_read_their_settings(
    chart: Chart, values: Object, monkeypatch: pytest.MonkeyPatch
):
    """What a rendering sets, each process has and starts with; nothing of it is passed over."""
    objects = chart(values)
    for component in COMPONENTS:
        settings = read(environment(objects, component), monkeypatch)
        # A file of settings may say the rest; nothing else is said later.
        if "config" not in values:
            check_security(settings, component)
        listen = getattr(settings, component).listen
        pod = pod_of(objects, component)[1]["spec"]
        ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
        assert {name: getattr(listen, f"{name}_port") for name in ports} == ports
        assert listen.host == "0.0.0.0"
        wanted = copy.deepcopy(values.get("settings", {}))
        assert differences(wanted, settings.model_dump(mode="json")) == []


def read(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    with monkeypatch.context() as patched:
        for name in [one for one in os.environ if one.startswith("TIERLOG_")]:
            patched.delenv(name)
        for name, value in variables.items():
            # Files are there in a pod alone.
            if name.startswith("TIERLOG_") and name != "TIERLOG_CONFIG":
                patched.setenv(name, value)
        return load_settings()


def differences(wanted: Any, found: Any) -> list[str]:
    if isinstance(wanted, dict):
        return [f"{key}.{one}" for key in wanted for one in differences(wanted[key], found[key])]
    return [] if wanted == found else [f"{wanted!r} became {found!r}"]


@EVERY
def test_what_selects_a_pod_finds_it(chart: Chart, values: Object):
    objects = chart(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for kind in ("Service", "PodDisruptionBudget", "StatefulSet", "Deployment"):
        for name, one in kinds(objects, kind).items():
            selector = one["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            found = {pod for pod, has in labels.items() if wanted.items() <= has.items()}
            assert len(found) == 1, f"{kind} {name} selects {found}"


@EVERY
def test_no_secret_is_written_down(chart: Chart, values: Object):
    objects = chart(values)
    assert kinds(objects, "Secret") == {}
    for one in kinds(objects, "ConfigMap").values():
        found = [
            key for key in one["data"] if any(word in key for word in ("SECRET", "TOKEN", "KEYS"))
        ]
        assert found == []


@EVERY
def test_ends_have_time(chart: Chart, values: Object, monkeypatch: pytest.MonkeyPatch):
    """Nobody is killed while it does what its settings let it do at its end."""
    objects = chart(values)
    for component in COMPONENTS:
        given = values.get(component, {})
        if given.get("terminationGracePeriodSeconds") is not None:
            continue
        pod = pod_of(objects, component)[1]["spec"]
        before_s = pod["containers"][0].get("lifecycle", {})
        pause_s = before_s.get("preStop", {}).get("sleep", {}).get("seconds", 0)
        left_s = pod["terminationGracePeriodSeconds"] - pause_s
        if component == "offloader":
            own = read(environment(objects, component), monkeypatch).offloader
            assert left_s >= own.drain_s_max + own.give_up_s_max + 10
        else:
            assert left_s >= {"ingest": 45, "reader": 15, "scheduler": 15}[component]


def examples() -> list[Any]:
    """Return the values that pages for people show, each with where it stands."""
    if missing_tool():
        return []
    import yaml

    known = set(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        blocks = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", page.read_text("utf-8"), re.MULTILINE)
        for number, block in enumerate(blocks):
            try:
                values = yaml.safe_load(textwrap.dedent(block))
            except yaml.YAMLError:
                continue
            if isinstance(values, dict) and values.keys() & known:
                found.append(pytest.param(values, id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize("values", examples())
def test_values_that_are_shown_are_values_that_start(
    chart: Chart, values: Object, monkeypatch: pytest.MonkeyPatch
):
    test_services_read_their_settings(chart, values, monkeypatch)
