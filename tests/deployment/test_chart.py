"""What the chart is to be, part by part: what a value changes, and what no value can."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import typer

from tests.deployment.pod_security import broken
from tests.deployment.rendering import (
    CHART,
    COMPONENTS,
    NAME,
    NAMESPACE,
    ROOT,
    Chart,
    Object,
    environment,
    kinds,
    pod_of,
    pods,
)
from tests.deployment.values_matrix import MATRIX, SWITCHES
from tierlog.model.errors import RefusedError
from tierlog.model.node import NodeInfo
from tierlog.runtime.settings import OffloaderSettings, OwnerSettings, load_settings
from tierlog_spark.cli.main import app as spark_app
from tierlog_spark.cli.running import EXIT_FINDINGS, EXIT_INCOMPLETE
from tools import chart_schema, deploy_files
from tools.lock import project

COMMAND = ["tierlog", "spark"]
OF = "app.kubernetes.io/component"
INSIDE = {"service", "tracing", "compression"}
"""Extras of a room that are no other system that it talks to."""


def test_what_is_generated_is_what_the_code_gives():
    assert deploy_files.stale() == []


def test_a_stale_file_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deploy_files, "values_schema", lambda: "{}")
    assert deploy_files.stale() == ["deploy/helm/tierlog/values.schema.json"]


def test_the_schema_has_every_setting_but_secrets_and_what_the_chart_decides():
    settings = json.loads(chart_schema.values_schema())["properties"]["settings"]["properties"]
    assert {"bucket", "endpoint_url", "driver"} <= set(settings["s3"]["properties"])
    assert settings["kafka"]["properties"]["partitions"]["exclusiveMinimum"] == 0
    secret = chart_schema.secret_settings()
    assert {"s3.secret_key", "wire.token", "keys"} <= secret
    for path in secret | chart_schema.DECIDED:
        section, _, name = path.partition(".")
        inside = settings.get(section, {}).get("properties", {})
        assert section not in settings or name not in inside, path


REFUSED = {
    "an unknown setting": ({"settings": {"s3": {"buckett": "x"}}}, "buckett"),
    "an unknown section": ({"settings": {"schedular": {}}}, "schedular"),
    "a setting out of bounds": ({"settings": {"kafka": {"partitions": 0}}}, "partitions"),
    "a secret": ({"settings": {"s3": {"secret_key": "x"}}}, "secret_key"),
    "a token": ({"settings": {"wire": {"token": "x"}}}, "token"),
    "keys": ({"settings": {"keys": {"k": "x"}}}, "keys"),
    "what the chart decides": ({"settings": {"ingest": {"node_id": "n"}}}, "node_id"),
    "a setting beside settings": (
        {"reader": {"extraEnv": [{"name": "TIERLOG_S3__SECRET_KEY", "value": "x"}]}},
        "extraEnv",
    ),
    "a path of the host": (
        {"ingest": {"extraVolumes": [{"name": "h", "hostPath": {"path": "/"}}]}},
        "hostPath",
    ),
    "root": ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
    "the group of root": ({"podSecurity": {"fsGroup": 0}}, "fsGroup"),
    "a security context": (
        {"reader": {"securityContext": {"privileged": True}}},
        "securityContext",
    ),
    "an unknown component": ({"readers": {}}, "readers"),
    "no certificates": ({"security": {"tls": {"existingSecret": ""}}}, "security is on"),
    "nobody who could say who it is": (
        {"security": {"jwks": {"existingSecret": ""}}},
        "settings.security.tls.client_certificates",
    ),
    "ZooKeeper in plain text": (
        {"settings": {"zookeeper": {"tls": {"enabled": False}}}},
        "zookeeper would be reached in plain text",
    ),
    "S3 in plain text": (
        {"settings": {"s3": {"endpoint_url": "http://minio:9000"}}},
        "s3 would be reached in plain text",
    ),
    "Redis in plain text": (
        {"settings": {"redis": {"url": "redis://redis:6379/0"}}},
        "redis would be reached in plain text",
    ),
    "a secret that services would refuse": (
        {"wire": {"existingSecret": "wire"}},
        "a secret of the open mode",
    ),
    "a production that is open": (
        {"settings": {"profile": "production", "security": {"mode": "open"}}},
        "security.mode is open, and settings.profile is production",
    ),
    "a token of the services": ({"settings": {"security": {"token": "x"}}}, "token"),
    "a file that the chart mounts": (
        {"settings": {"security": {"tls": {"key_file": "/x"}}}},
        "key_file",
    ),
    "a digest that is none": ({"reader": {"image": {"digest": "sha256:1"}}}, "digest"),
    "a job's name that is too long": (
        {"spark": {"jobs": {"twelve-chars": {"schedule": "0 3 * * *", "args": ["usage"]}}}},
        "twelve-chars",
    ),
    "a job without a schedule": ({"spark": {"jobs": {"x": {"args": ["usage"]}}}}, "schedule"),
    "fewer nodes than copies": ({"ingest": {"replicaCount": 2}}, "lies on 3 nodes"),
    "no room to scale": (
        {"reader": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
        "above maxReplicas",
    ),
    "no room for workers": (
        {"offloader": {"keda": {"enabled": True, "minReplicaCount": 13}}},
        "above maxReplicaCount",
    ),
}


@pytest.mark.parametrize(("values", "named"), REFUSED.values(), ids=REFUSED)
def test_helm_refuses(chart: Chart, values: Object, named: str):
    assert named in chart.refused(values)


def test_the_numbers_that_templates_repeat_are_the_defaults_of_the_settings():
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    own = OffloaderSettings()
    assert f'"drain_s_max" {own.drain_s_max} ' in helpers
    assert f'"give_up_s_max" {own.give_up_s_max} ' in helpers
    assert f'"ensemble_size" {OwnerSettings().ensemble_size} ' in helpers


def test_a_node_is_its_disk(chart: Chart):
    objects = chart({})
    ingest = kinds(objects, "StatefulSet")[f"{NAME}-ingest"]["spec"]
    assert ingest["podManagementPolicy"] == "Parallel"
    claims = {one["metadata"]["name"]: one["spec"] for one in ingest["volumeClaimTemplates"]}
    assert set(claims) == {"journal", "ledgers"}
    assert ingest["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    mounts = {
        one["name"]: one["mountPath"]
        for one in ingest["template"]["spec"]["containers"][0]["volumeMounts"]
    }
    found = environment(objects, "ingest")
    assert mounts["journal"] == found["TIERLOG_INGEST__DATA_DIR"]
    assert json.loads(found["TIERLOG_INGEST__LEDGER_DIRECTORIES"]) == [mounts["ledgers"]]
    assert found["TIERLOG_INGEST__NODE_ID"] == f"{NAME}-ingest-0"
    host = found["TIERLOG_INGEST__LISTEN__ADVERTISE_HOST"]
    assert host == f"{NAME}-ingest-0.{ingest['serviceName']}.{NAMESPACE}.svc.cluster.local"
    nodes = kinds(objects, "Service")[ingest["serviceName"]]["spec"]
    assert nodes["clusterIP"] == "None"
    assert nodes["publishNotReadyAddresses"] is True


def test_nodes_are_not_put_together(chart: Chart):
    spread = pod_of(chart({}), "ingest")[1]["spec"]["topologySpreadConstraints"]
    assert {one["topologyKey"]: one["whenUnsatisfiable"] for one in spread} == {
        "kubernetes.io/hostname": "DoNotSchedule",
        "topology.kubernetes.io/zone": "ScheduleAnyway",
    }


def test_probes_ask_what_services_answer(chart: Chart):
    for component in COMPONENTS:
        container = pod_of(chart({}), component)[1]["spec"]["containers"][0]
        ports = {one["name"] for one in container["ports"]}
        asked = {
            kind: container[kind]["httpGet"]
            for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        assert {kind: one["path"] for kind, one in asked.items()} == {
            "startupProbe": "/livez",
            "livenessProbe": "/livez",
            "readinessProbe": "/readyz",
        }
        assert {one["port"] for one in asked.values()} <= ports


def test_certificates_and_tokens_are_mounted_and_probes_are_encrypted(chart: Chart):
    objects = chart(SWITCHES["tokens"])
    for component in COMPONENTS:
        pod = pod_of(objects, component)[1]["spec"]
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        secrets = {
            one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one
        }
        assert secrets == {"tls": "tls", "jwks": "issuer", "token": "service"}
        found = environment(objects, component)
        for name, file in (
            ("TLS__KEY_FILE", "tls/tls.key"),
            ("TLS__CA_FILE", "tls/ca.crt"),
            ("JWT__JWKS_FILE", "jwks/jwks.json"),
            ("TOKEN_FILE", "token/jwt"),
        ):
            folder, _, key = file.partition("/")
            assert found[f"TIERLOG_SECURITY__{name}"] == f"{mounts[folder]}/{key}"
        probe = pod["containers"][0]["readinessProbe"]["httpGet"]
        assert probe["scheme"] == "HTTPS"
    smoke = kinds(objects, "Pod")[f"{NAME}-smoke"]["spec"]
    assert {"name": "token", "secret": {"secretName": "smoke", "defaultMode": 0o440}} in (
        smoke["volumes"]
    )


def test_open_is_open(chart: Chart):
    objects = chart(SWITCHES["open"])
    probe = pod_of(objects, "reader")[1]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
    assert probe["scheme"] == "HTTP"
    assert environment(objects, "reader")["TIERLOG_SECURITY__MODE"] == "open"


def test_who_tests_an_open_release_shows_its_secret(chart: Chart):
    """Its appends go to owners by the wire, as those of other clients do."""
    pod = kinds(chart(SWITCHES["open"]), "Pod")[f"{NAME}-smoke"]["spec"]
    shown = {one["name"]: one.get("valueFrom") for one in pod["containers"][0]["env"]}
    assert shown["TIERLOG_WIRE__TOKEN"] == {"secretKeyRef": {"name": "wire", "key": "token"}}


def test_service_links_would_stop_every_process(monkeypatch: pytest.MonkeyPatch):
    """So the chart has them off: this is what Kubernetes sets for a service `tierlog-reader`."""
    monkeypatch.setenv("TIERLOG_READER_PORT", "tcp://10.0.0.1:8080")
    with pytest.raises(RefusedError, match="TIERLOG_READER_PORT"):
        load_settings()


def test_secrets_come_by_reference(chart: Chart):
    switches = ("s3-keys", "redis-password", "open", "ledger-keys", "settings-file")
    values = {key: value for name in switches for key, value in SWITCHES[name].items()}
    for component in COMPONENTS:
        container = pod_of(chart(values), component)[1]["spec"]["containers"][0]
        references = {
            one["name"]: one["valueFrom"]["secretKeyRef"]
            for one in container["env"]
            if "secretKeyRef" in one.get("valueFrom", {})
        }
        assert references == {
            "TIERLOG_S3__ACCESS_KEY": {"name": "s3", "key": "id"},
            "TIERLOG_S3__SECRET_KEY": {"name": "s3", "key": "key"},
            "TIERLOG_REDIS__URL": {"name": "redis", "key": "url"},
            "TIERLOG_WIRE__TOKEN": {"name": "wire", "key": "token"},
        }
        assert {"prefix": "TIERLOG_KEYS__", "secretRef": {"name": "keys"}} in container["envFrom"]
        assert environment(chart(values), component)["TIERLOG_CONFIG"] == "/etc/tierlog/own.toml"


def test_a_workload_identity_is_an_annotation_and_no_key(chart: Chart):
    objects = chart(SWITCHES["workload-identity"])
    account = kinds(objects, "ServiceAccount")[f"{NAME}-offloader"]
    assert "eks.amazonaws.com/role-arn" in account["metadata"]["annotations"]
    assert "TIERLOG_S3__ACCESS_KEY" not in environment(objects, "offloader")


def test_readers_scale_by_cpu_and_nothing_else_sets_their_number(chart: Chart):
    objects = chart(SWITCHES["hpa"])
    assert "replicas" not in kinds(objects, "Deployment")[f"{NAME}-reader"]["spec"]
    scaler = kinds(objects, "HorizontalPodAutoscaler")[f"{NAME}-reader"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == f"{NAME}-reader"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 20)


def test_offloaders_scale_by_the_queue_and_by_what_is_late(chart: Chart):
    objects = chart(SWITCHES["keda-ages"])
    assert "replicas" not in kinds(objects, "Deployment")[f"{NAME}-offloader"]["spec"]
    scaled = kinds(objects, "ScaledObject")[f"{NAME}-offloader"]["spec"]
    queue, late = (one["metadata"] for one in scaled["triggers"])
    assert queue["topic"] == "other.offload.requested.v1"
    assert queue["consumerGroup"] == "workers"
    assert queue["bootstrapServers"] == "kafka:9092"
    query = f'max(tierlog_offload_overdue_seconds{{namespace="{NAMESPACE}"}})'
    assert (late["query"], late["threshold"]) == (query, "3600")
    assert scaled["minReplicaCount"] >= 1


def test_what_waits_behind_a_long_copy_counts_and_workers_stay_for_it(chart: Chart):
    scaled = kinds(chart(SWITCHES["keda"]), "ScaledObject")[f"{NAME}-offloader"]["spec"]
    assert "excludePersistentLag" not in scaled["triggers"][0]["metadata"]
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"] == {"stabilizationWindowSeconds": 1800}
    refused = chart.refused({"offloader": {"keda": {"scaleDownSeconds": 3601}}})
    assert "scaleDownSeconds" in refused


def test_the_queue_is_looked_at_as_offloaders_look_at_it(chart: Chart):
    def trigger(values: Object) -> Object:
        scaled = kinds(chart(values), "ScaledObject")[f"{NAME}-offloader"]["spec"]
        found: Object = scaled["triggers"][0]
        return found

    encrypted = trigger(SWITCHES["keda"])
    assert encrypted["metadata"]["tls"] == "enable"
    assert not {"sasl", "authenticationRef"} & {*encrypted, *encrypted["metadata"]}
    named = trigger(SWITCHES["keda-sasl"])
    assert named["metadata"]["sasl"] == "scram_sha512"
    assert named["authenticationRef"] == {"name": "kafka"}
    meshed = {
        **SWITCHES["keda"],
        "settings": {
            "kafka": {"tls": {"enabled": False}},
            "security": {"plain_text_to": ["kafka"]},
        },
    }
    assert "tls" not in trigger(meshed)["metadata"]


def test_each_component_may_talk_to_what_its_room_names_and_to_nothing_else(chart: Chart):
    objects = chart({})
    policies = kinds(objects, "NetworkPolicy")
    everything = policies[f"{NAME}-deny-all"]["spec"]
    assert everything["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(everything)
    ports = {"zookeeper": 2181, "kafka": 9092, "s3": 443, "redis": 6379}
    for component in COMPONENTS:
        (library,) = project(ROOT / "services" / component)["dependencies"]
        extras = set(re.findall(r"\w+", library.partition("[")[2])) - INSIDE
        opened = {
            one["port"]
            for rule in policies[f"{NAME}-{component}"]["spec"]["egress"]
            for one in rule["ports"]
        }
        beside: set[object] = {53, "wire", "grpc", "http"}
        assert opened == {ports[one] for one in extras} | beside, component


def test_a_storage_node_is_reached_at_each_of_its_addresses(chart: Chart):
    """Who writes, asks and reads ledgers does each in another way: by wire, gRPC and HTTP."""
    names = {one.name for one in dataclasses.fields(NodeInfo) if one.name.endswith("_address")}
    ways = {name.removesuffix("_address") for name in names}
    assert ways == {"wire", "grpc", "http"}
    policies = kinds(chart(SWITCHES["spark-jobs"]), "NetworkPolicy")
    for component in (*COMPONENTS, "spark", "smoke"):
        opened = [
            {one["port"] for one in rule["ports"]}
            for rule in policies[f"{NAME}-{component}"]["spec"]["egress"]
            for peer in rule.get("to", [])
            if peer["podSelector"]["matchLabels"].get(OF, "ingest") == "ingest"
        ]
        assert any(ways <= ports for ports in opened), component


def test_the_network_opens_to_a_collector_when_there_are_traces(chart: Chart):
    values = {
        "settings": {"tracing": {"enabled": True, "endpoint_url": "http://otel:4318/v1/traces"}}
    }
    policies = kinds(chart(values), "NetworkPolicy")
    opened = {
        component
        for component in COMPONENTS
        for rule in policies[f"{NAME}-{component}"]["spec"]["egress"]
        for one in rule["ports"]
        if one["port"] == 4318
    }
    rooms = {
        component
        for component in COMPONENTS
        if "tracing" in project(ROOT / "services" / component)["dependencies"][0]
    }
    assert opened == rooms == {"ingest", "offloader", "scheduler"}


def test_the_network_opens_to_named_peers_alone(chart: Chart):
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}
    for values, others in (({}, []), (SWITCHES["narrow-network"], [peer])):
        rules = kinds(chart(values), "NetworkPolicy")[f"{NAME}-reader"]["spec"]["ingress"]
        assert rules[0]["from"][1:] == others
        assert all(one["from"] for one in rules)


def test_rules_and_boards_are_those_of_the_code(chart: Chart):
    objects = chart(MATRIX["everything"])
    boards = {
        key: json.loads(text)
        for one in kinds(objects, "ConfigMap").values()
        for key, text in one["data"].items()
        if key.endswith(".json")
    }
    assert boards == {
        path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")
    }
    assert len(boards) == 4
    (rule,) = kinds(chart(SWITCHES["runbooks"]), "PrometheusRule").values()
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    assert len(alerts) > 15
    for one in alerts:
        page = one["annotations"]["runbook"].rpartition("/")[2]
        assert one["annotations"]["runbook_url"] == f"https://wiki.example/tierlog/{page}"


def test_the_smoke_test_is_the_one_script(chart: Chart):
    objects = chart({})
    pod = kinds(objects, "Pod")[f"{NAME}-smoke"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    script = kinds(objects, "ConfigMap")[f"{NAME}-smoke"]["data"]["smoke.sh"]
    assert script.strip() == (CHART / "files" / "smoke.sh").read_text().strip()
    services = kinds(objects, "Service")
    for one in pod["spec"]["containers"][0]["env"]:
        if one["name"].startswith("TIERLOG_CLIENT__"):
            host, _, port = one["value"].partition(":")
            assert int(port) in {port["port"] for port in services[host]["spec"]["ports"]}


def test_the_command_line_works_in_the_scheduler(chart: Chart, monkeypatch: pytest.MonkeyPatch):
    found = environment(chart({}), "scheduler")
    for name, value in found.items():
        if name.startswith("TIERLOG_"):
            monkeypatch.setenv(name, value)
    client = load_settings().client
    assert client.ingest_address == f"{NAME}-ingest:9090"
    assert client.reader_http_address == f"{NAME}-reader:8080"
    assert client.scheduler_http_address == f"{NAME}-scheduler:8080"


def test_jobs_on_spark_are_commands_that_there_are(chart: Chart, monkeypatch: pytest.MonkeyPatch):
    objects = chart(SWITCHES["spark-jobs"])
    jobs = kinds(objects, "CronJob")
    assert {name: one["spec"]["suspend"] for name, one in jobs.items()} == {
        f"{NAME}-export": False,
        f"{NAME}-usage-night": True,
    }
    assert jobs[f"{NAME}-export"]["spec"]["concurrencyPolicy"] == "Forbid"
    container = pod_of(objects, "export")[1]["spec"]["containers"][0]
    assert (container["image"], container["command"]) == ("tierlog-spark:0.1.0", COMMAND)
    commands: Any = typer.main.get_command(spark_app)
    asked = commands.commands["export"].make_context("export", container["args"][1:])
    assert (asked.params["cores"], asked.params["memory"]) == (4, "2G")
    assert (asked.params["streams"], asked.params["to"]) == (["orders"], "s3://exports/tierlog")
    for name, value in environment(objects, "export").items():
        if name.startswith("TIERLOG_"):
            monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.s3.bucket == "tierlog"
    assert settings.security.calls_with_tls


NEEDED = {
    "export": ["orders", "--to", "s3://exports/tierlog"],
    "exported": ["orders", "--from", "s3://exports/tierlog"],
    "iceberg": ["orders", "--from", "s3://exports/tierlog", "--table", "logs.orders"],
    "copy": ["--to", "s3://other"],
    "restore": ["--from", "s3://other"],
}


def test_a_job_that_tells_of_damage_is_not_run_again(chart: Chart):
    jobs = {
        name: {"schedule": "0 2 * * *", "args": args}
        for name, args in {"deep": ["scrub", "--deep"], "export": ["export"]}.items()
    }
    made = kinds(chart({"spark": {"jobs": jobs}}), "CronJob")
    told = (ROOT / "docs" / "how-to" / "export-with-spark.md").read_text()
    assert f"but for a scrub that found something (exit code {EXIT_FINDINGS})" in told
    # An export that met damage may succeed by another plan.
    assert "podFailurePolicy" not in made[f"{NAME}-export"]["spec"]["jobTemplate"]["spec"]
    job = made[f"{NAME}-deep"]["spec"]["jobTemplate"]
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    pod = job["spec"]["template"]["spec"]
    assert (rule["action"], codes["operator"], codes["values"]) == (
        "FailJob",
        "In",
        [EXIT_FINDINGS],
    )
    assert codes["containerName"] in {one["name"] for one in pod["containers"]}
    # What else fails may do better with the next pod.
    assert EXIT_INCOMPLETE not in codes["values"]
    assert (job["spec"]["backoffLimit"], pod["restartPolicy"]) == (2, "Never")


"""What a job can't be called without."""


def test_each_job_takes_what_the_chart_adds_to_it(chart: Chart):
    commands: Any = typer.main.get_command(spark_app)
    jobs = {
        f"j{number}": {"schedule": "0 3 * * *", "args": [name, *NEEDED.get(name, ())]}
        for number, name in enumerate(commands.commands)
    }
    objects = chart({"spark": {"jobs": jobs, "cores": 3, "memory": "2G"}})
    for job, said in jobs.items():
        name, *words = pod_of(objects, job)[1]["spec"]["containers"][0]["args"]
        asked = commands.commands[name].make_context(name, list(words))
        assert words[: len(said["args"]) - 1] == said["args"][1:]
        assert asked.params.get("cores", 3) == 3, name
        assert asked.params.get("memory", "2G") == "2G", name


def test_a_job_has_the_key_of_another_bucket_out_of_a_secret(chart: Chart):
    name, secret = "TIERLOG_OTHER_SECRET_KEY", {"secretKeyRef": {"name": "eu", "key": "secret"}}
    said = {"name": name, "valueFrom": secret}
    args = ["copy", "--to", "s3://logs-eu", "--access-key", "eu"]
    jobs = {"copy": {"schedule": "0 3 * * *", "args": args}}
    objects = chart({"spark": {"jobs": jobs, "extraEnv": [said]}})
    assert said in pod_of(objects, "copy")[1]["spec"]["containers"][0]["env"]
    for component, one in (
        ("spark", {"name": name, "value": "in plain text"}),
        ("spark", {"name": "TIERLOG_S3__SECRET_KEY", "valueFrom": secret}),
        ("reader", said),
    ):
        assert "extraEnv" in chart.refused({component: {"extraEnv": [one]}})


@pytest.mark.parametrize(("token", "secret"), [("", "service"), ("jobs", "jobs")])
def test_jobs_on_spark_show_who_they_are(chart: Chart, token: str, secret: str):
    spark = {**SWITCHES["spark-jobs"]["spark"], "token": {"existingSecret": token}}
    objects = chart({**SWITCHES["tokens"], "spark": spark})
    pod = pod_of(objects, "export")[1]["spec"]
    secrets = {
        one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one
    }
    assert secrets == {"tls": "tls", "jwks": "issuer", "token": secret}
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    found = environment(objects, "export")
    assert found["TIERLOG_SECURITY__TLS__CA_FILE"] == f"{mounts['tls']}/ca.crt"
    assert found["TIERLOG_SECURITY__TOKEN_FILE"].startswith(f"{mounts['token']}/")


def test_jobs_on_spark_reach_what_they_read_and_nobody_reaches_them(chart: Chart):
    assert not [one for one in chart({}) if one["metadata"]["name"].endswith("-spark")]
    policy = kinds(chart(SWITCHES["spark-jobs"]), "NetworkPolicy")[f"{NAME}-spark"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    opened = {one["port"] for rule in policy["egress"] for one in rule["ports"]}
    assert opened == {53, "wire", "grpc", "http", 443, 2181}


def test_a_change_of_settings_starts_pods_anew(chart: Chart):
    def sums(values: Object) -> set[str]:
        return {
            pod_of(chart(values), one)[1]["metadata"]["annotations"]["checksum/settings"]
            for one in COMPONENTS
        }

    assert len(sums({})) == 1
    assert sums({}) != sums({"settings": {"s3": {"bucket": "other"}}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"securityContext": {}}, "has no seccomp profile"),
        ({"automountServiceAccountToken": True}, "token"),
        ({"enableServiceLinks": True}, "service links"),
        ({"containers": [{"name": "c", "image": "x:1"}]}, "allowPrivilegeEscalation"),
    ],
)
def test_a_pod_that_is_not_restricted_is_found(chart: Chart, change: Object, said: str):
    pod = pods(chart({}))[f"{NAME}-reader"]
    assert broken(pod) == []
    worse = {**pod, "spec": {**pod["spec"], **change}}
    assert any(said in one for one in broken(worse))


CONTAINER: list[tuple[Object, str]] = [
    ({"privileged": True}, "privileged"),
    ({"allowPrivilegeEscalation": True}, "allowPrivilegeEscalation"),
    ({"capabilities": {}}, "not dropped"),
    ({"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}, "added"),
    ({"runAsNonRoot": False}, "may run as root"),
    ({"runAsUser": 0}, "runs as root"),
    ({"readOnlyRootFilesystem": False}, "written to"),
    ({"seccompProfile": {"type": "Unconfined"}}, "seccomp"),
]


@pytest.mark.parametrize(("change", "said"), CONTAINER)
def test_a_container_that_is_not_restricted_is_found(chart: Chart, change: Object, said: str):
    pod = pods(chart({}))[f"{NAME}-reader"]
    (container,) = pod["spec"]["containers"]
    worse = {**container, "securityContext": {**container["securityContext"], **change}}
    assert any(said in one for one in broken({"spec": {**pod["spec"], "containers": [worse]}}))
