"""Certificates and tokens for tests, made by the test that needs them; nothing of it is kept."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.tokens import JwksVerifier
from tierlog.model.access import Grant, Role
from tierlog.ports.clock import Clock
from tierlog.runtime.access import Gate
from tierlog.runtime.security import TlsFiles

DAY: Final = dt.timedelta(days=1)
ISSUER: Final = "https://issuer.test"
AUDIENCE: Final = "tierlog"


class Issued(NamedTuple):
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        signed = own.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        dns: tuple[str, ...] = ("localhost",),
        addresses: tuple[str, ...] = ("127.0.0.1",),
        uris: tuple[str, ...] = (),
        file: str | None = None,
    ) -> Issued:
        """Write a certificate; ``name`` is its common name, and the files' unless said."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.DNSName(one) for one in dns]
        names += [x509.IPAddress(ipaddress.ip_address(one)) for one in addresses]
        names += [x509.UniformResourceIdentifier(one) for one in uris]
        builder = self._builder(subject, key.public_key())
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        stem = file or name
        issued = Issued(self.folder / f"{stem}.crt", self.folder / f"{stem}.key")
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        issued.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return issued

    def files(self, issued: Issued | None = None) -> TlsFiles:
        """Return what a process is given."""
        if issued is None:
            return TlsFiles(ca=self.file)
        return TlsFiles(certificate=issued.certificate, key=issued.key, ca=self.file)

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )


class Issuer:
    """Signs tokens, and publishes the keys that verify them."""

    def __init__(self, file: Path, *kids: str) -> None:
        self.file = file
        self.keys: dict[str, Any] = {}
        for kid in kids or ("k1",):
            self.add(kid)
        self.publish()

    def add(self, kid: str, *, kind: str = "ES256") -> None:
        """Make a key that is not published yet."""
        if kind == "ES256":
            self.keys[kid] = ec.generate_private_key(ec.SECP256R1())
        else:
            self.keys[kid] = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def publish(self, *kids: str) -> None:
        """Write the public keys of these ids, or of all."""
        listed = [self.public(kid) for kid in kids or self.keys]
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps({"keys": listed}), encoding="utf-8")
        beside.replace(self.file)

    def public(self, kid: str) -> dict[str, Any]:
        """Return one key as it is published."""
        key = self.keys[kid].public_key()
        kind = jwt.algorithms.ECAlgorithm if self._is_ec(kid) else jwt.algorithms.RSAAlgorithm
        return {**kind.to_jwk(key, as_dict=True), "kid": kid, "use": "sig", "alg": self.alg(kid)}

    def public_pem(self, kid: str) -> bytes:
        """Return one key as text, as everybody has it."""
        pem: bytes = (
            self.keys[kid]
            .public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return pem

    def alg(self, kid: str) -> str:
        """Return what a key is for."""
        return "ES256" if self._is_ec(kid) else "RS256"

    def _is_ec(self, kid: str) -> bool:
        return isinstance(self.keys[kid], ec.EllipticCurvePrivateKey)

    def token(
        self,
        sub: str = "alice",
        *,
        roles: tuple[str, ...] = (),
        streams: tuple[str, ...] = (),
        kid: str = "k1",
        header: dict[str, Any] | None = None,
        **changes: Any,
    ) -> str:
        """Return a token; ``changes`` are claims, and None takes one away."""
        claims = claims_of(sub, roles=roles, streams=streams) | changes
        claims = {name: value for name, value in claims.items() if value is not None}
        headers = {"kid": kid, **(header or {})}
        return jwt.encode(claims, self.keys[kid], algorithm=self.alg(kid), headers=headers)

    def verifier(self, **changes: Any) -> JwksVerifier:
        """Return what believes this issuer."""
        given: dict[str, Any] = {
            "issuer": ISSUER,
            "audience": AUDIENCE,
            "algorithms": ("ES256", "RS256"),
            "leeway_s": 5.0,
            "lifetime_s_max": 86_400.0,
            "roles_claim": "tierlog_roles",
            "streams_claim": "tierlog_streams",
        }
        return JwksVerifier(self.file, **given | changes)


def claims_of(sub: str, *, roles: tuple[str, ...] = (), streams: tuple[str, ...] = ()) -> Any:
    """Return claims that are good for an hour."""
    now = int(time.time())
    return {
        "sub": sub,
        "iss": ISSUER,
        "aud": AUDIENCE,
        "iat": now,
        "exp": now + 3600,
        "tierlog_roles": list(roles),
        "tierlog_streams": list(streams),
    }


def gate_of(
    issuer: Issuer | None = None,
    grants: dict[str, Grant] | None = None,
    *,
    actions_per_s: float = 1000.0,
    clock: Clock | None = None,
) -> Gate:
    """Return a gate."""
    return Gate(
        grants=grants or {},
        verifier=issuer.verifier() if issuer is not None else None,
        clock=clock or SimClock(),
        actions_per_s=actions_per_s,
    )


def grant(*roles: Role, streams: tuple[str, ...] = ("*",)) -> Grant:
    """Return a grant."""
    return Grant(roles=frozenset(roles), streams=streams)
