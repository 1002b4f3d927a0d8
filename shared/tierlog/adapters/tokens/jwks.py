"""JSON Web Tokens (RFC 7519), verified with public keys from a file of the form of a JWKS.

Owns which tokens are believed. Does not own what their subjects may.

Invariants:
    * Only a key of the file is believed, by its id, and only with the one algorithm that the key
      is for, which the settings allow. There are no keys that a token's maker and its reader share.
    * Nothing in a token names a place to get a key from: ``jku``, ``x5u`` and ``jwk`` are passed
      over, and a critical extension is refused, for none is known here.
    * What is said of a bad token shows nothing of it.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import jwt

from tierlog.model.access import Grant, Role, unauthenticated
from tierlog.model.errors import RefusedError
from tierlog.ports.access import TokenClaims
from tierlog.runtime.reloading import Reloading

KEYS_MAX: Final = 64
KEPT_MAX: Final = 1024
FILE_LEN_MAX: Final = 1024 * 1024
_SUBJECT: Final = re.compile(r"[!-~]{1,256}")
_NEEDED: Final = ["exp", "iat", "iss", "aud", "sub"]
_SHARED: Final = "oct"

_WHY: Final[Mapping[type[Exception], str]] = {
    jwt.ExpiredSignatureError: "its token has expired",
    jwt.ImmatureSignatureError: "its token is not valid yet",
    jwt.InvalidIssuerError: "its token is another issuer's",
    jwt.InvalidAudienceError: "its token is for another audience",
    jwt.MissingRequiredClaimError: "its token lacks a claim: exp, iat, iss, aud and sub are needed",
    jwt.InvalidSignatureError: "its token's signature is not right",
    jwt.InvalidAlgorithmError: "its token has another algorithm than its key",
}


class _Kept(NamedTuple):
    """What a token said when it was verified, and with which keys."""

    claims: TokenClaims
    generation: int


class JwksVerifier:
    """A ``TokenVerifier`` of one issuer."""

    def __init__(
        self,
        jwks_file: Path,
        *,
        issuer: str,
        audience: str,
        algorithms: Sequence[str],
        leeway_s: float,
        lifetime_s_max: float,
        roles_claim: str,
        streams_claim: str,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._algorithms = frozenset(algorithms)
        self._leeway_s = leeway_s
        self._lifetime_s_max = lifetime_s_max
        self._roles_claim = roles_claim
        self._streams_claim = streams_claim
        self._keys = Reloading([jwks_file], lambda: _keys_of(jwks_file), what="the issuer's keys")
        # By a digest: tokens themselves are not kept. Verifying one takes 0.1 ms.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def __repr__(self) -> str:
        return f"<JwksVerifier of {self._issuer}, {len(self._keys.get())} keys>"

    def verify(self, token: str) -> TokenClaims:
        """See ``TokenVerifier``."""
        keys, generation, now_ms = self._keys.get(), self._keys.generation, time.time() * 1000
        digest = sha256(token.encode("utf-8", "replace")).digest()
        kept = self._kept.get(digest)
        if kept is not None and kept.generation == generation and now_ms < kept.claims.until_ms:
            return kept.claims
        claims = self._claims_of(self._verified(token, keys))
        self._kept[digest] = _Kept(claims, generation)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return claims

    def _verified(self, token: str, keys: Mapping[str, jwt.PyJWK]) -> Mapping[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            key = keys.get(str(header.get("kid", "")))
            if key is None:
                raise unauthenticated("its token names no key of the issuer")
            if "crit" in header:
                raise unauthenticated("its token has critical extensions, of which none is known")
            algorithm = key.algorithm_name
            if algorithm not in self._algorithms or header.get("alg") != algorithm:
                raise unauthenticated("its token has another algorithm than its key")
            found: Mapping[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._leeway_s,
                options={"require": _NEEDED},
            )
        except jwt.PyJWTError as error:
            raise unauthenticated(_WHY.get(type(error), "its token can't be read")) from None
        except (ValueError, TypeError, RecursionError):
            raise unauthenticated("its token can't be read") from None
        if float(found["exp"]) - float(found["iat"]) > self._lifetime_s_max:
            raise unauthenticated("its token was made for longer than tokens may be")
        return found

    def _claims_of(self, found: Mapping[str, Any]) -> TokenClaims:
        subject = found["sub"]
        if not isinstance(subject, str) or _SUBJECT.fullmatch(subject) is None:
            raise unauthenticated("its token's subject is no name")
        roles = _texts(found.get(self._roles_claim, []))
        # Others may be other programs' of the same issuer.
        known = frozenset(Role(one) for one in roles if one in set(Role))
        try:
            grant = Grant(roles=known, streams=tuple(_texts(found.get(self._streams_claim, []))))
        except RefusedError:
            raise unauthenticated("its token names streams by what is no pattern") from None
        until_s = float(found["exp"]) + self._leeway_s
        return TokenClaims(subject, grant, until_ms=int(until_s * 1000))


def _texts(claim: object) -> list[str]:
    if not isinstance(claim, list) or not all(isinstance(one, str) for one in claim):
        raise unauthenticated("its token has roles or streams that are no list of names")
    return claim


def _keys_of(file: Path) -> Mapping[str, jwt.PyJWK]:
    """Read the keys by their ids. A file with anything else than public keys is refused whole."""
    with file.open("rb") as opened:
        data = opened.read(FILE_LEN_MAX + 1)
    if len(data) > FILE_LEN_MAX:
        raise ValueError("a file of keys so long")
    document = json.loads(data)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not 0 < len(listed) <= KEYS_MAX:
        raise ValueError("no list of keys")
    keys: dict[str, jwt.PyJWK] = {}
    for one in listed:
        if not isinstance(one, dict) or not isinstance(one.get("kid"), str):
            raise ValueError("a key without an id")  # noqa: TRY004 - all of it is one kind
        if one.get("kty") == _SHARED or "d" in one:
            raise ValueError("a key that is not public")
        if one.get("use", "sig") != "sig":
            continue
        if one["kid"] in keys:
            raise ValueError("two keys with one id")
        try:
            keys[one["kid"]] = jwt.PyJWK.from_dict(one)
        except (jwt.PyJWTError, KeyError, TypeError) as error:
            raise ValueError("a key of an unknown kind") from error
    return keys
