"""Tokens: fixed algorithms, issuer, audience and expiry; `none` refused; keys that rotate.

The threat: "fixed algorithm list, exp/aud/iss/kid checked, `none` refused; constant-time compare".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

import jwt
import pytest

from tests.security.making import AUDIENCE, ISSUER, Issuer, claims_of
from tierlog.model.access import Grant, Role
from tierlog.model.errors import Reason, RefusedError


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "jwks.json")


def refused(verifier, token, match=""):
    with pytest.raises(RefusedError, match=match) as caught:
        verifier.verify(token)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    told = str(caught.value)
    assert not any(part and part in told for part in token.split("."))
    return told


def encoded(value) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def test_a_good_token_says_who_and_what(issuer):
    token = issuer.token("alice", roles=("producer", "other-program"), streams=("orders*",))
    claims = issuer.verifier().verify(token)
    assert claims.subject == "alice"
    assert claims.grant == Grant(roles=frozenset({Role.PRODUCER}), streams=("orders*",))


def test_one_that_expired(issuer):
    now = int(time.time())
    verifier = issuer.verifier(leeway_s=5.0)
    refused(verifier, issuer.token(iat=now - 100, exp=now - 6), "has expired")
    assert verifier.verify(issuer.token(iat=now - 100, exp=now - 1)).subject == "alice"


def test_one_that_is_kept_expires_too(issuer, monkeypatch):
    verifier, now = issuer.verifier(leeway_s=0.0), time.time()
    token = issuer.token(exp=int(now) + 60)
    verifier.verify(token)
    monkeypatch.setattr("tierlog.adapters.tokens.jwks.time.time", lambda: now + 61)
    monkeypatch.setattr(jwt.api_jwt, "datetime", _later(61))
    refused(verifier, token, "has expired")


def _later(seconds):
    import datetime as dt

    class Later(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return dt.datetime.now(tz) + dt.timedelta(seconds=seconds)

    return Later


def test_one_that_is_not_valid_yet(issuer):
    now = int(time.time())
    refused(issuer.verifier(), issuer.token(nbf=now + 60), "not valid yet")


def test_one_without_a_signature(issuer):
    claims = claims_of("alice", roles=("admin",), streams=("*",))
    for alg in ("none", "None", "NONE", ""):
        head = encoded({"alg": alg, "typ": "JWT", "kid": "k1"})
        refused(issuer.verifier(), f"{head}.{encoded(claims)}.", "another algorithm|can't be read")
    signed = issuer.token().rpartition(".")[0]
    refused(issuer.verifier(), f"{signed}.", "signature|can't be read")


@pytest.mark.parametrize("kid", ["k1", "rsa"])
def test_one_signed_with_the_public_key_as_a_shared_secret(issuer, kid):
    issuer.add("rsa", kind="RS256")
    issuer.publish()
    head = encoded({"alg": "HS256", "typ": "JWT", "kid": kid})
    body = f"{head}.{encoded(claims_of('alice', roles=('admin',), streams=('*',)))}"
    for secret in (issuer.public_pem(kid), json.dumps(issuer.public(kid)).encode()):
        code = hmac.new(secret, body.encode(), hashlib.sha256).digest()
        refused(issuer.verifier(), f"{body}.{encoded(code)}", "another algorithm")


def test_one_with_the_algorithm_of_another_key(issuer):
    issuer.add("rsa", kind="RS256")
    issuer.publish()
    claims = claims_of("alice")
    wrong = jwt.encode(claims, issuer.keys["rsa"], algorithm="RS256", headers={"kid": "k1"})
    refused(issuer.verifier(), wrong, "another algorithm")
    right = jwt.encode(claims, issuer.keys["rsa"], algorithm="RS256", headers={"kid": "rsa"})
    assert issuer.verifier().verify(right).subject == "alice"
    other = jwt.encode(claims, issuer.keys["rsa"], algorithm="RS512", headers={"kid": "rsa"})
    refused(issuer.verifier(algorithms=("ES256", "RS256", "RS512")), other, "another algorithm")
    refused(issuer.verifier(algorithms=("ES256",)), right, "another algorithm")


def test_one_of_another_issuer_or_for_another_audience(issuer, tmp_path):
    refused(issuer.verifier(), issuer.token(iss="https://other.test"), "another issuer")
    refused(issuer.verifier(), issuer.token(aud="somebody-else"), "another audience")
    refused(issuer.verifier(), issuer.token(aud=["a", "b"]), "another audience")
    assert issuer.verifier().verify(issuer.token(aud=["a", AUDIENCE])).subject == "alice"
    stranger = Issuer(tmp_path / "other.json")  # signs with a key of its own under the same id
    refused(issuer.verifier(), stranger.token(iss=ISSUER), "signature is not right")


@pytest.mark.parametrize("claim", ["exp", "iat", "iss", "aud", "sub"])
def test_one_that_lacks_a_claim(issuer, claim):
    refused(issuer.verifier(), issuer.token(**{claim: None}), "lacks a claim|issuer|audience")


def test_one_that_was_made_for_too_long(issuer):
    now = int(time.time())
    refused(
        issuer.verifier(lifetime_s_max=3600.0),
        issuer.token(iat=now, exp=now + 3601),
        "for longer than tokens may be",
    )


@pytest.mark.parametrize(
    "header",
    [{"kid": "k2"}, {"kid": ""}, {"kid": "../../etc/passwd"}, {"kid": "k1' OR 1=1"}],
)
def test_one_that_names_no_key_of_the_file(issuer, header):
    refused(issuer.verifier(), issuer.token(header=header), "names no key")


def test_one_that_brings_its_own_key(issuer, tmp_path):
    stranger = Issuer(tmp_path / "other.json")
    places = {
        "jwk": stranger.public("k1"),
        "jku": "https://attacker.test/jwks.json",
        "x5u": "https://attacker.test/cert.pem",
    }
    refused(issuer.verifier(), stranger.token(header=places), "signature is not right")


def test_one_with_extensions_that_must_be_understood(issuer):
    token = issuer.token(header={"crit": ["b64"], "b64": True})
    refused(issuer.verifier(), token, "critical extensions|can't be read")


@pytest.mark.parametrize("sub", ["", " ", "a b", "a\nb", "x" * 257, "ä"])
def test_one_whose_subject_is_no_name(issuer, sub):
    refused(issuer.verifier(), issuer.token(sub), "subject is no name")


@pytest.mark.parametrize(
    "changes",
    [
        {"tierlog_roles": "admin"},
        {"tierlog_roles": {"admin": True}},
        {"tierlog_roles": [["admin"]]},
        {"tierlog_streams": "*"},
        {"tierlog_streams": ["../*"]},
        {"tierlog_streams": [1]},
    ],
)
def test_one_whose_grant_is_of_another_form(issuer, changes):
    refused(issuer.verifier(), issuer.token(**changes), "roles or streams|names streams")


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "a.b.c", "a.b.c.d.e", "\0", "é", "x" * 8000, "[" * 8000,
     f"{encoded(b'[' * 4000)}.{encoded({})}.{encoded(b'')}"],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_token(issuer, token):
    with pytest.raises(RefusedError) as caught:
        issuer.verifier().verify(token)
    assert caught.value.reason is Reason.UNAUTHENTICATED


def test_keys_rotate_without_a_restart(issuer):
    verifier = issuer.verifier()
    old = issuer.token("old")
    assert verifier.verify(old).subject == "old"
    issuer.add("k2")
    new = issuer.token("new", kid="k2")
    refused(verifier, new, "names no key")
    issuer.publish()
    assert [verifier.verify(one).subject for one in (old, new)] == ["old", "new"]
    issuer.publish("k2")
    # Also one that was verified, and kept, before its key left the file.
    refused(verifier, old, "names no key")
    assert verifier.verify(new).subject == "new"


def test_a_file_that_is_half_written_leaves_the_keys_that_there_were(issuer):
    verifier = issuer.verifier()
    issuer.file.write_text('{"keys": [', encoding="utf-8")
    assert verifier.verify(issuer.token()).subject == "alice"
    issuer.file.unlink()
    assert verifier.verify(issuer.token("bob")).subject == "bob"


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"kty": "oct", "k": "c2VjcmV0", "kid": "k1"}],
        [{"kty": "EC", "kid": "k1"}],
        [{"kty": "EC"}],
        ["k1"],
    ],
    ids=["none", "shared", "broken", "without-id", "text"],
)
def test_a_file_with_anything_but_public_keys_is_refused(issuer, keys):
    issuer.file.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    with pytest.raises(RefusedError, match="can't be read"):
        issuer.verifier()


def test_a_file_with_private_or_double_keys_is_refused(issuer):
    private = jwt.algorithms.ECAlgorithm.to_jwk(issuer.keys["k1"], as_dict=True)
    for keys in ([{**private, "kid": "k1"}], [issuer.public("k1"), issuer.public("k1")]):
        issuer.file.write_text(json.dumps({"keys": keys}), encoding="utf-8")
        with pytest.raises(RefusedError, match="can't be read") as caught:
            issuer.verifier()
        assert private["d"] not in str(caught.value)
