"""The profile `restricted` of Kubernetes' Pod Security Standards, and rules of our own beside it.

Pure: a pod in, what it breaks out. The rules are those of the standard's table (volume types,
privilege escalation, running as non-root, seccomp, capabilities, and all of `baseline`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

Object = dict[str, Any]

VOLUMES: Final = frozenset(
    {
        "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
        "projected", "secret",
    }
)  # fmt: skip
SECCOMP: Final = frozenset({"RuntimeDefault", "Localhost"})
CAPABILITIES_TO_ADD: Final = frozenset({"NET_BIND_SERVICE"})
HOST: Final = ("hostNetwork", "hostPID", "hostIPC")
CONTAINERS: Final = ("initContainers", "containers", "ephemeralContainers")


def broken(pod: Object) -> list[str]:
    """Return each rule that a pod breaks."""
    return [*_of_the_standard(pod["spec"]), *_of_our_own(pod["spec"])]


def _of_the_standard(spec: Object) -> Iterator[str]:
    context = spec.get("securityContext", {})
    yield from (f"{name} is set" for name in HOST if spec.get(name))
    if context.get("sysctls"):
        yield "sysctls are set"
    if spec.get("hostUsers") is False:
        yield "hostUsers: false changes what is checked"
    for volume in spec.get("volumes", []):
        foreign = set(volume) - VOLUMES - {"name"}
        if foreign or len(volume) != 2:
            yield f"volume {volume.get('name')} is {sorted(foreign) or 'of no type'}"
    for kind in CONTAINERS:
        for one in spec.get(kind, []):
            for text in _container(one, context):
                yield f"{one['name']}: {text}"


def _container(container: Object, of_pod: Object) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", [])) - CAPABILITIES_TO_ADD:
        yield "capabilities are added"
    if own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
        yield "may run as root"
    if own.get("runAsUser", of_pod.get("runAsUser")) == 0:
        yield "runs as root"
    seccomp = own.get("seccompProfile", of_pod.get("seccompProfile", {}))
    if seccomp.get("type") not in SECCOMP:
        yield "has no seccomp profile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount is set"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "has a host port"


def _of_our_own(spec: Object) -> Iterator[str]:
    if spec.get("automountServiceAccountToken") is not False:
        yield "a token of the service account is mounted"
    if spec.get("enableServiceLinks") is not False:
        yield "service links are on, which read like settings"
    for one in spec["containers"]:
        own, resources = one.get("securityContext", {}), one.get("resources", {})
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{one['name']}: the root file system can be written to"
        if not resources.get("requests") or "memory" not in resources.get("limits", {}):
            yield f"{one['name']}: no requests, or no limit of memory"
        if not one["image"].rpartition(":")[2] or one["image"].endswith(":latest"):
            yield f"{one['name']}: an image without a version"
        for variable in one.get("env", []):
            if "SECRET" in variable["name"] and "value" in variable:
                yield f"{one['name']}: a secret by value, {variable['name']}"
