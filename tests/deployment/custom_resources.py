"""Checks of the objects that Kubernetes itself has no schema for, field by field.

After the definitions of the Prometheus operator (v1) and KEDA (v1alpha1): the fields that the
chart uses, closed, so that a misspelt one is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Object = dict[str, Any]


def _fields(one: Object, *, needs: str, may: str = "") -> None:
    needed, found = set(needs.split()), set(one)
    assert needed <= found, f"{needed - found} are missing"
    assert found <= needed | set(may.split()), f"{found - needed} are unknown"


def _head(one: Object, version: str) -> Object:
    _fields(one, needs="apiVersion kind metadata spec")
    assert one["apiVersion"] == version
    spec: Object = one["spec"]
    return spec


def service_monitor(one: Object) -> None:
    """Check a ServiceMonitor."""
    spec = _head(one, "monitoring.coreos.com/v1")
    _fields(spec, needs="selector endpoints", may="namespaceSelector jobLabel")
    _fields(spec["selector"], needs="matchLabels")
    for endpoint in spec["endpoints"]:
        _fields(
            endpoint, needs="port", may="path interval relabelings scheme tlsConfig authorization"
        )
        if "tlsConfig" in endpoint:
            tls = endpoint["tlsConfig"]
            _fields(tls, needs="ca serverName", may="cert keySecret")
            assert ("cert" in tls) == ("keySecret" in tls)
            for kind in {"ca", "cert"} & set(tls):
                _fields(tls[kind], needs="secret")
                _fields(tls[kind]["secret"], needs="name key")
            _fields(tls.get("keySecret", {"name": "", "key": ""}), needs="name key")
        if "authorization" in endpoint:
            _fields(endpoint["authorization"], needs="credentials")
            _fields(endpoint["authorization"]["credentials"], needs="name key")
        for rule in endpoint.get("relabelings", []):
            _fields(rule, needs="sourceLabels targetLabel")


def prometheus_rule(one: Object) -> None:
    """Check a PrometheusRule."""
    spec = _head(one, "monitoring.coreos.com/v1")
    _fields(spec, needs="groups")
    assert spec["groups"]
    for group in spec["groups"]:
        _fields(group, needs="name rules")
        for rule in group["rules"]:
            _fields(rule, needs="alert expr for labels annotations")
            _fields(rule["annotations"], needs="summary runbook", may="runbook_url")


def scaled_object(one: Object) -> None:
    """Check a ScaledObject."""
    spec = _head(one, "keda.sh/v1alpha1")
    _fields(
        spec,
        needs="scaleTargetRef triggers minReplicaCount maxReplicaCount",
        may="pollingInterval cooldownPeriod advanced",
    )
    scaler = spec["advanced"]["horizontalPodAutoscalerConfig"]
    _fields(scaler["behavior"]["scaleDown"], needs="stabilizationWindowSeconds")
    for trigger in spec["triggers"]:
        _fields(trigger, needs="type metadata", may="authenticationRef")
        _fields(trigger.get("authenticationRef", {"name": ""}), needs="name")
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        if trigger["type"] == "kafka":
            _fields(
                trigger["metadata"],
                needs="bootstrapServers consumerGroup topic lagThreshold",
                may="activationLagThreshold limitToPartitionsWithLag tls sasl",
            )
        else:
            assert trigger["type"] == "prometheus"
            _fields(
                trigger["metadata"], needs="serverAddress query threshold", may="ignoreNullValues"
            )


SCHEMAS: Final[Mapping[str, Callable[[Object], None]]] = {
    "ServiceMonitor": service_monitor,
    "PrometheusRule": prometheus_rule,
    "ScaledObject": scaled_object,
}
