"""``python -m tierlog.runtime.probe SERVICE``: whether the service beside this process is ready.

For the health check of a container, which has the service's own environment: the port, whether
there is TLS and which certificate is to be shown are what the settings say, of the service as of
this. Settings that were given to the service as arguments are not seen here.

Exits with 0 if it is ready, with 1 if not, and says what ``/readyz?verbose`` does.

Invariant: over TLS nothing but the service's own certificate is believed, by one of its names.
"""

import os
import socket
import ssl
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from tierlog.model.errors import RefusedError, TierlogError
from tierlog.runtime.settings import Settings, load_settings

SERVICES: Final = ("ingest", "offloader", "reader", "scheduler")
ANSWER_S_MAX: Final = 4.0
ANSWER_BYTES_MAX: Final = 64 * 1024
_ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - what is listened on, not by this


def ask(settings: Settings, service: str) -> tuple[bool, str]:
    """Return whether a service of these settings is ready, and what it says."""
    listen = getattr(settings, service).listen
    if not listen.http_port:
        raise RefusedError(
            f"{service}.listen.http_port is 0, so any port may be the service's",
            remedy=f"Set TIERLOG_{service.upper()}__LISTEN__HTTP_PORT",
        )
    host = "127.0.0.1" if listen.host == _ANY_ADDRESS else listen.host
    connection = HTTPConnection(host, listen.http_port, timeout=ANSWER_S_MAX)
    try:
        connection.connect()
        certificate = settings.security.tls.certificate_file
        if settings.security.mode != "open" and certificate is not None:
            connection.sock = _over_tls(connection.sock, certificate)
        connection.request("GET", "/readyz?verbose")
        answer = connection.getresponse()
        return answer.status == 200, answer.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
    finally:
        connection.close()


def _over_tls(plain: socket.socket, certificate: Path) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context.wrap_socket(plain, server_hostname=_name_in(certificate))


def _name_in(certificate: Path) -> str:
    """Return a name that clients may call the service by."""
    from cryptography import x509  # noqa: PLC0415 - comes with what verifies tokens

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    hosts = [
        *(name.replace("*", "probe") for name in names.get_values_for_type(x509.DNSName)),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    ]
    if not hosts:
        raise RefusedError(
            f"{certificate} names no host", remedy="Have one issued with the services' names"
        )
    return hosts[0]


def main(arguments: Sequence[str]) -> int:
    """Ask once, and return the exit code."""
    if len(arguments) != 1 or arguments[0] not in SERVICES:
        print(f"usage: python -m tierlog.runtime.probe {'|'.join(SERVICES)}")  # noqa: T201
        return 2
    config_file = os.environ.get("TIERLOG_CONFIG")
    try:
        settings = load_settings(Path(config_file) if config_file else None)
        is_ready, told = ask(settings, arguments[0])
    except (TierlogError, OSError, HTTPException) as error:
        is_ready, told = False, str(error) or type(error).__name__
    print(told)  # noqa: T201
    return 0 if is_ready else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
