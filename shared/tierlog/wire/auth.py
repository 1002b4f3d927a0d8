"""Who may speak on the wire. One interface; what stands behind it is chosen in wiring."""

import hmac
from collections.abc import Sequence
from typing import Protocol

from tierlog.model.errors import Reason, RefusedError
from tierlog.wire.messages import AUTH_NONE, AUTH_TOKEN, Credentials


class Authenticator(Protocol):
    """Decides over a HELLO."""

    def check(
        self, credentials: Credentials, *, role: str, peer: str, names: Sequence[str]
    ) -> "Admission":
        """Return what the connection may do, or raise UNAUTHENTICATED or PERMISSION_DENIED.

        ``names`` are those of the peer's certificate, if TLS has verified one.
        """
        ...


class Admission(Protocol):
    """What one connection may do."""

    def authorise(self, stream: str) -> None:
        """Return if it may append to ``stream``, or raise ``RefusedError``.

        Asked once a connection and stream, not with each append.
        """
        ...


class FullAdmission:
    """Everything that the connection's role may send."""

    def authorise(self, stream: str) -> None:
        """Return."""
        del stream


class OpenAuthenticator:
    """Lets everybody in who shows nothing: for loopback and for tests."""

    def check(
        self, credentials: Credentials, *, role: str, peer: str, names: Sequence[str]
    ) -> Admission:
        del role, names
        if credentials.method != AUTH_NONE:
            raise RefusedError(
                f"{peer} authenticates by {credentials.method[:40]!r}, which is not set up here",
                reason=Reason.UNAUTHENTICATED,
                remedy="Set wire.token on both sides, or on neither",
            )
        return FullAdmission()


class TokenAuthenticator:
    """Lets in who knows the shared token."""

    def __init__(self, token: bytes) -> None:
        assert token, "an empty token protects nothing"
        self._token = token

    def check(
        self, credentials: Credentials, *, role: str, peer: str, names: Sequence[str]
    ) -> Admission:
        del role, names
        known = hmac.compare_digest(credentials.data, self._token)
        if credentials.method != AUTH_TOKEN or not known:
            raise RefusedError(
                f"{peer} did not show the token of this cluster",
                reason=Reason.UNAUTHENTICATED,
                remedy="Set wire.token to the value that the nodes have",
            )
        return FullAdmission()
