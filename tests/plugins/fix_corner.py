"""A corner of the real servers that is one test's alone, as settings of the services."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from tierlog.runtime.settings import (
    KafkaSettings,
    S3Settings,
    Settings,
    ZooKeeperSettings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierlog.embedded.supervisor import EmbeddedServers


@pytest.fixture
def zookeeper_corner(servers: EmbeddedServers) -> str:
    """ZooKeeper's address with a root of one's own, which who connects first makes."""
    return f"{servers.endpoints.zookeeper_hosts}/corner-{uuid.uuid4()}"


@pytest.fixture
def corner(servers: EmbeddedServers) -> Settings:
    """Settings with a ZooKeeper root, topics, consumer group and key prefix of their own."""
    where, name = servers.endpoints, f"corner-{uuid.uuid4()}"
    return Settings(
        s3=S3Settings(
            endpoint_url=where.s3_endpoint_url,
            access_key=where.s3_access_key,
            secret_key=SecretStr(where.s3_secret_key),
            bucket=where.s3_bucket,
            key_prefix=name,
        ),
        zookeeper=ZooKeeperSettings(hosts=f"{where.zookeeper_hosts}/{name}"),
        kafka=KafkaSettings(
            bootstrap_servers=where.kafka_bootstrap,
            topic_prefix=name,
            offloader_group=name,
            partitions=2,
        ),
    )


def environment_of(settings: Settings) -> Mapping[str, str]:
    """Return the environment that gives a service process the settings of ``corner``."""
    assert settings.s3.secret_key is not None
    return {
        "TIERLOG_S3__ENDPOINT_URL": settings.s3.endpoint_url or "",
        "TIERLOG_S3__ACCESS_KEY": settings.s3.access_key or "",
        "TIERLOG_S3__SECRET_KEY": settings.s3.secret_key.get_secret_value(),
        "TIERLOG_S3__BUCKET": settings.s3.bucket,
        "TIERLOG_S3__KEY_PREFIX": settings.s3.key_prefix,
        "TIERLOG_ZOOKEEPER__HOSTS": settings.zookeeper.hosts,
        "TIERLOG_KAFKA__BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers,
        "TIERLOG_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "TIERLOG_KAFKA__OFFLOADER_GROUP": settings.kafka.offloader_group,
        "TIERLOG_KAFKA__PARTITIONS": str(settings.kafka.partitions),
    }
