"""Security from settings: how this process calls services, and how it is called."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc

from tierlog.adapters.system import SystemClock
from tierlog.model.access import Rules
from tierlog.model.errors import RefusedError
from tierlog.ports.access import TokenVerifier
from tierlog.runtime.access import Gate
from tierlog.runtime.calling import Calling
from tierlog.runtime.clusters import KnownCluster
from tierlog.runtime.reloading import Reloading, secret_of
from tierlog.runtime.rpc_access import AccessInterceptor
from tierlog.runtime.security import JwtSettings, SecuritySettings
from tierlog.runtime.settings import Settings
from tierlog.runtime.tls import ClientTls, ServerTls
from tierlog.runtime.wire_access import GateAuthenticator
from tierlog.wire.auth import Authenticator, OpenAuthenticator, TokenAuthenticator
from tierlog.wire.messages import AUTH_JWT, AUTH_TOKEN, Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What a service listens behind; without a gate everybody may do everything."""

    gate: Gate | None
    tls: ServerTls | None
    authenticator: Authenticator
    """Of the wire."""

    def interceptor(self, rules: Rules) -> grpc.aio.ServerInterceptor | None:
        """Return what is asked before each call of gRPC."""
        return AccessInterceptor(rules, self.gate) if self.gate is not None else None


def calling_of(security: SecuritySettings) -> Calling:
    """Return how services are called, of the cluster that the first answer is from."""
    if not security.calls_with_tls:
        return Calling(cluster=KnownCluster())
    return Calling(
        tls=ClientTls(security.tls.files), token=_token_of(security), cluster=KnownCluster()
    )


def _token_of(security: SecuritySettings) -> Callable[[], str] | None:
    if security.token is not None:
        return security.token.get_secret_value
    if security.token_file is None:
        return None
    return Reloading(
        [security.token_file], partial(secret_of, security.token_file), what="the token"
    ).get


def wire_credentials(settings: Settings, calling: Calling) -> Callable[[], Credentials]:
    """Return what gives the credentials of the next HELLO."""
    token, shared = calling.token, settings.wire.token
    if token is not None:
        return lambda: Credentials(method=AUTH_JWT, data=token().encode())
    if shared is not None and calling.tls is None:
        data = shared.get_secret_value().encode()
        return lambda: Credentials(method=AUTH_TOKEN, data=data)
    return Credentials


def protection_of(settings: Settings) -> Protection:
    """Return what a service listens behind. Open it is only where the settings say so."""
    security = settings.security
    if security.mode == "open":
        return Protection(gate=None, tls=None, authenticator=_open_authenticator(settings))
    if security.tls.certificate_file is None:
        raise RefusedError(
            "security is enforced, and security.tls.certificate_file is not set",
            remedy="Set it with key_file, or security.mode to open",
        )
    gate = Gate(
        grants={one.subject: one.grant for one in security.grants},
        verifier=_verifier(security.jwt),
        clock=SystemClock(),
        actions_per_s=security.actions_per_s,
    )
    return Protection(
        gate=gate,
        tls=ServerTls(
            security.tls.files,
            client_certificates=security.tls.client_certificates == "required",
        ),
        authenticator=GateAuthenticator(gate),
    )


def _open_authenticator(settings: Settings) -> Authenticator:
    token = settings.wire.token
    if token is None:
        return OpenAuthenticator()
    return TokenAuthenticator(token.get_secret_value().encode())


def _verifier(settings: JwtSettings) -> TokenVerifier | None:
    if settings.jwks_file is None:
        return None
    from tierlog.adapters.tokens import JwksVerifier

    return JwksVerifier(
        settings.jwks_file,
        issuer=settings.issuer,
        audience=settings.audience,
        algorithms=settings.algorithms,
        leeway_s=settings.leeway_s,
        lifetime_s_max=settings.lifetime_s_max,
        roles_claim=settings.roles_claim,
        streams_claim=settings.streams_claim,
    )
