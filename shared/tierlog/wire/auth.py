"""Who may speak on the wire. One interface; what stands behind it is chosen in wiring."""

import hmac
from typing import Protocol

from tierlog.model.errors import Reason, RefusedError
from tierlog.wire.messages import AUTH_NONE, AUTH_TOKEN, Credentials


class Authenticator(Protocol):
    """Decides over a HELLO."""

    def check(self, credentials: Credentials, *, role: str, peer: str) -> None:
        """Return, or raise ``RefusedError`` UNAUTHENTICATED or PERMISSION_DENIED."""
        ...


class OpenAuthenticator:
    """Lets everybody in who shows nothing: for loopback and for tests."""

    def check(self, credentials: Credentials, *, role: str, peer: str) -> None:
        del role
        if credentials.method != AUTH_NONE:
            raise RefusedError(
                f"{peer} authenticates by {credentials.method[:40]!r}, which is not set up here",
                reason=Reason.UNAUTHENTICATED,
                remedy="Set wire.token on both sides, or on neither",
            )


class TokenAuthenticator:
    """Lets in who knows the shared token."""

    def __init__(self, token: bytes) -> None:
        assert token, "an empty token protects nothing"
        self._token = token

    def check(self, credentials: Credentials, *, role: str, peer: str) -> None:
        del role
        known = hmac.compare_digest(credentials.data, self._token)
        if credentials.method != AUTH_TOKEN or not known:
            raise RefusedError(
                f"{peer} did not show the token of this cluster",
                reason=Reason.UNAUTHENTICATED,
                remedy="Set wire.token to the value that the nodes have",
            )
