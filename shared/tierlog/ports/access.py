"""What says whose token it is. An adapter knows the format; nobody else looks into a token."""

from typing import NamedTuple, Protocol

from tierlog.model.access import Grant


class TokenClaims(NamedTuple):
    """What a token that was verified says."""

    subject: str
    grant: Grant
    """What the token itself grants; the settings may say otherwise of its subject."""
    until_ms: int
    """When it is believed no more."""


class TokenVerifier(Protocol):
    """Verifies tokens with keys that may change meanwhile."""

    def verify(self, token: str) -> TokenClaims:
        """Return what the token says, or raise ``RefusedError`` UNAUTHENTICATED."""
        ...
