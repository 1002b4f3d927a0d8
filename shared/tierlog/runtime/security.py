"""The sections of security, and what the sections of outer systems have of it.

Invariant: a secret is a ``SecretStr`` from the environment, or in a file that is named here; none
has a default.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote

from pydantic import Field, SecretStr, model_validator

from tierlog.model.access import Grant, Role
from tierlog.model.errors import RefusedError
from tierlog.runtime.reloading import Reloading, secret_of
from tierlog.runtime.sections import Section

OuterSystem = Literal["collector", "kafka", "redis", "s3", "zookeeper"]
Algorithm = Literal[
    "ES256", "ES384", "ES512", "EdDSA", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512"
]
SubjectName = Annotated[str, Field(pattern="^(token|certificate):[!-~]{1,256}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. ``ca`` has the authorities that the other side is verified by."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def all(self) -> list[Path]:
        """Those that are named."""
        return [one for one in (self.certificate, self.key, self.ca) if one is not None]


class TlsSettings(Section):
    """TLS of the services, and of whoever calls them. Files are read again when they change.

    ``client_certificates``: whether clients need one that an authority of the CA file has signed.
    It then says who they are, unless they show a token too. Probes over HTTP need none.
    """

    certificate_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None
    client_certificates: Literal["none", "required"] = "none"

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together")
        if self.client_certificates == "required" and self.ca_file is None:
            raise ValueError("client_certificates are verified by ca_file, which is not set")
        return self

    @property
    def files(self) -> TlsFiles:
        """The files as one value."""
        return TlsFiles(certificate=self.certificate_file, key=self.key_file, ca=self.ca_file)


class JwtSettings(Section):
    """Tokens that an issuer signs (JWT). Keys are those of a file in the form of a JWKS.

    The file is read again when it changes; a key that leaves it counts no more. Roles and streams
    are lists in claims of these names. Algorithms with shared secrets are not among those there
    are.
    """

    jwks_file: Path | None = None
    issuer: str = ""
    audience: str = "tierlog"
    algorithms: tuple[Algorithm, ...] = ("ES256", "EdDSA", "RS256")
    leeway_s: float = Field(default=30.0, ge=0, le=300)
    lifetime_s_max: float = Field(default=86_400.0, gt=0)
    """A token that was made for longer is refused."""
    roles_claim: str = "tierlog_roles"
    streams_claim: str = "tierlog_streams"

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.jwks_file is not None and not (self.issuer and self.audience and self.algorithms):
            raise ValueError("jwks_file needs issuer, audience and algorithms beside it")
        return self


class GrantSettings(Section):
    """What one subject may: roles, and streams they are for.

    A subject is ``token:`` and a token's sub, or ``certificate:`` and a name in a certificate.
    """

    subject: SubjectName
    roles: tuple[Role, ...]
    streams: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_a_grant(self) -> Self:
        try:
            _ = self.grant
        except RefusedError as error:
            raise ValueError(error.message) from None
        return self

    @property
    def grant(self) -> Grant:
        """The same as a value of the model."""
        return Grant(roles=frozenset(self.roles), streams=self.streams)


class SecuritySettings(Section):
    """Who may call, over what.

    A service is enforced unless its mode is open, which is for one machine that nobody else
    reaches. Without a mode, a client uses TLS where a CA file, a certificate or a token is set.
    """

    mode: Literal["enforced", "open"] | None = None
    tls: TlsSettings = TlsSettings()
    jwt: JwtSettings = JwtSettings()
    grants: tuple[GrantSettings, ...] = ()
    """They come before what tokens say of themselves. A certificate has these alone."""
    token: SecretStr | None = None
    token_file: Path | None = None
    """What this process shows when it calls services; a file is read again when it changes."""
    actions_per_s: float = Field(default=10.0, gt=0)
    """Administrative actions of one subject, at one process."""
    plain_text_to: tuple[OuterSystem, ...] = ()
    """Outer systems that are reached without TLS all the same, since something else encrypts."""

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both set")
        names = [one.subject for one in self.grants]
        if len(names) != len(set(names)):
            raise ValueError("a subject has two grants: put them together")
        return self

    @property
    def calls_with_tls(self) -> bool:
        """Whether services are called over TLS."""
        tls = self.tls
        shown = (tls.ca_file, tls.certificate_file, self.token, self.token_file)
        return self.mode == "enforced" or (self.mode is None and any(one for one in shown))


class OuterTlsSettings(Section):
    """TLS to an outer system. Without a CA file the system's authorities are trusted."""

    enabled: bool = False
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together")
        if not self.enabled and (self.ca_file or self.certificate_file):
            raise ValueError("files of TLS are named, and enabled is not set")
        return self


class SaslSettings(Section):
    """How Kafka is told who this is; none: by its certificate, or not at all."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    username: str = ""
    password: SecretStr | None = None
    password_file: Path | None = None


def apart(values: Any) -> Any:  # noqa: ANN401 - what pydantic was given, of any form
    """Take username and password out of a URL, so that nothing that shows the URL shows them."""
    if not isinstance(values, dict) or not isinstance(values.get("url"), str):
        return values
    scheme, colon, rest = values["url"].partition("://")
    shown, at, place = rest.rpartition("@")
    if not at:
        return values
    username, _, password = shown.partition(":")
    found = {"username": unquote(username), "password": unquote(password)}
    kept = {name: value for name, value in found.items() if value and not values.get(name)}
    return {**values, **kept, "url": f"{scheme}{colon}{place}"}


def secret_text(value: SecretStr | None, file: Path | None, *, name: str) -> str | None:
    """Return a secret of the settings, from the environment or from its file; None: there is none.

    Raises ``RefusedError``, which names the setting and shows nothing of it.
    """
    if value is not None and file is not None:
        raise RefusedError(f"{name} and {name}_file are both set", remedy="Take one of them away")
    if file is not None:
        return Reloading([file], lambda: secret_of(file), what=f"{name}_file").get()
    return value.get_secret_value() if value is not None else None
