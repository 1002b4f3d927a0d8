"""Values files for the chart: each switch alone, all, none, and mixtures of a fixed seed.

``MATRIX`` has a name and the values of each. Every mixture is values that people may write: where
switches exclude each other, they stand under one name here and one of them is taken.
"""

from __future__ import annotations

import copy
import random
from typing import Any, Final

Values = dict[str, Any]

COMPONENTS: Final = ("ingest", "reader", "offloader", "scheduler")
MIXTURES: Final = 30
DIGEST: Final = "sha256:" + "ab" * 32
PEER: Final = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}
SPREAD: Final = [
    {
        "maxSkew": 2,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "tierlog"}},
    }
]


def _each(values: Values) -> Values:
    return {name: copy.deepcopy(values) for name in COMPONENTS}


SWITCHES: Final[dict[str, Values]] = {
    "settings-file": {"config": {"existingSecret": "tierlog-settings", "key": "own.toml"}},
    "s3-keys": {"s3": {"existingSecret": "s3", "accessKeyKey": "id", "secretKeyKey": "key"}},
    "redis-password": {"redis": {"existingSecret": "redis"}},
    "ledger-keys": {
        "ledgerKeys": {"existingSecret": "keys"},
    },
    "workload-identity": {
        name: {"serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1"}}}
        for name in ("reader", "offloader", "scheduler")
    },
    "given-accounts": _each({"serviceAccount": {"create": False, "name": "given"}}),
    "no-network-policy": {"networkPolicy": {"enabled": False}},
    "narrow-network": {
        "networkPolicy": {
            "clients": [PEER],
            "monitoring": [PEER],
            "s3": {"ports": [443, 8333], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
            "zookeeper": {"to": [PEER]},
        }
    },
    "service-monitor": {"monitoring": {"serviceMonitor": {"enabled": True, "labels": {"a": "b"}}}},
    "prometheus-rule": {"monitoring": {"prometheusRule": {"enabled": True}}},
    "runbooks": {
        "monitoring": {
            "prometheusRule": {"enabled": True, "runbookBaseUrl": "https://wiki.example/tierlog/"}
        }
    },
    "dashboards": {"monitoring": {"dashboards": {"enabled": True, "annotations": {"f": "g"}}}},
    "keda-sasl": {
        "offloader": {"keda": {"enabled": True, "kafkaAuthentication": "kafka"}},
        "settings": {"kafka": {"sasl": {"mechanism": "SCRAM-SHA-512", "username": "tierlog"}}},
    },
    "hpa": {"reader": {"autoscaling": {"enabled": True, "maxReplicas": 20}}},
    "keda": {"offloader": {"keda": {"enabled": True}}},
    "keda-ages": {
        "offloader": {"keda": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}},
        "settings": {"kafka": {"topic_prefix": "other", "offloader_group": "workers"}},
    },
    "no-pdb": _each({"pdb": {"create": False}}),
    "pdb-share": _each({"pdb": {"maxUnavailable": "25%"}}),
    "no-spread": _each({"topologySpread": {"enabled": False}}),
    "own-spread": _each({"topologySpreadConstraints": SPREAD}),
    "placed": _each(
        {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "storage", "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "high",
            "affinity": {"podAntiAffinity": {}},
        }
    ),
    "digests": _each({"image": {"digest": DIGEST}}),
    "mirror": {
        "image": {
            "registry": "registry.example:5000/mirror",
            "repositoryPrefix": "logs/tierlog-",
            "tag": "1.2.3",
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "mirror"}],
        }
    },
    "platform-uids": {"podSecurity": {"runAsUser": None, "fsGroup": None}},
    "named": {"fullnameOverride": "a-name-that-is-much-longer-than-forty-characters-are"},
    "labelled": {"commonLabels": {"team": "storage"}, **_each({"podLabels": {"tier": "data"}})},
    "one-node": {
        "ingest": {"replicaCount": 1},
        "settings": {"ingest": {"owner": {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}}},
    },
    "many-nodes": {"ingest": {"replicaCount": 9, "terminationGracePeriodSeconds": 120}},
    "fast-disks": {
        "ingest": {
            "persistence": {
                "journal": {"size": "50Gi", "storageClass": "nvme", "annotations": {"x": "y"}},
                "ledgers": {"size": "1.5Ti", "storageClass": "hdd"},
                "retentionPolicy": {"whenDeleted": "Delete"},
            }
        }
    },
    "large-numbers": {
        "settings": {
            "reader": {"cache_bytes_max": 68719476736, "response_bytes_max": 16777216},
            "ingest": {"storage": {"journal_segment_bytes": 134217728}},
            "offloader": {"memory_bytes_max": 2147483648, "drain_s_max": 90.5},
        }
    },
    "odd-texts": {
        "settings": {
            "s3": {
                "key_prefix": 'logs/"quoted" $(HOME) {{ x }}: #',
                "endpoint_url": "https://s3:1",
            },
            "log": {"level": "debug"},
            "ingest": {"replication": {"enabled": False}},
        }
    },
    "extras": _each(
        {
            "extraEnv": [{"name": "AWS_REGION", "value": "eu-west-1"}],
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
            "podAnnotations": {"sidecar.istio.io/inject": "false"},
        }
    ),
    "spark-jobs": {
        "spark": {
            "jobs": {
                "export": {
                    "schedule": "17 * * * *",
                    "args": ["export", "orders", "--to", "s3://exports/tierlog"],
                },
                "usage-night": {"schedule": "0 3 * * *", "args": ["usage"], "suspend": True},
            },
            "cores": 4,
            "memory": "2G",
            "token": {"existingSecret": "jobs"},
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::2"}},
            "extraVolumes": [{"name": "out", "persistentVolumeClaim": {"claimName": "out"}}],
            "extraVolumeMounts": [{"name": "out", "mountPath": "/out"}],
        }
    },
    "certificates-of-services": {
        "security": {"jwks": {"existingSecret": ""}},
        "monitoring": {
            "serviceMonitor": {"enabled": True, "certificate": {"existingSecret": "prometheus"}}
        },
        "settings": {
            "security": {
                "tls": {"client_certificates": "required"},
                "grants": [
                    {"subject": "certificate:tierlog", "roles": ["service"], "streams": ["*"]}
                ],
                "plain_text_to": ["kafka", "zookeeper"],
            },
            "zookeeper": {"tls": {"enabled": False}},
        },
    },
    "tokens": {
        "security": {"token": {"existingSecret": "service", "key": "jwt"}},
        "test": {"token": {"existingSecret": "smoke"}},
        "monitoring": {
            "serviceMonitor": {
                "enabled": True,
                "serverName": "tierlog",
                "token": {"existingSecret": "prometheus"},
            }
        },
    },
    "no-smoke": {"test": {"enabled": False}},
    "no-pause": _each({"preStopSeconds": 0, "terminationGracePeriodSeconds": 45}),
    "open": {"settings": {"security": {"mode": "open"}}, "wire": {"existingSecret": "wire"}},
}

EXCLUSIVE: Final = (
    {"no-network-policy", "narrow-network"},
    {"prometheus-rule", "runbooks"},
    {"keda", "keda-ages"},
    {"no-pdb", "pdb-share"},
    {"no-spread", "own-spread"},
    {"one-node", "many-nodes"},
    {"workload-identity", "given-accounts"},
    {"many-nodes", "no-pause"},
    {"open", "certificates-of-services"},
    {"open", "tokens"},
)


def merged(parts: list[Values]) -> Values:
    """Put values over each other, as helm does with several files."""
    whole: Values = {}
    for part in parts:
        _over(whole, copy.deepcopy(part))
    return whole


def _over(below: Values, above: Values) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _over(below[key], value)
        else:
            below[key] = value


def _agree(names: list[str]) -> list[str]:
    kept: list[str] = []
    for name in names:
        if not any(name in pair and pair & set(kept) for pair in EXCLUSIVE):
            kept.append(name)
    return kept


def matrix() -> dict[str, Values]:
    """Return all of them by name."""
    found: dict[str, Values] = {"defaults": {}, **SWITCHES}
    everything = _agree(list(SWITCHES))
    found["everything"] = merged([SWITCHES[name] for name in everything])
    chance = random.Random(1)
    for number in range(MIXTURES):
        names = chance.sample(list(SWITCHES), k=chance.randint(3, 12))
        found[f"mixture-{number}"] = merged([SWITCHES[name] for name in _agree(names)])
    return found


MATRIX: Final = matrix()
