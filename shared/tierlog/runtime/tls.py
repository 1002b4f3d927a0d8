"""TLS of everything that listens and calls: contexts of files that may change meanwhile.

Owns which versions and checks there are. Names are checked, and nothing is accepted unverified:
there is no setting that would change that.

Invariants:
    * A handshake is made with the files as they are when it begins: certificate, key and the
      authorities that others are verified by.
    * A client verifies the server's name before it shows anything of itself but a certificate.
"""

import ssl
from asyncio import BaseTransport
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from tierlog.runtime.reloading import Reloading
from tierlog.runtime.security import TlsFiles

_NAME_KINDS: Final = ("URI", "DNS")


class ServerTls:
    """What a process listens with."""

    def __init__(self, files: TlsFiles, *, client_certificates: bool) -> None:
        assert files.certificate is not None
        assert files.key is not None
        self._files = files
        self._client_certificates = client_certificates
        self._pem = Reloading(files.all, self._read, what="the server's certificate")

    def __repr__(self) -> str:
        asked = "with" if self._client_certificates else "without"
        return f"<ServerTls {self._files.certificate} {asked} client certificates>"

    def context(self, *, required: bool) -> ssl.SSLContext:
        """Return a context for listening.

        ``required``: clients need a certificate, where they are asked for one at all. Else one
        without may say who it is in another way: what probes a process has none.
        """
        current = Reloading(
            self._files.all, lambda: self._make(required=required), what="the server's context"
        )
        outer = self._make(required=required)

        def choose(sslobj: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            sslobj.context = current.get()

        # Called for clients that name nobody, too.
        outer.sni_callback = choose
        return outer

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the same for gRPC, whose clients all need a certificate when any does."""
        seen = 0

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            pem = self._pem.get()
            if seen == self._pem.generation:
                return None
            seen = self._pem.generation
            return _grpc_configuration(pem, client_certificates=self._client_certificates)

        first = fetch()
        assert first is not None
        return grpc.dynamic_ssl_server_credentials(
            first,
            fetch,  # type: ignore[arg-type]  # None says that nothing has changed
            require_client_authentication=self._client_certificates,
        )

    def _make(self, *, required: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        assert self._files.certificate is not None
        context.load_cert_chain(self._files.certificate, self._files.key)
        # A session that is resumed would be verified by the authorities of an earlier day.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        if self._client_certificates:
            context.load_verify_locations(self._files.ca)
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        return context

    def _read(self) -> "_Pem":
        self._make(required=True)  # refuses a key that is not the certificate's
        return _Pem.of(self._files)


class ClientTls:
    """What a process calls others with. Without authorities, those of the system are trusted."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._contexts = Reloading(files.all, self._make, what="the client's context")
        self._pem = Reloading(files.all, lambda: _Pem.of(files), what="the client's certificate")

    def __repr__(self) -> str:
        return f"<ClientTls {self._files}>"

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        return self._contexts.get()

    def grpc_credentials(self) -> tuple[grpc.ChannelCredentials, int]:
        """Return credentials for the next channel, and their number."""
        pem = self._pem.get()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        return credentials, self._pem.generation

    def generation(self) -> int:
        """Return the number of the credentials that are the present ones."""
        self._pem.get()
        return self._pem.generation

    def _make(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._files.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._files.certificate is not None:
            context.load_cert_chain(self._files.certificate, self._files.key)
        return context


@dataclass(frozen=True, slots=True)
class _Pem:
    certificate: bytes | None
    key: bytes | None
    ca: bytes | None

    def __repr__(self) -> str:
        return "<_Pem>"  # never the key

    @classmethod
    def of(cls, files: TlsFiles) -> "_Pem":
        read = [
            file.read_bytes() if file is not None else None
            for file in (files.certificate, files.key, files.ca)
        ]
        return cls(*read)


def _grpc_configuration(
    pem: _Pem, *, client_certificates: bool
) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.certificate)], root_certificates=pem.ca if client_certificates else None
    )


def peer_names(transport: BaseTransport) -> Sequence[str]:
    """Return the names in the certificate of the other side, which the handshake has verified."""
    found = transport.get_extra_info("ssl_object")
    certificate: Mapping[str, Any] = (found.getpeercert() if found is not None else None) or {}
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in _NAME_KINDS]
    for part in certificate.get("subject", ()):
        names += [value for kind, value in part if kind == "commonName"]
    return names
