"""Whether a service may start as it is set up: what would be open, or reached in plain text.

Invariant: what is refused is said with the setting's name, before anything listens or connects.
"""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import Settings

OUTER_SYSTEMS: Final[Mapping[str, tuple[str, ...]]] = {
    "ingest": ("zookeeper",),
    "reader": ("zookeeper", "redis"),
    "offloader": ("zookeeper", "kafka"),
    "scheduler": ("zookeeper", "kafka"),
}
_OPEN: Final = (
    "or, on one machine that nobody else reaches, set TIERLOG_SECURITY__MODE=open "
    "(docs/how-to/secure-a-deployment.md)"
)
# Names and addresses at which clouds tell their machines' credentials.
_METADATA_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "instance-data"})
_METADATA_ADDRESSES: Final = frozenset({"fd00:ec2::254", "100.100.100.200"})


def check_security(settings: Settings, service: str) -> None:
    """Return if ``service`` may start so, or raise ``RefusedError``."""
    if settings.security.mode == "open":
        if settings.profile == "production":
            raise RefusedError(
                "security.mode is open, and profile is production",
                remedy="Set TIERLOG_SECURITY__MODE=enforced with certificates, and tokens or "
                "client certificates; or another TIERLOG_PROFILE",
            )
        return
    _check_own(settings)
    for system in OUTER_SYSTEMS.get(service, ()):
        _check_outer(settings, system)
    _check_collector(settings)
    check_endpoint(settings.s3.endpoint_url, production=settings.profile == "production")
    _check_store(settings)


def _check_own(settings: Settings) -> None:
    security = settings.security
    if security.tls.certificate_file is None:
        raise RefusedError(
            "security is enforced, and security.tls.certificate_file is not set",
            remedy=f"Set TIERLOG_SECURITY__TLS__CERTIFICATE_FILE and …__KEY_FILE, {_OPEN}",
        )
    if security.jwt.jwks_file is None and security.tls.client_certificates == "none":
        raise RefusedError(
            "security is enforced, and nobody could say who it is",
            remedy="Set TIERLOG_SECURITY__JWT__JWKS_FILE, or "
            f"TIERLOG_SECURITY__TLS__CLIENT_CERTIFICATES=required, {_OPEN}",
        )
    if settings.wire.token is not None:
        raise RefusedError(
            "wire.token is a secret of the open mode, and security is enforced",
            remedy="Take TIERLOG_WIRE__TOKEN away; callers show security.token_file, or a "
            "certificate",
        )


def _check_outer(settings: Settings, system: str) -> None:
    encrypted = {
        "zookeeper": settings.zookeeper.tls.enabled,
        "kafka": settings.kafka.tls.enabled,
        "redis": settings.redis.url is None
        or settings.redis.tls.enabled
        or settings.redis.url.startswith("rediss://"),
    }[system]
    if not encrypted and system not in settings.security.plain_text_to:
        raise RefusedError(
            f"security is enforced, and {system} is reached in plain text",
            remedy=f"Set TIERLOG_{system.upper()}__TLS__ENABLED=true; where something else "
            f"encrypts, name {system} in TIERLOG_SECURITY__PLAIN_TEXT_TO; {_OPEN}",
        )


def _check_store(settings: Settings) -> None:
    """Refuse to send entries past everybody on the way: signatures hide nothing."""
    url = settings.s3.endpoint_url
    if not url or _is_safe(url) or "s3" in settings.security.plain_text_to:
        return
    raise RefusedError(
        "security is enforced, and s3 is reached in plain text",
        remedy="Set TIERLOG_S3__ENDPOINT_URL to an https address; where something else encrypts, "
        f"name s3 in TIERLOG_SECURITY__PLAIN_TEXT_TO; {_OPEN}",
    )


def _is_safe(url: str) -> bool:
    """Tell whether nobody can listen on the way: TLS, or this machine alone."""
    parts = urlsplit(url)
    address = _address_of(parts.hostname or "")
    is_here = parts.hostname == "localhost" or (address is not None and address.is_loopback)
    return parts.scheme == "https" or is_here


def _check_collector(settings: Settings) -> None:
    """Refuse to send what a collector alone may see past everybody on the way."""
    tracing = settings.tracing
    if not tracing.enabled or tracing.headers is None:
        return
    if _is_safe(tracing.endpoint_url) or "collector" in settings.security.plain_text_to:
        return
    raise RefusedError(
        "security is enforced, and tracing.headers would be sent in plain text",
        remedy="Set TIERLOG_TRACING__ENDPOINT_URL to an https address; where something else "
        f"encrypts, name collector in TIERLOG_SECURITY__PLAIN_TEXT_TO; {_OPEN}",
    )


def check_endpoint(url: str | None, *, production: bool) -> None:
    """Refuse an object store's endpoint that is where a machine's own secrets are told."""
    if url is None:
        return
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    if host in _METADATA_NAMES or _is_forbidden(host, production=production):
        raise RefusedError(
            f"s3.endpoint_url names {host}, which is no object store's address",
            remedy="Set TIERLOG_S3__ENDPOINT_URL to the store's own address",
        )
    if production and host == "localhost":
        raise RefusedError(
            "s3.endpoint_url names this machine itself, and profile is production",
            remedy="Set TIERLOG_S3__ENDPOINT_URL to the store's own address",
        )


def _is_forbidden(host: str, *, production: bool) -> bool:
    address = _address_of(host)
    return address is not None and (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or str(address) in _METADATA_ADDRESSES
        or (production and address.is_loopback)
    )


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is, in any form that resolvers take for one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:  # 2852039166, 0xa9fea9fe and 169.254.43518 are 169.254.169.254, too
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
