"""docker-compose.yml: valid, closed, and every service waits for what it needs to be healthy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.deployment.health import health_command
from tests.deployment.rendering import CHART, ROOT
from tests.histories.checker import CheckerMissingError, build_go
from tierlog.embedded.seaweedfs import FLAGS, MEMORY
from tierlog.embedded.services import SERVICE_PORTS
from tierlog.runtime.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

Object = dict[str, Any]

PROFILES = {"core", "nodes", "spark", "demo", "observability", "cli"}
SERVERS = {"zookeeper", "kafka", "s3", "redis"}
ONCE = {"topics", "bucket"}
OURS = {"ingest-1", "ingest-2", "ingest-3", "reader", "offloader", "scheduler"}
BY_HAND = {"cli", "smoke", "spark"}
WATCHING = {"prometheus", "grafana"}
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
COMPOSE_LIBRARY = "github.com/compose-spec/compose-go/v2 v2.16.2"
ENV_FILE = ROOT / "deploy" / "docker" / "three-nodes.env"


@pytest.fixture(scope="module")
def compose() -> Object:
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    loaded: Object = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def kind_of(service: str) -> str:
    return service.partition("-")[0]


def test_everything_is_there(compose: Object):
    assert set(compose["services"]) == SERVERS | ONCE | OURS | BY_HAND | WATCHING
    found = {one for service in compose["services"].values() for one in service["profiles"]}
    assert found == PROFILES


def filled_in(given: Mapping[str, str]) -> str:
    """Return the file with its variables as they are given, else with their defaults."""
    text = (ROOT / "docker-compose.yml").read_text()
    return VARIABLE.sub(lambda one: given.get(one[1], one[2]), text)


def three_nodes() -> dict[str, str]:
    lines = ENV_FILE.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def checked(compose: Object) -> Object:
    checker = pytest.importorskip("compose_spec", reason="make deploy-tools")
    found: Object = checker.PyCompose.from_json(json.dumps(compose)).to_dict()
    return found


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_schema_of_compose_takes_it(nodes: int):
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    compose = yaml.safe_load(filled_in({} if nodes == 1 else three_nodes()))
    assert set(checked(compose)["services"]) == set(compose["services"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("healthchek", {}),
        ("restart", "sometimes"),
        ("depends_on", {"redis": {"condition": "healthy"}}),
        ("stop_grace_period", "3 parsecs"),
    ],
)
def test_the_schema_of_compose_refuses(key: str, value: object):
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    compose = yaml.safe_load(filled_in({}))
    compose["services"]["reader"][key] = value
    with pytest.raises(ValueError, match="at line"):
        checked(compose)


@pytest.fixture(scope="module")
def compose_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compose")
    shutil.copy(Path(__file__).with_name("compose_config.go"), folder)
    (folder / "go.mod").write_text(f"module compose\n\ngo 1.24\n\nrequire {COMPOSE_LIBRARY}\n")
    try:
        return build_go(folder, folder / "compose", modules="mod")
    except CheckerMissingError as missing:
        pytest.skip(str(missing))


def said_by(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run what ``docker compose config`` does, by the library that it is made of."""
    clean = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        [str(program), *words], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("profile", [*sorted(PROFILES), "*"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_compose_itself_loads_every_profile(
    compose: Object, compose_config: Path, profile: str, nodes: int
):
    given = ["--env-file", str(ENV_FILE)] if nodes == 3 else []
    done = said_by(compose_config, *given, "--profile", profile, "docker-compose.yml")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["services"]
    assert set(found) == {
        name
        for name, one in compose["services"].items()
        if profile == "*" or profile in one["profiles"]
    }
    copies = {
        one["environment"]["TIERLOG_INGEST__OWNER__WRITE_QUORUM"]
        for name, one in found.items()
        if kind_of(name) == "ingest"
    }
    assert copies <= {str(nodes)}


@pytest.mark.parametrize(
    ("of", "instead"),
    [("service_healthy", "healthy"), ("profiles:", "profile:"), ("zookeeper:\n", "zoo:\n")],
)
def test_compose_itself_refuses(compose_config: Path, tmp_path: Path, of: str, instead: str):
    text = (ROOT / "docker-compose.yml").read_text()
    assert of in text
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(text.replace(of, instead, 1))
    assert said_by(compose_config, "--profile", "*", str(broken)).returncode == 1


def test_who_keeps_running_tells_its_health_and_others_wait_for_it(compose: Object):
    services = compose["services"]
    for name, service in services.items():
        if name in ONCE | BY_HAND:
            assert service["restart"] == "no"
        else:
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped"
        for other, wait in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if other in ONCE else "service_healthy"
            assert wait["condition"] == wanted, f"{name} waits for {other}"


def test_ours_are_asked_as_their_images_say(compose: Object):
    words = [word.replace("$", "$$") for word in health_command()]
    for name in OURS:
        assert compose["services"][name]["healthcheck"]["test"] == ["CMD", *words], name


def test_what_is_waited_for_is_in_the_same_profiles(compose: Object):
    services = compose["services"]
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert set(service["profiles"]) <= set(services[other]["profiles"]), f"{name}: {other}"


def test_topics_and_bucket_are_made_before_anybody_needs_them(compose: Object):
    services = compose["services"]
    assert services["topics"]["entrypoint"] == ["tierlog"]
    assert services["topics"]["command"] == ["topics", "apply"]
    assert (
        "fs.configure -locationPrefix=/buckets/ -fsync -apply" in services["bucket"]["command"][0]
    )
    for name in ("reader", "offloader", "scheduler"):
        assert set(services[name]["depends_on"]) >= ONCE


@pytest.mark.parametrize("name", sorted(OURS))
def test_ours_are_hardened(compose: Object, name: str):
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    assert "privileged" not in service
    assert service["image"].startswith(f"tierlog-{kind_of(name)}:")


def test_an_image_is_built_by_one_service_and_by_no_other(compose: Object):
    """Each build gives the tag to an image of its own: what has the other one is made anew."""
    images: dict[str, list[Object]] = {}
    for service in compose["services"].values():
        images.setdefault(service["image"], []).append(service)
    for image, users in images.items():
        builders = [one for one in users if "build" in one]
        assert len(builders) == image.startswith("tierlog-"), image
        for one in builders:
            kind = image.removeprefix("tierlog-").partition(":")[0]
            assert one["build"].get("args", {}).get("SERVICE", "spark") == kind
            assert (ROOT / one["build"]["dockerfile"]).exists()
            # Nobody looks for it in a registry, and it is built wherever it is used.
            others = [other for other in users if other is not one]
            assert all(other["pull_policy"] == "never" for other in others), image
            assert all(
                set(other["profiles"]) - {"cli"} <= set(one["profiles"])
                for other in others
                if other["restart"] != "no" or other.get("depends_on")
            ), image


def test_who_is_healthy_is_asked_seldom(compose: Object):
    """Kafka and ZooKeeper start a JVM to answer: every 3 s that took a third of a core."""
    for name in SERVERS | OURS | WATCHING:
        check = compose["services"][name]["healthcheck"]
        assert (check["interval"], check["start_interval"]) == ("30s", "2s"), name
        assert int(check["start_period"][:-1]) >= 60, name
    # These run a child in theirs, and are process 1, which would have to take it up.
    assert all(compose["services"][name]["init"] is True for name in ("zookeeper", "s3"))


def test_spark_may_load_libraries_from_where_it_writes_them(compose: Object):
    """A tmpfs is noexec unless told: zstd, of Parquet and of shuffles, was not to be loaded."""
    spark = compose["services"]["spark"]
    assert (spark["read_only"], spark["tmpfs"]) == (True, ["/tmp:exec"])


def test_ports_are_for_this_machine_alone(compose: Object):
    ports = [one for service in compose["services"].values() for one in service.get("ports", [])]
    assert len(ports) >= 5
    assert all(one.startswith("127.0.0.1:") for one in ports)
    assert len({one.split(":")[1] for one in ports}) == len(ports)


# What the images declare. A volume that is neither named nor a tmpfs stays behind without a name.
OWN_VOLUMES = {
    "zookeeper": {"/data", "/datalog", "/logs"},
    "apache/kafka": {"/var/lib/kafka/data", "/etc/kafka/secrets", "/mnt/shared/config"},
    "chrislusf/seaweedfs": {"/data"},
    "redis": {"/data"},
    "prom/prometheus": {"/prometheus"},
}


def test_seaweedfs_has_the_bounds_that_it_has_under_tierlog_up(compose: Object):
    service = compose["services"]["s3"]
    bounds = [one for one in FLAGS if one.startswith(("-s3.", "-master.", "-volume."))]
    assert len(bounds) >= 5
    assert set(bounds) <= set(service["command"])
    assert service["environment"].items() >= MEMORY.items()


def test_no_volume_without_a_name_is_left(compose: Object):
    for name, service in compose["services"].items():
        mounted = {one.split(":")[1] for one in service.get("volumes", [])}
        own = OWN_VOLUMES.get(service["image"].partition(":")[0], set())
        assert own <= mounted | set(service.get("tmpfs", [])), name


def test_images_have_versions_and_volumes_are_declared(compose: Object):
    volumes = set(compose["volumes"])
    for name, service in compose["services"].items():
        _, _, tag = service["image"].rpartition(":")
        assert tag, name
        assert tag != "latest", name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in volumes or (ROOT / source).exists(), volume


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("name", sorted(OURS | {"topics", "smoke", "cli"}))
def test_processes_read_their_settings(
    compose: Object, name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
):
    for one in [one for one in os.environ if one.startswith("TIERLOG_")]:
        monkeypatch.delenv(one)
    given = three_nodes() if nodes == 3 else {}
    for key, value in compose["services"][name]["environment"].items():
        monkeypatch.setenv(key, VARIABLE.sub(lambda one: given.get(one[1], one[2]), value))
    settings = load_settings()
    assert settings.zookeeper.hosts == "zookeeper:2181"
    owner = settings.ingest.owner
    quorums = (owner.ensemble_size, owner.write_quorum, owner.ack_quorum)
    kind = kind_of(name)
    if kind == "ingest":
        assert quorums == ((1, 1, 1) if nodes == 1 else (3, 3, 2))
        assert settings.ingest.listen.advertise_host == name
        assert settings.ingest.node_id == f"node-{name[-1]}"
    if kind in SERVICE_PORTS:
        listen = getattr(settings, kind).listen
        assert listen.host == "0.0.0.0"
        assert listen.http_port == 8080
        assert all(getattr(listen, f"{one}_port") for one in SERVICE_PORTS[kind])
    if name in {"smoke", "cli"}:
        assert len(settings.client.ingest_address.split(",")) == nodes


def test_the_proof_is_the_script_of_the_chart(compose: Object):
    (mounted,) = compose["services"]["smoke"]["volumes"]
    assert (ROOT / mounted.partition(":")[0]).resolve() == CHART / "files" / "smoke.sh"


def test_ends_have_time(compose: Object, monkeypatch: pytest.MonkeyPatch):
    own = load_settings().offloader
    services = compose["services"]
    assert (
        int(services["offloader"]["stop_grace_period"][:-1]) >= own.drain_s_max + own.give_up_s_max
    )
    assert int(services["ingest-1"]["stop_grace_period"][:-1]) >= 45


def test_prometheus_asks_all_services_that_there_are(compose: Object):
    """Those that only some profiles start by name: one that is not started is no alert."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    asked = [target for group in job["static_configs"] for target in group["targets"]]
    named = [f"{name}:{one['port']}" for one in job["dns_sd_configs"] for name in one["names"]]
    assert sorted(asked + named) == sorted(f"{name}:8080" for name in OURS)
    for target in asked:
        assert "core" in compose["services"][target.partition(":")[0]]["profiles"]
