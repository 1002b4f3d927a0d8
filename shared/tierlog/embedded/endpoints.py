"""Where the four servers are, whoever runs them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalS3:
    """An S3 server that is not ours; its bucket exists."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str

    def __repr__(self) -> str:
        return f"ExternalS3({self.endpoint_url}, bucket={self.bucket}, access_key=…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalServers:
    """Those of the four servers that somebody else runs; None: ours."""

    s3: ExternalS3 | None = None
    zookeeper: str | None = None  # host:port[,host:port…][/chroot]
    kafka: str | None = None  # host:port[,host:port…]
    redis: str | None = None  # redis://host:port/0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEndpoints:
    """The addresses of all four, as the settings of a service want them."""

    s3_endpoint_url: str
    s3_access_key: str
    s3_secret_key: str
    s3_bucket: str
    zookeeper_hosts: str
    kafka_bootstrap: str
    redis_url: str

    def __repr__(self) -> str:
        return (
            f"ServerEndpoints(s3={self.s3_endpoint_url}/{self.s3_bucket}, "
            f"zookeeper={self.zookeeper_hosts}, kafka={self.kafka_bootstrap}, "
            f"redis={self.redis_url})"
        )
