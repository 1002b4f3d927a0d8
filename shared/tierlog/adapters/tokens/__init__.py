"""Tokens that an issuer signs, by PyJWT; only here is its library imported."""

from tierlog.adapters.tokens.jwks import JwksVerifier

__all__ = ["JwksVerifier"]
