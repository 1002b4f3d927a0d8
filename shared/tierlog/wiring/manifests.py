"""Manifests in the bucket of a service."""

from tierlog.model.node import Cluster
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import system_clock, system_ids


def manifest_store(settings: Settings, objects: ObjectStore, cluster: Cluster) -> ManifestStore:
    """Return the manifests of a cluster, where its objects are."""
    return ManifestStore(
        objects,
        cluster_id=cluster.cluster_id,
        clock=system_clock(),
        ids=system_ids(),
        key_prefix=settings.s3.key_prefix,
    )
